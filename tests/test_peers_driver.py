"""What `train.py` does with peers that leave, die or give no answer; nothing runs on Ray."""

import contextlib
import gc
import math
import socket
import types
import weakref
from collections import Counter

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError, RayActorError
from test_peers_law import PACES, config_of, noise  # noqa: F401 (a fixture)

from decent_jax.ground.errors import Interrupted, TrainingFailed
from decent_jax.peers import manifest, start
from decent_jax.peers.__main__ import main
from decent_jax.peers.driver import _Driver, _Live
from decent_jax.peers.roster import Roster
from decent_jax.peers.whole import Whole
from decent_jax.train.step import TrainState


def started(workdir, entries):
    """{slot: whether it joins}, of the peers that a resumed run of three starts."""
    before = {"peers": entries}
    config = config_of()
    config.peers.count = 3
    work = types.SimpleNamespace(path=workdir, announce=lambda _: contextlib.nullcontext())
    slots = {}
    driver = types.SimpleNamespace(
        **{"config": config, "work": work, "manifest": before, "start": 7, "live": {}, "ended": []},
        **{
            "_look": lambda: {0: {"ready": True}},
            "_start": lambda k, copy: slots.update({k: copy}),
        },
    )
    _Driver._start_peers(driver)
    return slots, manifest.known_steps(workdir, before)


def test_a_run_whose_peers_have_all_left_resumes_from_their_checkpoints(tmp_path):
    """They save when they leave. As peers that join they would forget these checkpoints."""
    for slot, step in (("0", 12), ("1", 15)):
        (tmp_path / "peers" / slot / "checkpoints" / str(step)).mkdir(parents=True)
    entries = {"0": {"alive": False, "steps": 11}, "1": {"alive": False, "steps": 14}}
    entries["2"] = {"alive": False, "steps": 9}
    assert started(tmp_path, entries) == ({0: False, 1: False, 2: True}, {0: 12, 1: 15, 2: 9})
    entries["1"]["alive"] = True  # it has what 0 left to the others
    assert started(tmp_path, entries) == ({0: True, 1: False, 2: True}, {0: 11, 1: 15, 2: 9})


