"""What could go wrong between peers, and does not; stand-ins take the place of Ray."""

import contextlib
import json
import queue
import threading
import tracemalloc
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ml_collections import ConfigDict
from ray.exceptions import ActorUnavailableError, RayActorError
from test_peers_law import PACES, make_step_of, noise, peer_in_process  # noqa: F401 (fixtures)

from decent_jax.ground.errors import RunError
from decent_jax.peers import events
from decent_jax.peers.between import NotJoined
from decent_jax.peers.events import EventLog
from decent_jax.peers.formats import Format
from decent_jax.peers.peer import Peer
from decent_jax.peers.roster import Roster
from decent_jax.peers.rule import Joined, Meetings
from decent_jax.peers.whole import Whole


def actor_of(peer, **attributes):
    """The actor of a peer, with what these tests need of it."""
    actor = Peer.__new__(Peer)
    actor._place, actor._peers = peer.place, peer.place.config["peers"]
    actor._between, actor._pulse, actor._meetings = peer.between, peer.pulse, peer.meetings
    actor._seconds, actor._leaving = {}, None
    actor.__dict__ |= attributes
    return actor


def test_a_report_does_not_wait_for_the_device(in_process):
    """Otherwise a peer whose steps take longer than peers.silent_s is silent during each."""
    actor = actor_of(in_process)
    for t in range(4):
        assert actor.report()["losses"] == (sum(range(t - 1)), max(t - 1, 0))
        make_step_of(in_process)


def test_a_row_has_the_mean_loss_of_the_steps_since_the_row_before(in_process):
    """As in any other run; a peer that made no step since then does not count."""
    whole = Whole(ConfigDict(in_process.place.config), in_process.experiment)

    def row(*losses):
        peers = [
            {"slot": k, "incarnation": 0, "alive": True, "met": 0, "losses": found}
            for k, found in enumerate(losses)
        ]
        found = whole.row(peers, 1, 1, 1.0)
        return tuple(found[f"train/{name}"] for name in ("loss", "loss_min", "loss_max"))

    assert row((6.0, 3), (4.0, 1), (0.0, 0)) == (10 / 4, 2.0, 4.0)
    assert row((10.0, 5), (4.0, 1), (1.0, 1)) == (5 / 3, 1.0, 2.0)


