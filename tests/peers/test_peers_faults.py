"""What could go wrong boundary peers, and does not; stand-ins take the place of Ray."""

import json
import threading
import tracemalloc

import numpy as np
import pytest
from ml_collections import ConfigDict
from test_peers_law import (
    PACES,
    make_step_of,
    noise,  # noqa: F401 (a fixture)
    peer_in_process,  # noqa: F401 (a fixture)
)

from decent_jax.ground import connections
from decent_jax.peers import events
from decent_jax.peers.driver import Aggregate
from decent_jax.peers.exchange import BROKEN, Asker
from decent_jax.peers.membership import Membership, MembershipClient, Reporter, state_to_join
from decent_jax.peers.peer import Peer
from decent_jax.peers.protocol import JoinState
from decent_jax.peers.step_boundary import NotJoined

NOWHERE, SECRET = ("127.0.0.1", 9), b"secret"


class Near:
    """The way to a membership that is in this process."""

    def __init__(self, membership):
        self.membership = membership

    def call(self, method, *args):
        return getattr(self.membership, method)(*args)


def reporter_of(peer, membership, clock=lambda: 0.0, **peers):
    """The reports of a peer, which go to the object ``membership``."""
    own = peer.place.config["peers"] | peers
    place = peer.place._replace(config=peer.place.config | {"peers": own})
    asker = Asker(peer.averager, b"", own)
    peer.boundary.ready = True
    leave = lambda how: setattr(peer.boundary, "leaving", how)  # noqa: E731
    given = place, NOWHERE, Near(membership), peer.boundary, peer.common, asker, leave
    return Reporter(*given, clock=clock)


def test_a_report_does_not_wait_for_the_device(in_process):
    """Otherwise a peer whose steps take longer than peers.silent_s is silent during each."""
    reporter = reporter_of(in_process, None)
    for t in range(4):
        assert reporter.report()["losses"] == (sum(range(t - 1)), max(t - 1, 0))
        make_step_of(in_process)


def test_a_row_has_what_peers_reported_and_the_mean_loss_since_the_row_before(in_process):
    """As in any other run; a peer that made no step since then does not count."""
    aggregate = Aggregate(ConfigDict(in_process.place.config), in_process.experiment)

    def row(*losses):
        peers = [
            {"rank": k, "generation": 0, "alive": True, "averaged": 0, "losses": found}
            for k, found in enumerate(losses)
        ]
        found = aggregate.row(peers, 1, 1, 1.0)
        return tuple(found[f"train/{name}"] for name in ("loss", "loss_min", "loss_max"))

    assert row((6.0, 3), (4.0, 1), (0.0, 0)) == (10 / 4, 2.0, 4.0)
    assert row((10.0, 5), (4.0, 1), (1.0, 1)) == (5 / 3, 1.0, 2.0)
    reports = [
        {"alive": True, "averaged": 3, "lost": 2, "distance": 0.3, "stale": 2, "steps": 5},
        {"alive": False, "averaged": 4, "distance": 0.9, "stale": 7, "steps": 6},
        {"alive": True, "averaged": 1, "declined": 1, "distance": 0.5, "steps": 7},
        {"alive": True, "steps": 8},  # it has not reported yet
    ]
    reports = [
        {"rank": k, "generation": k, "losses": (0, 0)} | one for k, one in enumerate(reports)
    ]
    found = aggregate.row(reports, 12, 4, 2.0)
    assert all(np.isnan(found.pop(f"train/loss{name}")) for name in ("", "_min", "_max"))
    own = [("steps", 5, 7), ("generation", 0, 2), ("stale", 2, 0)]
    assert found == pytest.approx(
        {
            "train/learning_rate": 0.01,
            # Two random peers of n are apart by 2 n / (n - 1) of the mean square from the mean.
            "train/consensus_distance_relative": np.sqrt((0.3**2 + 0.5**2) / 2 / 4),
            **{"perf/step_time_s": 0.5, "perf/examples_per_s": 16.0, "peers/live": 2.0},
            **{"peers/averaged": 4.0, "peers/declined": 1.0, "peers/lost": 2.0},
            **{"peers/undecoded": 0.0},
            **{f"peers/0/{name}": value for name, value, _ in own},
            **{f"peers/2/{name}": value for name, _, value in own},
        }
    )


