"""What `train.py` does with peers that leave, die or give no answer; nothing runs on Ray."""

import contextlib
import json
import os
import signal

import numpy as np
import pytest
from local_actors import LocalActors, Pending
from test_peers_law import PACES, SIZE, config_of, noise  # noqa: F401 (a fixture)

from decent_jax.actors.handles import Lost, Silent
from decent_jax.ground.errors import Interrupted, TrainingFailed
from decent_jax.ground.run_folder import load_run
from decent_jax.peers import peer_run
from decent_jax.peers.__main__ import main
from decent_jax.peers.crew import Crew
from decent_jax.peers.driver import Driver, message_bytes
from decent_jax.peers.peer import Peer
from decent_jax.peers.roster import RosterLink

STEPS = 100


class Trainee:
    """In place of a peer: trains until a test sets how it ends."""

    def __init__(self, place, roster, secret):
        self.place, self.told = place, []
        self.roster = RosterLink(roster, secret, 30.0)
        self.ends = Pending()

    def train(self):
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends

    def leave(self, how):
        self.told.append(how)

    def published(self):
        return None


class Session:
    """A crew of stand-ins in a folder, and what it says."""

    def __init__(self, folder, before=(), count=4):
        config = config_of()
        config.peers.count = count
        self.said, self.folder = [], folder
        self.actors = LocalActors({Peer: Trainee})
        self.crew = Crew(config, folder, STEPS, dict(before), self.said.append, self.actors)
        self.crew.begin(("127.0.0.1", 9))
        (folder / "peers").mkdir(exist_ok=True)
        (folder / "config.json").touch()

    def peer(self, slot):
        """The stand-in that has the slot now."""
        return self.crew.live[slot].actor.there

    def resize(self, count):
        assert main(["resize", "--workdir", str(self.folder), "--count", str(count)]) == 0
        self.crew.resize()


@pytest.fixture
def session(tmp_path):
    """Four peers."""
    return Session(tmp_path)


def test_a_run_whose_peers_have_all_left_resumes_from_their_checkpoints(tmp_path):
    """They save when they leave. As peers that join they would forget these checkpoints."""

    def started(entries):
        """{slot: whether it joins}, of a resumed run of three."""
        before = {"peers": entries, "streams": 4}
        crew = Session(tmp_path, before, count=3).crew
        joins = {slot: one.actor.there.place.start is not None for slot, one in crew.live.items()}
        return joins, peer_run.known_steps(tmp_path, before)

    for slot, step in (("0", 12), ("1", 15)):
        (tmp_path / "peers" / slot / "checkpoints" / str(step)).mkdir(parents=True)
    entries = {"0": {"alive": False, "steps": 11}, "1": {"alive": False, "steps": 14}}
    entries["2"] = {"alive": False, "steps": 9}
    assert started(entries) == ({0: False, 1: False, 2: True}, {0: 12, 1: 15, 2: 9})
    entries["1"]["alive"] = True  # it has what 0 left to the others
    assert started(entries) == ({0: True, 1: False, 2: True}, {0: 11, 1: 15, 2: 9})


def test_peers_that_leave_are_replaced_where_more_are_wanted_again(session):
    crew = session.crew
    session.resize(2)
    assert [session.peer(slot).told for slot in range(4)] == [[], [], ["leave"], ["leave"]]
    session.resize(3)  # the two have not left yet
    assert sorted(crew.live) == [0, 1, 2, 3, 4]
    session.peer(3).ends = Lost(RuntimeError(), killed=True)
    crew.collect()  # it was killed on its way out, and is not replaced
    assert sorted(crew.live) == [0, 1, 2, 4]
    lost = session.peer(1)
    lost.ends = Lost(RuntimeError(), killed=True)
    crew.collect()
    assert sorted(crew.live) == [0, 1, 2, 4] and session.peer(1) is not lost
    session.peer(2).ends = {"how": "leave", "steps": 7}
    crew.collect()
    assert sorted(crew.live) == [0, 1, 4] and crew.gone == {2, 3}


@pytest.mark.parametrize("error", [Lost(ValueError("no number"), False), Silent("gives no answer")])
def test_of_a_peer_that_has_failed_no_process_stays(error, session):
    """Ray also says that an actor is lost when its host cannot be reached for a while."""
    actor = session.crew.live[1].actor
    actor.there.ends = error
    session.crew.collect()
    assert actor.killed and session.crew.live[1].actor is not actor
    assert str(error) in session.said[0]


