"""What could go wrong between peers, and does not; stand-ins take the place of Ray."""

import contextlib
import gc
import math
import os
import queue
import socket
import subprocess
import threading
import types
import weakref
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError, RayActorError
from test_peers_law import PACES, InProcess, config_of, noise  # noqa: F401 (a fixture)

from decent_jax.errors import Interrupted, TrainingFailed
from decent_jax.peers import manifest, resize, start
from decent_jax.peers.between import NotJoined
from decent_jax.peers.driver import _Driver, _Live
from decent_jax.peers.formats import Format
from decent_jax.peers.peer import Peer
from decent_jax.peers.roster import Roster
from decent_jax.peers.rule import Joined, Meetings
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


class Remote:
    """An object as a handle of Ray: calls do nothing until `get` asks for their results."""

    def __init__(self, there):
        self._there = there

    def __getattr__(self, name):
        method = getattr(self._there, name)
        return types.SimpleNamespace(remote=lambda *args: lambda: method(*args))


@pytest.fixture
def no_ray(monkeypatch):
    def get(call, timeout=None):
        return call()

    monkeypatch.setattr(
        "decent_jax.peers.peer.ray", types.SimpleNamespace(get=get, put=lambda x: x)
    )


@pytest.mark.usefixtures("no_ray")
def test_a_peer_that_joins_waits_for_one_that_trains(in_process):
    """At the start of a resumed run the others restore and compile, perhaps for longer than it."""
    roster = Roster(5.0, {})
    roster.add(0, 0, Remote(types.SimpleNamespace(state=lambda: Joined("0.0", 7, []))), False)
    roster.add(1, 0, None, True)
    place = in_process.place._replace(slot=1)
    actor = actor_of(in_process, _roster=Remote(roster), _place=place)
    joining = actor._begin_joining(30.0)
    with pytest.raises(TimeoutError):
        joining.result(0.5)
    roster.beat(0, 0, {"steps": 7})
    assert joining.result(10.0).donor == "0.0"


@pytest.mark.usefixtures("no_ray")
def test_peers_that_all_join_begin_with_what_they_have(in_process):
    roster = Roster(5.0, {})
    roster.add(0, 0, None, False)
    roster.add(1, 0, None, True)
    place = in_process.place._replace(slot=1)
    actor = actor_of(in_process, _roster=Remote(roster), _place=place)
    joining = actor._begin_joining(30.0)
    roster.remove(0)  # both were killed at once, and both wait for each other
    roster.add(0, 1, None, True)
    assert joining.result(10.0) is None
    roster.add(2, 0, None, False)
    assert actor._begin_joining(0.3).result(10.0) is None
    actor.leave("stop")
    with pytest.raises(NotJoined):
        actor._begin_joining(30.0).result(10.0)


def started(workdir, entries):
    """{slot: whether it joins}, of the peers that a resumed run of three starts."""
    before = {"peers": entries}
    config = config_of("float32", 100, "swarm", weighted=False)
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
    config = config_of("float32", 100, "swarm", weighted=False)
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
    assert resize.main(["--workdir", str(driver.work.path), "--count", str(count)]) == 0
    driver._resize()


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


@pytest.mark.usefixtures("no_ray")
def test_a_roster_that_is_lost_while_a_peer_joins_again_is_lost(in_process, monkeypatch):
    """The thread that reports must not end without a word: the peer would never know the end."""
    answers = [(0, 0), (800, 0)]  # the others went on while it was silent

    class Lost:
        def beat(self, *_):
            if not answers:
                raise RayActorError
            return answers.pop(0)

        def members(self):
            return [("0.0", None), ("1.0", None)]

        def rejoin(self, *_):
            raise RayActorError

    peers = in_process.place.config["peers"] | {"beat_s": 0.01, "silent_s": 0.001, "max_lag": 1}
    actor = actor_of(in_process, _roster=Remote(Lost()), _peers=peers, _stopped=threading.Event())
    actor._between.ready = True
    actor._beat()
    before = in_process.pulse.progress()
    in_process.pulse.own += len(PACES)
    assert in_process.pulse.progress() == before + 2  # it estimates what both of them do
    monkeypatch.setattr(Lost, "members", Lost.rejoin)
    assert actor._begin_joining(0.0).result(10.0) is None  # it trains on, as it did
    with pytest.raises(RayActorError):
        actor._begin_joining(1.0).result(10.0)


