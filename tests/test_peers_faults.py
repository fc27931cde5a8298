"""What could go wrong between peers, and does not; stand-ins take the place of Ray."""

import contextlib
import queue
import threading

import numpy as np
import pytest
from test_peers_law import PACES, InProcess, config_of, noise  # noqa: F401 (a fixture)

from decent_jax.peers.between import NotJoined
from decent_jax.peers.peer import Peer
from decent_jax.peers.setup import Place, open_peer


@pytest.fixture
def in_process(tmp_path):
    """A peer without Ray, of a run of 8 steps, at its beginning."""
    config = config_of("float32", 8, "swarm", weighted=False)
    place = Place(config.to_dict(), str(tmp_path), 0, 0, None, len(PACES))
    with open_peer(place) as (experiment, _):
        peer = InProcess(place, experiment, 8)
        yield peer
        peer.between.end(peer.t, peer.state)


def actor_of(peer, **attributes):
    """The actor of a peer, with what these tests need of it."""
    actor = Peer.__new__(Peer)
    actor._place, actor._peers = peer.place, peer.place.config["peers"]
    actor._between, actor._pulse, actor._meetings = peer.between, peer.pulse, peer.meetings
    actor._seconds, actor._leaving = {}, None
    actor.__dict__ |= attributes
    return actor


class Loss:
    """Of a step that the device makes when somebody waits for it."""

    made = False

    def __init__(self, t):
        self.t = t

    def __add__(self, _):
        return self

    def block_until_ready(self):
        self.made = True

    def __array__(self, dtype=None, copy=None):
        assert self.made, "a report must not wait for a step"
        return np.array([self.t], dtype)


def test_a_report_does_not_wait_for_the_device(in_process):
    """Otherwise a peer whose steps take longer than peers.silent_s is silent during each."""
    actor = actor_of(in_process)
    assert "loss" not in actor.report()
    for t in range(3):
        in_process.between.step(
            lambda state, _, t: (state, {"loss": Loss(t)}), in_process.state, None, t
        )
        assert actor.report().get("loss") == (t - 1 if t else None)


@pytest.mark.parametrize("leaving", ["stop", "leave", None])
def test_who_ends_before_it_has_joined_saves_nothing(leaving, in_process, monkeypatch):
    """Its parameters are those of the seed or an old checkpoint; a resumed run would meet them."""
    peer = in_process
    monkeypatch.setattr(peer.between, "_join", lambda: pytest.fail("it must end first"))
    assert not peer.between.over(0)
    peer.between.leaving = leaving
    peer.pulse.heard(8 * len(PACES) if leaving is None else 0, 0)  # all steps are done
    with pytest.raises(NotJoined):
        peer.between.over(0)


def test_a_peer_that_has_not_joined_takes_no_part_in_the_end(in_process, monkeypatch):
    def trains(*_):
        raise NotJoined

    @contextlib.contextmanager
    def opened(place):
        yield in_process.experiment, None

    monkeypatch.setattr("decent_jax.peers.peer.open_peer", opened)
    monkeypatch.setattr("decent_jax.peers.peer.loop.train_and_evaluate", trains)
    place = in_process.place._replace(start=5)
    actor = actor_of(
        in_process, _place=place, _stopped=threading.Event(), _jobs=queue.SimpleQueue()
    )
    assert actor.train() == {"steps": 5, "how": "stop"}  # "end" would count it as the result


def test_a_peer_that_stops_with_all_others_does_not_leave(in_process):
    """A launcher that ends a job sends SIGTERM to `train.py` and to each peer, in any order."""
    actor = actor_of(in_process)
    actor.leave("leave")
    assert in_process.between.leaving == "leave"
    actor.leave("stop")
    actor.leave("leave")
    assert in_process.between.leaving == actor._leaving == "stop"
