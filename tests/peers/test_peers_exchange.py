"""Exchanges over real connections: averages, states, and failures."""

import contextlib
import queue
import threading

import numpy as np
import pytest

from decent_jax.ground import connections
from decent_jax.peers import FORMATS, Peers
from decent_jax.peers.exchange import Answerer, Asker, ask_state
from decent_jax.peers.protocol import Averager, Format, JoinState

NOWHERE, SECRET = ("127.0.0.1", 9), b"0123456789abcdef"


class Talker:
    """A peer that averages and does not train; it publishes before every request."""

    def __init__(self, name, form="float32", **config):
        self.config = Peers(**{"exchange_s": 30.0, "silent_s": 5.0} | config)
        self.now, self.willing, self.state = 0.0, True, None
        self.averager = Averager(name, Format(form), self.config.exchange_s, 1e9)
        seed = int(name[0])
        # Copies close enough for the first lattice, and of several shapes.
        self.copy = [
            (0.1 + 1e-4 * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)
            for shape in ((3, 5), (7,), ())
        ]
        self.averager.publish(self.copy, 0)
        self.asker = Asker(self.averager, SECRET, self.config, clock=lambda: self.now)
        self.answerer = Answerer(
            self.averager, self.config.exchange_s, lambda: self.willing, lambda: self.state
        )

    def listen(self, serve=None):
        return connections.listen("127.0.0.1", SECRET, serve or self.answerer.serve)


@pytest.fixture
def talkers():
    """Peers that answer, made by ``talkers(form)``: the first knows the others' addresses."""
    with contextlib.ExitStack() as stack:

        def made(form="float32", serve=None, **config):
            one, other = Talker("0.0", form, **config), Talker("1.0", form)
            listener, address = other.listen(serve)
            stack.enter_context(listener)
            for talker in (one, other):
                talker.averager.update_members({"0.0": NOWHERE, "1.0": address})
            return one, other

        yield made


@pytest.mark.parametrize("form", FORMATS)
def test_both_add_opposite_pulls(form, talkers):
    one, other = talkers(form)
    tries = 0
    while (
        not one.averager.counts["averaged"] and tries < 15
    ):  # a lattice widens until it is decoded
        one.asker.ask()
        tries += 1
    (mine,), (theirs,) = one.averager.take(), taken(other)
    assert mine.theirs.peer == "1.0" and theirs.theirs.peer == "0.0"
    for a, b, ours, partner in zip(mine.pull, theirs.pull, one.copy, other.copy, strict=True):
        np.testing.assert_array_equal(a, -b)
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, (partner - ours) / 2, atol=2e-3)
    assert mine.theirs.name == theirs.theirs.name


def taken(talker):
    """What the answerer adds; its thread settles before the asker has the answer."""
    found = talker.averager.take()
    assert found, talker.averager.counts
    return found


def test_one_connection_serves_many_averages(talkers):
    one, other = talkers()
    for k in range(5):
        one.asker.ask()
        assert one.averager.take() and taken(other)
        for talker in (one, other):
            talker.averager.publish(talker.copy, k)
    assert one.averager.counts["averaged"] == 5 and one.averager.counts["lost"] == 0


def test_a_busy_or_stopping_peer_declines_and_no_snapshot_is_sent(talkers):
    one, other = talkers()
    other.willing = False
    one.asker.ask()
    assert one.averager.counts["declined"] == 1 and one.averager.idle()
    other.willing = True
    assert other.averager.ask()
    one.asker.ask()
    assert one.averager.counts["declined"] == 2 and one.averager.counts["lost"] == 0


def test_a_snapshot_is_encoded_only_after_the_partner_agrees(talkers, monkeypatch):
    """It takes seconds for a large model; most questions of a peer that asks often are declined."""
    encoded, encode = [], Format.encode
    monkeypatch.setattr(
        Format, "encode", lambda *args, **given: encoded.append(1) or encode(*args, **given)
    )
    one, other = talkers("int8")
    other.willing = False
    one.asker.ask()
    assert one.averager.counts["declined"] == 1 and not encoded
    other.willing = True
    one.asker.ask()
    assert one.averager.take() and taken(other) and len(encoded) == 2