@pytest.mark.usefixtures("no_ray")
def test_a_question_that_fails_leaves_no_meeting_under_way(in_process):
    """An asker waits without a limit of its own, so it would never meet anybody again."""
    partner = types.SimpleNamespace(meet=lambda *_: ("no offer", [lambda: None]))
    actor = actor_of(in_process, _doubtful=[], _avoided={}, _members=[("1.0", Remote(partner))])
    in_process.meetings.publish([np.zeros(3, np.float32)], 0)
    with pytest.raises(AttributeError):
        actor._ask()
    assert in_process.meetings.idle() and in_process.meetings.counts["lost"] == 1
    lattice = Meetings("0.0", Format("lattice8"), 5.0)
    lattice.publish([np.float32([np.inf])], 0)
    with pytest.raises(ValueError, match="above 0, got inf"):
        lattice.ask()
    assert lattice.idle()


def test_a_state_that_is_wanted_during_a_boundary_is_given_at_the_next(in_process):
    """It was lost between two operations of the other thread, and waited for peers.join_s."""
    between = in_process.between
    boundary = threading.Thread(target=between._give, args=(in_process.state, 3))

    class Interrupted(list):
        def append(self, one):
            boundary.start()
            boundary.join(0.2)
            super().append(one)

    between._wanted = Interrupted()
    wanted = between.want_state()
    boundary.join()
    between._give(in_process.state, 4)
    assert wanted.done()


def test_no_copy_is_published_while_a_peer_joins_again(in_process, monkeypatch):
    """Halves of meetings with it would be lost on this side, and its version stand in no log."""
    peer, publish = in_process, in_process.meetings.publish
    replaces = threading.Thread(target=peer.between.replace, args=(Future(), 1))

    def interrupted(*args):
        replaces.start()
        replaces.join(0.2)
        return publish(*args)

    monkeypatch.setattr(peer.meetings, "publish", interrupted)
    peer.between.step(lambda state, *_: (state, {"loss": Loss(0)}), peer.state, None, 0)
    peer.jobs.get()()
    replaces.join()
    assert peer.meetings.version == 1 and peer.meetings.copy is None


def test_the_processes_of_ray_are_found_while_others_of_its_end(monkeypatch):
    child = subprocess.Popen(["sleep", "60"])
    try:
        read = Path.read_text
        ended = []

        def read_text(path):
            if not ended:
                ended.append(path)
                raise ProcessLookupError(3, "No such process")
            return read(path)

        monkeypatch.setattr(Path, "read_text", read_text)
        with_one_lost = start._descendants(os.getpid())
        monkeypatch.setattr(Path, "read_text", read)
        assert {*with_one_lost} <= {*start._descendants(os.getpid())} >= {child.pid}
    finally:
        child.kill()
        child.wait()


def test_an_address_may_be_one_of_ipv6():
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        start.check_address("peers", f"[::1]:{server.getsockname()[1]}")


@pytest.mark.usefixtures("no_ray")
def test_a_roster_that_is_out_of_reach_for_a_while_is_not_lost(in_process, driver, monkeypatch):
    """A lost one never comes back: nobody would report to it, or be replaced, any more."""
    answers = [(5, 0), None, (6, 0)]

    class Unreachable:
        def beat(self, *_):
            if not answers:
                actor._stopped.set()
            answer = answers.pop(0) if answers else (7, 0)
            if answer is None:
                raise ActorUnavailableError("no route", None)
            return answer

        def members(self):
            return []

        def look(self):
            raise ActorUnavailableError("no route", None)

    peers = in_process.place.config["peers"] | {"beat_s": 0.01}
    actor = actor_of(in_process, _roster=Remote(Unreachable()), _peers=peers)
    actor._stopped, actor._between.ready = threading.Event(), True
    actor._beat()
    assert not answers
    driver.roster = Remote(Unreachable())
    monkeypatch.setattr("decent_jax.peers.driver.ray.get", lambda call, timeout: call())
    driver._look()
    assert driver._roster_lives()


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