class Handle:
    """Of a peer's actor; notes what it is told."""

    def __init__(self):
        self.told = []
        self.leave = types.SimpleNamespace(remote=self.told.append)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver of four peers that train, and what ends of them next: ``ends``."""
    config = config_of()
    made = _Driver.__new__(_Driver)
    made.config, made.ends = config, []
    made.work = types.SimpleNamespace(path=tmp_path, say=lambda _: None)
    made.experiment = types.SimpleNamespace(steps=100)
    nothing = types.SimpleNamespace(remote=lambda *_: None)
    made.roster = types.SimpleNamespace(remove=nothing)
    made.live = {slot: _Live(Handle(), slot) for slot in range(4)}
    made.deaths, made.ended, made.gone, made.leaving = Counter(), [], set(), set()
    made._said, made._reached, made.looked = set(), 0, {}
    made.killed = []

    def start(slot, copy):
        made.live[slot] = _Live(Handle(), slot)

    def get(slot):
        raise RayActorError

    monkeypatch.setattr(made, "_start", start)
    wait = lambda futures, timeout: (made.ends, futures)  # noqa: E731
    fake = types.SimpleNamespace(wait=wait, get=get, kill=made.killed.append)
    monkeypatch.setattr("decent_jax.peers.driver.ray", fake)
    (tmp_path / "peers").mkdir(exist_ok=True)
    (tmp_path / "config.json").touch()
    return made


def resized(driver, count):
    assert main(["resize", "--workdir", str(driver.work.path), "--count", str(count)]) == 0
    driver._resize()


def test_resize_answers_at_once(driver, capsys):
    """Train.py, which says who joins, needs seconds to follow."""
    assert main(["resize", "--workdir", str(driver.work.path), "--count", "7"]) == 0
    said = capsys.readouterr().out
    assert str(driver.work.path) in said and "7 peers" in said


def test_peers_that_leave_are_replaced_where_more_are_wanted_again(driver):
    resized(driver, 2)
    assert [driver.live[slot].handle.told for slot in range(4)] == [[], [], ["leave"], ["leave"]]
    resized(driver, 3)  # the two have not left yet
    assert sorted(driver.live) == [0, 1, 2, 3, 4]
    driver.ends = [3]
    driver._collect()  # it was killed on its way out, and is not replaced
    assert sorted(driver.live) == [0, 1, 2, 4]
    driver.ends = [1]
    driver._collect()
    assert sorted(driver.live) == [0, 1, 2, 4] and driver.leaving == {2}


def test_of_a_peer_that_has_failed_no_process_stays(driver):
    """Ray also says that an actor is lost when its host cannot be reached for a while."""
    handle = driver.live[1].handle
    driver.ends = [1]
    driver._collect()
    assert driver.killed == [handle] and driver.live[1].handle is not handle


@pytest.mark.parametrize(("leaves", "stays"), [(False, True), (True, False)])
def test_a_peer_that_lags_is_replaced(leaves, stays, driver, monkeypatch):
    """However often; only deaths count."""
    handle, driver.ends, driver.leaving = driver.live[1].handle, [1], {1} if leaves else set()
    monkeypatch.setattr("decent_jax.peers.driver.ray.get", lambda _: {"how": "lag"})
    driver._collect()
    assert driver.killed == [handle] and (1 in driver.live) is stays and not driver.deaths


def test_the_roster_keeps_no_handle_of_a_peer_that_has_left():
    """Its process, and what Ray reserves for it, would stay until another one takes the slot."""
    roster, handle = Roster(5.0, {}), Handle()
    roster.add(0, 0, handle, False)
    roster.beat(0, 0, {"steps": 3})
    roster.remove(0)
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None and roster.look()[0]["steps"] == 3


def test_an_address_may_be_one_of_ipv6():
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        config = config_of()
        config.peers.address = f"[::1]:{server.getsockname()[1]}"
        start.check_address(config, "peers")


def test_an_interrupted_run_says_how_many_peers_have_not_saved(driver, monkeypatch):
    driver.config.peers.stop_s, driver.unsaved = 1e-3, 0
    driver.experiment = types.SimpleNamespace(steps=100, every={"eval.every": 0})
    driver.start, driver._saved = 0, math.inf
    monkeypatch.setattr(driver, "_look", dict)
    monkeypatch.setattr(driver, "_write_manifest", lambda: None)
    progress = types.SimpleNamespace(update=lambda *_: None)
    with pytest.raises(Interrupted, match="; all but 4 peers have saved a checkpoint, the same"):
        driver._watch(None, progress, types.SimpleNamespace(received=2))
    assert len(driver.killed) == 4


@pytest.mark.parametrize(
    ("ready", "late", "why"),
    [(False, False, "begun to train"), (True, False, "silent_s"), (True, True, "stop_s")],
)
def test_a_peer_that_is_ended_is_told_the_true_reason(ready, late, why, driver, monkeypatch):
    """Who still joins when the others end, after 2 s, has not exceeded peers.stop_s, 60 s."""
    said, driver.unsaved = [], 0
    driver.work.say = said.append
    driver.looked = {k: {"ready": ready, "member": False, "steps": 3} for k in driver.live}
    driver._end_the_rest(late)
    assert len(said) == 4 and all(why in line for line in said)
    assert sum(name in said[0] for name in ("begun to train", "silent_s", "stop_s")) == 1


def test_an_end_without_parameters_is_one_sentence(driver, monkeypatch):
    """Such as when the hosts of all peers end with the run."""
    for name in ("_start_peers", "_watch", "_evaluate", "_write_manifest", "_describe"):
        monkeypatch.setattr(driver, name, lambda *_: None)
    driver.start, driver.saver = 0, contextlib.nullcontext()
    nothing = lambda *_: contextlib.nullcontext()  # noqa: E731
    driver.work = types.SimpleNamespace(
        write_config=nothing, say=nothing, open_metrics=nothing, show_progress=nothing
    )
    with pytest.raises(TrainingFailed, match="none gave its last parameters; the same command"):
        driver.run()


@pytest.mark.parametrize(("mixes", "numbers"), [(True, 13), (False, 10)])
def test_a_message_has_the_model_state_that_peers_average(mixes, numbers):
    """Such as the statistics of batch norm."""
    whole = Whole.__new__(Whole)
    whole._config = config_of("bfloat16")
    whole._experiment = types.SimpleNamespace(task=types.SimpleNamespace(mixes_state=mixes))
    whole.template = TrainState({"w": np.zeros((1, 2, 5))}, {"mean": np.zeros((1, 3))}, (), None)
    assert whole.message_bytes() == 2 * numbers


def test_a_roster_that_is_out_of_reach_for_a_while_is_not_lost(driver, monkeypatch):
    def get(call, timeout):
        raise ActorUnavailableError("no route", None)

    driver.roster = types.SimpleNamespace(look=types.SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr("decent_jax.peers.driver.ray.get", get)
    driver._look()
    assert driver._roster_lives()