@pytest.mark.parametrize(("leaves", "stays"), [(False, True), (True, False)])
def test_a_peer_that_lags_is_replaced(leaves, stays, session):
    """However often; only deaths count."""
    if leaves:
        session.resize(3)
    actor = session.crew.live[3].actor
    actor.there.ends = {"how": "lag", "steps": 3}
    session.crew.collect()
    assert actor.killed and (3 in session.crew.live) is stays and not session.crew.deaths


def test_a_peer_is_replaced_as_often_as_the_config_says(session):
    restarts = session.crew.config.peers.restarts
    for _ in range(restarts + 1):
        assert 1 in session.crew.live
        session.peer(1).ends = Lost(RuntimeError(), killed=True)
        session.crew.collect()
    assert 1 not in session.crew.live and session.crew.deaths[1] == restarts + 1


@pytest.mark.parametrize(
    ("ready", "late", "why"),
    [(False, False, "begun to train"), (True, False, "silent_s"), (True, True, "stop_s")],
)
def test_a_peer_that_is_ended_is_told_the_true_reason(ready, late, why, session):
    """Who still joins when the others end, after 2 s, has not exceeded peers.stop_s, 60 s."""
    crew = session.crew
    actors = [one.actor for one in crew.live.values()]
    crew.looked = {k: {"ready": ready, "member": False, "steps": 3} for k in crew.live}
    crew.kill_the_rest(late)
    assert len(session.said) == 4 and all(why in line for line in session.said)
    assert sum(name in session.said[0] for name in ("begun to train", "silent_s", "stop_s")) == 1
    assert all(actor.killed for actor in actors) and crew.unsaved == 4 and not crew.live


# --- Whole sessions -------------------------------------------------------------------------------


class Reporting(Trainee):
    """It reports once, as one that trains."""

    steps = 3

    def train(self):
        report = {"steps": self.steps, "met": 1, "loss": 1.0}
        self.roster.call("beat", self.place.slot, self.place.incarnation, ("", 0), report)
        return super().train()


class Stopped(Reporting):
    """Somebody interrupts `train.py` while it trains, and it does not end."""

    def __init__(self, *args):
        super().__init__(*args)
        self.signals = [signal.SIGINT] if self.place.slot == 3 else []  # a second one ends at once

    def train(self):
        if self.signals:
            os.kill(os.getpid(), self.signals.pop())
        return super().train()


class Ended(Reporting):
    """It has made all steps, and its host is gone."""

    steps = 8

    def __init__(self, *args):
        super().__init__(*args)
        self.ends = {"how": "end", "steps": 8}


class Trained(Ended):
    """One that gives its last parameters."""

    def published(self):
        return [np.ones(SIZE, np.float32)]


@contextlib.contextmanager
def driven(folder, kind, **times):
    config = config_of()
    config.peers.update(times)
    with peer_run.open_run(config, folder) as (experiment, work):
        work.config = config
        yield Driver(config, experiment, work, {}, LocalActors({Peer: kind}), "127.0.0.1")


def test_an_interrupted_run_says_how_many_peers_have_not_saved(tmp_path):
    with driven(tmp_path, Stopped, stop_s=1e-3) as driver:
        with pytest.raises(Interrupted, match="all but 4 peers") as stopped:
            driver.run()
        assert stopped.value.code == 130 and driver.crew.unsaved == 4


def test_an_end_without_parameters_is_one_sentence(tmp_path):
    """Such as when the hosts of all peers end with the run."""
    with driven(tmp_path, Ended) as driver, pytest.raises(TrainingFailed, match="gave its last"):
        driver.run()


def test_an_extended_run_knows_how_good_the_last_model_was(tmp_path):
    with driven(tmp_path, Trained) as driver:
        driver.run()
    *_, row = load_run(tmp_path).rows
    assert json.loads((tmp_path / "peers.json").read_text())["best"] == row["eval/loss"]


@pytest.mark.parametrize(("mixes", "numbers"), [(True, 13), (False, 10)])
def test_a_message_has_the_model_state_that_peers_average(mixes, numbers):
    """Such as the statistics of batch norm."""
    copy = {"w": np.zeros((1, 2, 5))}, {"mean": np.zeros((1, 3))} if mixes else {}
    assert message_bytes("bfloat16", copy) == 2 * numbers