def test_a_resume_holds_no_log_in_memory(in_process):
    """A long run's has more than a GiB."""
    folder = in_process.place.folder
    folder.mkdir(parents=True, exist_ok=True)
    start = json.dumps({"start": 0, "origin": None}) + "\n"
    lines = [f'{{"t": {t}, "rate": {t // 4}}}\n' for t in range(100_000)]
    (folder / "events-3.jsonl").write_text(start + "".join(lines))
    (folder / "events-4.jsonl").write_text(start)
    tracemalloc.start()
    assert in_process.boundary.begin(99_000) == 99_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    in_process.t = 99_000
    make_step_of(in_process)
    first, *_ = events.read(events.path(folder, in_process.place.generation))
    assert first["origin"] == {"peer": "0.3", "t": 99_000, "when": "checkpoint"}
    assert peak < 1e6


@pytest.mark.parametrize("leaving", ["stop", "leave", None])
def test_who_ends_before_it_has_joined_saves_nothing(leaving, in_process):
    """Its parameters are initial or outdated; a resumed run would average with them."""
    peer = in_process
    peer.boundary.join = lambda: pytest.fail("it must end first")
    assert not peer.boundary.over(0)
    peer.boundary.leaving = leaving
    peer.common.update(8 * len(PACES) if leaving is None else 0, 0)  # all steps are done
    with pytest.raises(NotJoined):
        peer.boundary.over(0)


@pytest.mark.parametrize("told", [("stop",), ("leave", "stop", "leave")])
def test_a_peer_that_has_not_joined_takes_no_part_in_the_end(told, in_process):
    """As "end" it would count as the result. Who stops with all others does not leave: a launcher
    that ends a job sends SIGTERM to `train.py` and to each peer, in any order."""
    place = in_process.place._replace(rank=1, start=5)
    peer = Peer(place, NOWHERE, b"secret", host=lambda: "127.0.0.1")
    for how in told:
        peer.leave(how)
    assert peer.train() == {"steps": 5, "how": "stop"}


@pytest.mark.parametrize("others", [0, 1])
def test_the_only_peer_leaves_at_once(others, in_process):
    """With others it would first average with one of them, or wait 2 peers.exchange_s."""
    membership = Membership(5.0, {})
    for rank in range(1 + others):
        membership.add(rank, 0, False)
        membership.beat(rank, 0, NOWHERE, {"steps": 3})
    assert reporter_of(in_process, membership).beat()
    in_process.boundary.leaving = "leave"
    assert in_process.boundary.over(8) is not bool(others)


def state_for(peer, membership, **more):
    """The state of a peer in rank 1 that joins; nobody gives it one unless ``ask`` does."""
    own = peer.place.config["peers"] | {"start_s": 30.0} | more.pop("peers", {})
    place = peer.place._replace(rank=1, config=peer.place.config | {"peers": own})
    given = {"ask": lambda *_: None, "wait": lambda _: pytest.fail("it must not wait")} | more
    return state_to_join(place, Near(membership), b"", **given)


def test_a_peer_that_joins_waits_for_one_that_trains(in_process):
    """At the start of a resumed run the others restore and compile, perhaps for longer than it."""
    membership, waits = Membership(5.0, {}), []
    membership.add(0, 0, False)
    membership.add(1, 0, True)

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            membership.beat(0, 0, NOWHERE, {"steps": 7})

    def ask(address, secret, seconds):
        assert address == NOWHERE
        return JoinState("0.0", 7, [])

    joined = state_for(in_process, membership, wait=wait, ask=ask)
    assert joined is not None and joined.donor == "0.0" and len(waits) == 3


def test_peers_that_all_join_begin_with_what_they_have(in_process):
    """Of two that were killed at once, each would wait for the other."""
    membership = Membership(5.0, {})
    membership.add(0, 1, True)
    membership.add(1, 0, True)
    assert state_for(in_process, membership) is None


def test_a_peer_waits_for_a_state_no_longer_than_it_may(in_process):
    membership, now = Membership(5.0, {}), [0.0]
    membership.add(0, 0, False)

    def wait(seconds):
        now[0] += 10.0

    assert state_for(in_process, membership, clock=lambda: now[0], wait=wait) is None
    assert now[0] == 30.0
    with pytest.raises(NotJoined):
        state_for(in_process, membership, leaving=lambda: "stop")


def test_who_gives_no_state_is_passed_over(in_process):
    membership = Membership(5.0, {})
    for rank in (0, 2):
        membership.add(rank, 0, False)
        membership.beat(rank, 0, ("127.0.0.1", rank), {"steps": 7})
    asked = []

    def ask(address, secret, seconds):
        asked.append(address)
        if len(asked) == 1:
            raise EOFError
        return JoinState("2.0", 7, [])

    joined = state_for(in_process, membership, ask=ask)
    assert joined is not None and len(set(asked)) == 2


def test_a_state_is_given_at_a_boundary_and_refused_after_the_end(in_process):
    boundary = in_process.boundary
    wanted = boundary.want_state()
    make_step_of(in_process)
    assert wanted.result(0).t == 0
    boundary.end(1, in_process.state)
    with pytest.raises(RuntimeError):
        boundary.want_state().result(0)


