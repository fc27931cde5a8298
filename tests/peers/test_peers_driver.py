"""What `train.py` does with peers that leave, die or give no answer; nothing runs on Ray."""

import contextlib
import json
import os
import re
import signal
import socket

import noise_task
import numpy as np
import pytest
from local_actors import LocalActor, LocalActors, Pending
from refusals import refused, refuses
from test_peers_joining import REPORT
from test_peers_law import PACES, SIZE, config_of, noise  # noqa: F401 (a fixture)

from decent_jax.actors.handles import Lost, Silent
from decent_jax.ground.errors import ConfigError, Interrupted, TrainingFailed
from decent_jax.ground.run_folder import load_run
from decent_jax.peers import Peers, peer_run
from decent_jax.peers.__main__ import main
from decent_jax.peers.driver import Driver, compile_step, message_bytes
from decent_jax.peers.membership import Membership, MembershipClient
from decent_jax.peers.peer import Peer
from decent_jax.peers.step_boundary import number
from decent_jax.peers.supervisor import Supervisor
from decent_jax.train.config import changed, parse
from decent_jax.train.same_data import facts_of
from decent_jax.train.step import make_step
from decent_jax.train.stepper import init

STEPS, NOWHERE = 100, ("127.0.0.1", 9)


class Trainee:
    """In place of a peer: trains until a test sets how it ends."""

    def __init__(self, place, membership, secret):
        self.place, self.told = place, []
        self.membership = MembershipClient(membership, secret, 30.0)
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
    """A supervisor of stand-ins in a folder, and what it says."""

    def __init__(self, folder, before=(), count=4):
        config = config_of()
        config.peers.count = count
        config.ray.update(cpus=2.0, gpus=1.0)
        self.said, self.folder = [], folder
        self.actors = LocalActors({Peer: Trainee})
        self.supervisor = Supervisor(
            parse(config), folder, STEPS, dict(before), self.said.append, self.actors
        )
        self.supervisor.begin(NOWHERE)
        (folder / "peers").mkdir(exist_ok=True)
        (folder / "config.json").touch()

    def peer(self, rank):
        """The stand-in that has the rank now."""
        return self.supervisor.live[rank].actor.there

    def resize(self, count):
        assert main(["resize", "--workdir", str(self.folder), "--count", str(count)]) == 0
        self.supervisor.resize()


@pytest.fixture
def session(tmp_path):
    """Four peers."""
    return Session(tmp_path)


def test_a_run_whose_peers_have_all_left_resumes_from_their_checkpoints(tmp_path):
    """They save when they leave. As peers that join they would forget these checkpoints."""

    def started(entries, count=3):
        """{rank: whether it joins}, of a resumed run of three."""
        before = {"peers": entries, "streams": 5}
        supervisor = Session(tmp_path, before, count).supervisor
        places = {rank: one.actor.there.place for rank, one in supervisor.live.items()}
        for rank, place in places.items():
            assert place.generation == (4 if rank == 1 else 0)  # its logs are not overwritten
            # What all have made is known in steps of the run, and all read their former streams.
            assert (place.num_streams, place.all_steps) == (5, 4 * supervisor.start)
            assert place.start in (None, entries[str(rank)]["steps"])
            assert supervisor.live[rank].actor.options == {
                "log": tmp_path / "peers" / str(rank) / "log.txt",
                **{"sigterm": "leave", "cpus": 2.0, "gpus": 1.0, "threads": 8, "memory": 0.0},
            }
        joins = {rank: place.start is not None for rank, place in places.items()}
        known = peer_run.known_steps(tmp_path, before)
        assert supervisor.start == sum(known.values()) // 4
        return joins, known

    for rank, step in (("0", 12), ("1", 15)):
        (tmp_path / "peers" / rank / "checkpoints" / str(step)).mkdir(parents=True)
    (tmp_path / "peers" / "1" / "events-3.jsonl").touch()
    entries = {"0": {"alive": False, "steps": 11}, "1": {"alive": False, "steps": 14}}
    entries["2"] = {"alive": False, "steps": 9}
    assert started(entries) == ({0: False, 1: False, 2: True}, {0: 12, 1: 15, 2: 9})
    entries["1"]["alive"] = True  # it has what 0 left to the others
    assert started(entries) == ({0: True, 1: False, 2: True}, {0: 11, 1: 15, 2: 9})
    entries["0"]["alive"] = True
    assert started(entries, count=1)[0] == {0: False}