def test_a_resume_holds_no_log_in_memory(in_process):
    """A long run's has more than a GiB."""
    log, last = (EventLog(in_process.place.folder, incarnation) for incarnation in (3, 4))
    for one in (log, last):
        one.write(start=0, origin=None)
    log._file.writelines(f'{{"t": {t}, "rate": {t // 4}}}\n' for t in range(100_000))
    log.end(100_000, crc=1)
    last.end(0, crc=1)
    tracemalloc.start()
    origin = in_process.between._checkpointed(99_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert origin == {"peer": "0.3", "t": 99_000, "when": "checkpoint"}
    assert peak < 1e6


@pytest.mark.parametrize("name", ["share", "sides", "theirs"])
def test_a_meeting_in_a_log_is_whole(name, tmp_path):
    """A replay that filled a gap with a guess would report a difference that nobody has made."""
    start = {"start": 0, "origin": None}
    met = {"t": 2, "met": "1.0-0", "with": "1.0", "mine": 0, "theirs": 1}
    met |= {"sides": [0.0, 0.0], "share": 0.5}
    path = tmp_path / "events-0.jsonl"
    path.write_text(f"{json.dumps(start)}\n{json.dumps(met)}\n")
    assert list(events.read(path)) == [start, met]
    del met[name]
    path.write_text(f"{json.dumps(start)}\n{json.dumps(met)}\n")
    with pytest.raises(RunError) as refused:
        list(events.read(path))
    assert str(path) in str(refused.value)


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
    monkeypatch.setattr("decent_jax.peers.peer.PeerRunner", lambda *_: None)
    monkeypatch.setattr("decent_jax.peers.peer.loop.train", trains)
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
@pytest.mark.parametrize("others", [0, 1])
def test_the_only_peer_leaves_at_once(others, in_process):
    """With others it would meet one of them before, or wait 2 peers.meet_s."""
    roster = Roster(5.0, {})
    for slot in range(1 + others):
        roster.add(slot, 0, None, False)
        roster.beat(slot, 0, {"steps": 3})
    actor = actor_of(in_process, _roster=Remote(roster), _stopped=threading.Event())
    in_process.between.ready = True
    threading.Timer(0.5, actor._stopped.set).start()
    actor._beat()
    actor.leave("leave")
    assert in_process.between.over(8) is not bool(others)


@pytest.mark.usefixtures("no_ray")
def test_a_peer_that_joins_waits_for_one_that_trains(in_process):
    """At the start of a resumed run the others restore and compile, perhaps for longer than it."""
    roster = Roster(5.0, {})
    roster.add(0, 0, Remote(types.SimpleNamespace(state=lambda: Joined("0.0", 7, []))), False)
    roster.add(1, 0, None, True)
    place = in_process.place._replace(slot=1)
    actor = actor_of(in_process, _roster=Remote(roster), _place=place)
    joining = ThreadPoolExecutor(1).submit(actor._joined)
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
    joining = ThreadPoolExecutor(1).submit(actor._joined)
    roster.remove(0)  # both were killed at once, and both wait for each other
    roster.add(0, 1, None, True)
    assert joining.result(10.0) is None
    roster.add(2, 0, None, False)
    actor._peers = actor._peers | {"start_s": 0.3}
    assert actor._joined() is None
    actor._peers = actor._peers | {"start_s": 30.0}
    actor.leave("stop")
    with pytest.raises(NotJoined):
        actor._joined()


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


def test_a_state_is_given_at_a_boundary_and_refused_after_the_end(in_process):
    between = in_process.between
    wanted = between.want_state()
    between._give(in_process.state, 4)
    assert wanted.result(0).t == 4
    between.end(4, in_process.state)
    with pytest.raises(RuntimeError, match="has ended"):
        between.want_state().result(0)


class Answers:
    """A roster that gives these answers to reports, or raises them, and then ends the thread."""

    def __init__(self, peer, *answers):
        self.answers = list(answers)
        fast = {"beat_s": 0.01, "silent_s": 0.001, "max_lag": 1}
        peers = peer.place.config["peers"] | fast
        self.stopped = threading.Event()
        self.actor = actor_of(peer, _roster=Remote(self), _peers=peers, _stopped=self.stopped)
        peer.between.ready = True

    def beat(self, *_):
        answer = self.answers.pop(0)
        if not self.answers:
            self.stopped.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def members(self):
        return [("0.0", None), ("1.0", None)]


@pytest.mark.usefixtures("no_ray")
def test_a_roster_that_is_lost_is_not_waited_for(in_process):
    """The thread that reports must not end without a word: the peer would never know the end."""
    Answers(in_process, (0, 0), RayActorError()).actor._beat()
    before = in_process.pulse.progress()
    in_process.pulse.own += len(PACES)
    assert in_process.pulse.progress() == before + 2  # it estimates what both of them do


@pytest.mark.usefixtures("no_ray")
def test_a_roster_that_is_out_of_reach_for_a_while_is_not_lost(in_process):
    """A lost one never comes back: nobody would report to it, or be replaced, any more."""
    unreachable = ActorUnavailableError("no route", None)
    roster = Answers(in_process, (0, 0), unreachable, (0, 0), (0, 0))
    roster.actor._beat()
    assert not roster.answers


@pytest.mark.usefixtures("no_ray")
def test_a_peer_that_was_silent_for_too_long_ends_and_saves_nothing(in_process):
    """What it knows is old: its next meeting would draw the others back."""
    in_process.meetings.publish([np.zeros(3, np.float32)], 0)
    roster = Answers(in_process, (0, 0), (800, 0), (800, 0))  # the others went on
    roster.actor._beat()
    assert len(roster.answers) == 1 and not in_process.meetings.agree("1.0-0")
    with pytest.raises(NotJoined):
        in_process.between.over(8)