BOTH = [("0.0", NOWHERE), ("1.0", NOWHERE)]


class Answers:
    """A membership that gives these answers to reports, or raises them."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def beat(self, *_):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_unreachable_membership_is_asked_again(in_process):
    """The thread that reports must not end without a word: the peer would never know the end."""
    reporter = reporter_of(in_process, Answers((0, BOTH), TimeoutError(), (8, BOTH)))
    assert reporter.beat() and reporter.beat() and reporter.beat()
    assert in_process.common.progress() == 8 // len(PACES)


def test_the_connection_to_the_membership_may_break():
    membership, served = Membership(5.0, {1: 4}), []
    membership.add(0, 0, False)
    membership.add(1, 0, True)

    def serve(connection):
        served.append(connection)
        membership.serve(connection)

    listener, address = connections.listen("127.0.0.1", SECRET, serve)
    with listener:
        link = MembershipClient(address, SECRET, 30.0)
        for steps in (3, 5):
            found = link.call("beat", 0, 0, NOWHERE, {"steps": steps})
            assert found == [steps + 4, [["0.0", list(NOWHERE)]]]
        assert link.call("beat", 0, 1, NOWHERE, {"steps": 3}) is None  # another one has the rank
        assert link.call("is_hopeful") and len(served) == 1
        served[0].close()
        with pytest.raises(BROKEN):
            link.call("members")
        assert link.call("members") == [["0.0", list(NOWHERE)]]
        membership.remove(0)
        assert link.call("members") == [] and not link.call("is_hopeful")
    with pytest.raises(BROKEN):
        MembershipClient(NOWHERE, SECRET, 1.0).call("members")


def test_a_peer_whose_rank_another_one_has_stops(in_process):
    assert not reporter_of(in_process, Answers(None)).beat()
    assert in_process.boundary.leaving == "stop"


@pytest.mark.parametrize(
    ("seconds", "steps", "own", "averages", "goes_on"),
    [
        (6, 16, 0, 0, False),  # stopped
        (4, 16, 0, 0, True),  # not for long
        (6, 4, 0, 0, True),  # nor did it miss much
        (6, 16, 12, 3, True),  # train.py was silent, this peer was not
        (6, 16, 1, 1, False),  # suspended right after an average
        (6, 16, 12, 0, False),  # trained on alone
    ],
)
def test_a_peer_that_was_silent_for_too_long_ends_and_saves_nothing(
    seconds, steps, own, averages, goes_on, in_process
):
    """What it knows is old, unless it kept up: its next average would pull the others back."""
    in_process.averager.publish([np.zeros(3, np.float32)], 0)
    now = [0.0]
    made = 100, 100 + steps  # the first were known before, however long this peer took to begin
    answers = Answers(*((t * len(PACES), BOTH) for t in made))
    reporter = reporter_of(in_process, answers, lambda: now[0], silent_s=5.0, max_lag=8)
    now[0] += 60
    assert reporter.beat()
    now[0] += seconds
    in_process.common.own += own
    in_process.averager.counts["averaged"] += averages
    assert reporter.beat() is goes_on
    assert (
        in_process.averager.snapshot is not None
    ) is goes_on  # the mean is without its old model
    in_process.averager.publish([np.zeros(3, np.float32)], 0)
    assert in_process.averager.agree("1.0-0") is goes_on
    if not goes_on:
        with pytest.raises(NotJoined):
            in_process.boundary.over(8)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_averages_before_a_network_broke_do_not_count(when, in_process):
    """An average between the last answer and the break says nothing about the time since."""
    now = [0.0]
    late = 16 * len(PACES), BOTH
    answers = Answers((0, BOTH), TimeoutError(), TimeoutError(), late)
    reporter = reporter_of(in_process, answers, lambda: now[0], silent_s=5.0, max_lag=8)
    assert reporter.beat()
    in_process.averager.counts["averaged"] += when == "before"
    assert reporter.beat()
    in_process.averager.counts["averaged"] += when == "meanwhile"
    assert reporter.beat()
    in_process.common.own += 12
    now[0] += 6
    assert reporter.beat() is (when == "meanwhile")


def test_reports_end_when_the_peer_does(in_process):
    many = 100_000  # it reports as often as it likes while this thread waits for a core
    beats = Answers(*[(0, BOTH)] * many)
    reporter = reporter_of(in_process, beats, beat_s=0.001)
    thread = threading.Thread(target=reporter.run)
    thread.start()
    while len(beats.answers) == many:
        thread.join(0.001)
    reporter.stopped.set()
    thread.join(10)
    assert not thread.is_alive()