def test_peers_that_leave_are_replaced_where_more_are_wanted_again(session):
    supervisor = session.supervisor
    session.resize(2)
    assert [session.peer(rank).told for rank in range(4)] == [[], [], ["leave"], ["leave"]]
    session.resize(3)  # the two have not left yet
    assert sorted(supervisor.live) == [0, 1, 2, 3, 4]
    session.peer(3).ends = Lost(RuntimeError(), killed=True)
    supervisor.collect()  # it was killed on its way out, and is not replaced
    assert sorted(supervisor.live) == [0, 1, 2, 4]
    lost = session.peer(1)
    lost.ends = Lost(RuntimeError(), killed=True)
    supervisor.collect()
    assert sorted(supervisor.live) == [0, 1, 2, 4] and session.peer(1) is not lost
    session.peer(2).ends = {"how": "leave", "steps": 7}
    supervisor.collect()
    assert sorted(supervisor.live) == [0, 1, 4] and supervisor.gone == {2, 3}


@pytest.mark.parametrize("error", [Lost(ValueError("no number"), False), Silent("gives no answer")])
def test_of_a_peer_that_has_failed_no_process_stays(error, session):
    """Ray also says that an actor is lost when its host cannot be reached for a while."""
    actor = session.supervisor.live[1].actor
    actor.there.ends = error
    session.supervisor.collect()
    assert actor.killed and session.supervisor.live[1].actor is not actor
    assert str(error) in session.said[0]


def test_a_peer_that_cannot_do_what_the_config_asks_ends_the_run_only_where_it_begins(session):
    """As when its host has other data; one that joins later is left out, and the others go on."""
    error = Lost(ConfigError("the training data: 4 records in train.py, 3 records on b"), False)
    session.peer(2).ends = Lost(RuntimeError(), killed=True)
    session.supervisor.collect()
    session.peer(2).ends = error
    session.supervisor.collect()
    assert "3 records on b" in session.said[-2] and sorted(session.supervisor.live) == [0, 1, 2, 3]
    session.peer(3).ends = error
    with refuses("peer 3", "4 records in train.py", "3 records on b", error=ConfigError):
        session.supervisor.collect()


def test_a_peer_opens_the_data_of_train_py_or_none(tmp_path):
    config = parse(config_of())
    with peer_run.open_run(config, tmp_path) as (experiment, _):
        facts = facts_of(config, experiment.task)
    place = peer_run.Place(config, str(tmp_path), 3, 1, 5, 4)
    with peer_run.open_peer(place._replace(data=facts)):
        pass
    for other in (facts | {"the validation data": "9 records"}, facts | {"more": "x"}, {}):
        with (
            refuses("in train.py", socket.gethostname(), error=ConfigError),
            peer_run.open_peer(place._replace(data=other)),
        ):
            pass


@pytest.mark.parametrize(("leaves", "steps"), [(False, 99), (True, 99), (False, 100)])
def test_a_peer_that_lags_is_replaced(leaves, steps, session):
    """However often; only deaths count. Not where it should leave, or all steps are made."""
    if leaves:
        session.resize(3)
    actor = session.supervisor.live[3].actor
    actor.there.ends = {"how": "lag", "steps": 3}
    session.supervisor.status = {2: {"steps": 4 * steps, "generation": 0}}
    session.supervisor.collect()
    stays = not leaves and steps < STEPS
    assert (
        actor.killed and (3 in session.supervisor.live) is stays and not session.supervisor.deaths
    )


def test_nobody_replaces_the_last_peer_and_the_copies_are_of_those_that_give_one(tmp_path):
    """It would have nobody to join."""
    session = Session(tmp_path, count=1)
    actor = session.supervisor.live[0].actor
    actor.there.published = lambda: ["snapshot"]
    silent, without = (LocalActor(Trainee(session.peer(0).place, NOWHERE, b""), {}) for _ in "ab")
    silent.there.ends = Silent("gives no answer")
    silent.there.published = silent.there.train
    assert session.supervisor.snapshots([without, actor, silent]) == [["snapshot"]]
    assert not session.said
    slow = LocalActor(Trainee(session.peer(0).place, NOWHERE, b""), {})
    slow.there.published = slow.there.train
    assert session.supervisor.snapshots([actor, slow]) == [["snapshot"]]
    (words,) = session.said
    assert words.startswith("1 of 2 peers") and "peers.exchange_s (10 s)" in words
    session.peer(0).ends = Lost(RuntimeError(), killed=True)
    session.supervisor.collect()
    assert not session.supervisor.live and session.supervisor.gone == {0}


def test_peers_that_only_could_join_end_with_the_last_that_trained(session):
    """They would be another run, with first parameters; the same command resumes."""
    supervisor, lost = session.supervisor, Lost(RuntimeError(), killed=True)
    for rank in range(3):
        session.peer(rank).ends = lost
        supervisor.collect()
    assert sorted(supervisor.live) == [0, 1, 2, 3]  # which join
    session.peer(0).ends = {"how": "join", "steps": 0}
    supervisor.collect()
    assert supervisor.deaths[0] == 2 and sorted(supervisor.live) == [0, 1, 2, 3]
    actors = [one.actor for one in supervisor.live.values()]
    session.peer(3).ends = lost
    supervisor.collect()
    assert not supervisor.live and all(actor.killed for actor in actors[:3])


