"""What could go wrong between peers, and does not; stand-ins take the place of Ray."""

import numpy as np
import pytest
from test_peers_law import PACES, InProcess, config_of, noise  # noqa: F401 (a fixture)

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