def test_nobody_there_is_avoided_for_a_while(talkers):
    one, _ = talkers()
    one.averager.update_members({"0.0": NOWHERE, "2.0": NOWHERE})
    one.asker.ask()
    one.asker.ask()  # nobody is left to ask
    assert one.averager.counts["lost"] == 1 and one.averager.idle()
    one.now += 6.0  # past peers.silent_s
    one.asker.ask()
    assert one.averager.counts["lost"] == 2


def broken(*answers):
    """An answerer that gives these answers, and hangs up."""

    def serve(connection):
        connections.receive(connection)
        for k, answer in enumerate(answers):
            if k:
                connections.receive(connection)
            connections.send(connection, *answer)

    return serve


@pytest.mark.parametrize(
    ("serve", "error"),
    [
        (broken(), None),
        (broken([True]), None),
        (broken([True], [[0.0, "0.0-0", "1.0", 0, 0, True], ()]), (TypeError, ValueError)),
        (broken([True], ["no offer"]), (TypeError, ValueError)),
    ],
)
def test_a_question_that_fails_leaves_no_meeting_under_way(serve, error, talkers, capsys):
    """An asker waits without a limit of its own, so it would never average again."""
    one, _ = talkers(serve=serve)
    with pytest.raises(error) if error else contextlib.nullcontext():
        one.asker.ask()
    assert one.averager.idle() and one.averager.counts["lost"] == 1
    assert "peer 1.0 does not answer" in capsys.readouterr().out


def test_a_partner_that_is_silent_is_given_up(talkers):
    """It hangs in the middle of an average, as a suspended process does."""
    done = threading.Event()

    def serve(connection):
        connections.receive(connection)
        done.wait(30)

    one, _ = talkers(serve=serve, exchange_s=0.2)
    one.asker.ask()
    done.set()
    assert one.averager.idle() and one.averager.counts["lost"] == 1


def test_a_late_acceptance_still_adds_the_half_that_the_partner_added(talkers, capsys):
    """And nobody waits for it."""
    go_on, settled = threading.Event(), queue.SimpleQueue()

    def serve(connection):
        other.now = 1.0
        one.now = 31.0  # so that the asker has no time left when it has sent its last message
        with contextlib.suppress(OSError):
            other.answerer.serve(Held(connection))

    class Held:
        """A connection whose last message waits."""

        def __init__(self, connection):
            self._connection, self._sent = connection, 0

        def send_bytes(self, data):
            if isinstance(data, bytes) and self._sent == 2:  # headers: yes, reply, settled
                settled.put(None)
                go_on.wait(30)
            self._sent += isinstance(data, bytes)
            self._connection.send_bytes(data)

        def __getattr__(self, name):
            return getattr(self._connection, name)

    one, other = talkers(serve=serve)
    one.asker.ask()
    settled.get(timeout=30)  # the partner has added its pull
    assert "peer 1.0 took longer than peers.exchange_s (30 s)" in capsys.readouterr().out
    assert not one.averager.idle() and not one.averager.take()
    assert one.averager.ask(), "it averages with others meanwhile"
    one.averager.give_up("0.0-1", "lost")
    one.averager.update_members({})
    one.asker.ask()
    assert not one.averager.take()
    go_on.set()
    while not (averages := one.averager.take()):
        one.asker.ask()  # asks nobody, but looks whether there is an answer
    np.testing.assert_array_equal(averages[0].pull[0], -taken(other)[0].pull[0])


def test_a_state_is_given_to_who_joins(talkers):
    one, other = talkers()
    address = one.averager.members["1.0"]
    assert ask_state(address, SECRET, 30.0) is None  # it does not train yet
    other.state = JoinState("1.0", 7, other.copy)
    found = ask_state(address, SECRET, 30.0)
    assert found is not None and found[:2] == ("1.0", 7)
    for a, b in zip(found.arrays, other.copy, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(OSError):
        ask_state(NOWHERE, SECRET, 30.0)