def test_what_changes_is_said_once(session):
    now, supervisor = [0.0], session.supervisor
    supervisor.membership = Membership(Peers(silent_s=5.0), 4, {}, lambda: now[0])
    for rank in range(4):
        supervisor.membership.add(rank, int(rank == 1), 0)
        assert supervisor.membership.admits(rank, int(rank == 1), None)
    for seconds, heard in ((0, 4), (6, 1), (1, 1), (0, 4), (6, 1)):
        now[0] += seconds
        for rank in range(heard):
            supervisor.membership.beat(rank, int(rank == 1), NOWHERE, REPORT)
        supervisor.refresh()
    away = [f"peer {k} is silent; the others continue without it" for k in (1, 2, 3)]
    back = [f"peer {k} is back" for k in (1, 2, 3)]
    assert session.said == ["peer 1 trains again, as 1.1", *away, *back, *away]
    assert (
        supervisor.status[0]["member"]
        and not supervisor.status[1]["member"]
        and supervisor.trains()
    )


@pytest.mark.parametrize(("lost", "averaged", "said"), [(2, 0, 0), (3, 0, 1), (9, 1, 0)])
def test_whoever_finishes_no_average_is_told_which_limit_to_raise(lost, averaged, said, session):
    session.supervisor.membership.add(1, 0, 0)
    assert session.supervisor.membership.admits(1, 0, None)
    report = REPORT | {"lost": lost, "averaged": averaged}
    session.supervisor.membership.beat(1, 0, NOWHERE, report)
    for _ in range(2):
        session.supervisor.refresh()
    assert ["peers.exchange_s (10 s)" in words for words in session.said] == [True] * said


def test_a_peer_is_replaced_as_often_as_the_config_says(session):
    restarts = session.supervisor.config.peers.restarts
    for _ in range(restarts + 1):
        assert 1 in session.supervisor.live
        session.peer(1).ends = Lost(RuntimeError(), killed=True)
        session.supervisor.collect()
    assert 1 not in session.supervisor.live and session.supervisor.deaths[1] == restarts + 1


@pytest.mark.parametrize(
    ("ready", "late", "why"),
    [(False, False, "begun to train"), (True, False, "silent_s"), (True, True, "exchange_s")],
)
def test_a_peer_that_is_ended_is_told_the_true_reason(ready, late, why, session):
    """Who still joins when the others end, after 2 s, has not exceeded 6 peers.exchange_s, 60 s."""
    supervisor = session.supervisor
    actors = [one.actor for one in supervisor.live.values()]
    supervisor.status = {k: {"ready": ready, "member": False, "steps": 3} for k in supervisor.live}
    supervisor.kill_the_rest(late)
    assert len(session.said) == 4 and all(why in line for line in session.said)
    named = ("begun to train", "silent_s", "exchange_s")
    assert sum(name in session.said[0] for name in named) == 1
    assert all(actor.killed for actor in actors) and supervisor.unsaved == 4 and not supervisor.live


# --- Whole sessions -------------------------------------------------------------------------------


class Reporting(Trainee):
    """It reports once, as one that trains."""

    steps = 3

    def train(self):
        rank = self.place.rank
        report = REPORT | {"steps": self.steps, "averaged": rank, "lost": 1}
        report["losses"] = rank, 2 * rank
        self.membership.call("admits", rank, self.place.generation, None)
        self.membership.call("beat", rank, self.place.generation, ("", 0), report)
        return super().train()


class Dead(Trainee):
    """It dies at once."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ends = Lost(RuntimeError("no memory"), killed=False)


class Stopped(Reporting):
    """Somebody interrupts `train.py` while it trains, and it does not end."""

    def __init__(self, *args):
        super().__init__(*args)
        self.signals = [signal.SIGINT] if self.place.rank == 3 else []  # a second one ends at once

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
        return [np.full(SIZE, self.place.rank, np.float32)]


class OnItsWay(Trained):
    """It has made 5 of 8 steps when it is first asked how it ended."""

    asked = 0

    def train(self):
        self.asked += 1
        self.steps = 5 if self.asked < 6 else 8
        ended = super().train()
        if self.steps < 8:
            raise Pending
        return ended


@contextlib.contextmanager
def driven(folder, kind, before=(), **times):
    config = config_of()
    config.peers.update(times)
    config.eval.every, config.checkpoint.every = 4, 0
    config = parse(config)
    with peer_run.open_run(config, folder) as (experiment, work):
        work.record.config = config
        given = config, experiment, work, dict(before), LocalActors({Peer: kind})
        yield Driver(*given, "127.0.0.1")


@pytest.mark.parametrize(("kind", "start_s", "is_late"), [(Trainee, 1e-3, True), (Dead, 60, False)])
def test_where_no_peer_trains_the_reason_is_said(kind, start_s, is_late, tmp_path):
    """It takes too long to compile, or it cannot."""
    with driven(tmp_path, kind, start_s=start_s, restarts=1) as driver:
        with pytest.raises(TrainingFailed, match=re.escape(f"{tmp_path}/peers/*/log")) as failed:
            driver.run()
        assert ("peers.start_s (0.001 s)" in str(failed.value)) is is_late


def test_an_interrupted_run_says_how_many_peers_have_not_saved(tmp_path):
    with driven(tmp_path, Stopped, exchange_s=1e-4) as driver:
        with pytest.raises(Interrupted, match="all but 4 peers") as stopped:
            driver.run()
        assert stopped.value.code == 130 and driver.peers.unsaved == 4


def test_an_end_without_parameters_is_one_sentence(tmp_path):
    """Such as when the hosts of all peers end with the run."""
    with driven(tmp_path, Ended) as driver, pytest.raises(TrainingFailed, match="sent its last"):
        driver.run()


def test_a_run_ends_with_the_mean_of_the_last_models(tmp_path):
    """And an extended run knows how good it was."""
    with driven(tmp_path, Trained) as driver:
        summary = driver.run()
    *_, row = load_run(tmp_path).rows
    records = [noise_task.Normal(8, SIZE)[k] for k in range(8)]
    assert row["eval/loss"] == pytest.approx(1.5 * np.sum(records) / 8, rel=1e-5)
    assert row["train/loss"] == 0.5 and row["peers/averaged"] == 6 and row["step"] == 8
    assert summary["final"]["eval/loss"] == row["eval/loss"] == summary["best_eval_loss"]
    counts = {"averaged": 6, "declined": 0, "undecoded": 0, "lost": 4}
    ranks = dict.fromkeys(range(4), 8)
    assert summary["peers"] == {"ranks": ranks, "died": 0, "averages": counts}
    assert (summary["steps"], summary["bytes_sent_per_step"]) == (8, 2 * 4 * SIZE / 2)
    assert peer_run.saved_steps(tmp_path) == [8]
    manifest = json.loads((tmp_path / "peers.json").read_text())
    assert manifest.pop("seconds") > 0 and manifest["data"].pop("some of the records")
    assert manifest == {
        **{"step": 8, "examples": 8 * 8, "best": row["eval/loss"], "streams": 4, "batch": 2},
        "peers": {str(rank): {"steps": 8, "alive": True} for rank in range(4)},
        "data": {"the training data": f"{10**6} records", "the validation data": "8 records"},
    }
    before = peer_run.read_manifest(tmp_path, parse(config_of()))
    before["data"]["the training data"] = "5 records"  # on which the earlier session trained
    with (
        refuses("5 records before step", f"{10**6} records now", error=ConfigError),
        driven(tmp_path, Trained, before),
    ):
        pass


def test_peers_are_evaluated_on_their_way(tmp_path, programs):
    """And the mean that is saved each time is compiled once."""
    with driven(tmp_path, OnItsWay) as driver:
        driver.run()
    assert programs.count("jit(mean)") == 1
    assert [row["step"] for row in load_run(tmp_path).rows if "eval/loss" in row] == [5, 8]


def test_peers_compile_the_program_that_train_py_has_compiled(tmp_path):
    """So that all but one find it in jax's cache; not where the first would be too late."""
    config = parse(config_of())

    def lowered(one):
        step = make_step(one.config, one.task, one.tx, one.rate, one.schedule, one.placement)
        batch = one.placement.put(np.zeros((1, 2, SIZE), np.float32))
        return step.lower(init(one), batch, number(0, 0), round=0).as_text()

    with peer_run.open_run(config, tmp_path) as (experiment, work):
        whole = lowered(peer_run.of_peer(experiment, config, 0, 4))
        compile_step(config, experiment, work)
        late = changed(config, **{"peers.start_s": 1e-9})
        with refused("peers.start_s", 1e-9):
            compile_step(late, experiment, work)
    place = peer_run.Place(config, str(tmp_path), 3, 1, 5, 4)
    with peer_run.open_peer(place) as (experiment, _):
        assert lowered(experiment) == whole


@pytest.mark.parametrize(("mixes", "numbers"), [(True, 13), (False, 10)])
def test_a_message_has_the_model_state_that_peers_average(mixes, numbers):
    """Such as the statistics of batch norm."""
    copy = {"w": np.zeros((1, 2, 5))}, {"mean": np.zeros((1, 3))} if mixes else {}
    assert message_bytes("bfloat16", copy) == 2 * numbers
