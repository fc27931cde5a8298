"""What could go wrong boundary peers, and does not; stand-ins take the place of Ray."""

import json
import threading
import tracemalloc

import numpy as np
import pytest
from test_peers_joining import REPORT, members
from test_peers_law import (
    PACES,
    alone,
    make_step_of,
    noise,  # noqa: F401 (a fixture)
    peer_in_process,  # noqa: F401 (a fixture)
)

from decent_jax.ground import connections
from decent_jax.peers import events, peer_run
from decent_jax.peers.driver import Aggregate
from decent_jax.peers.exchange import BROKEN
from decent_jax.peers.membership import MembershipClient, Reporter
from decent_jax.peers.peer import Peer
from decent_jax.peers.step_boundary import NotJoined
from decent_jax.train.config import changed

NOWHERE, SECRET = ("127.0.0.1", 9), b"secret"
BOTH = [("0.0", NOWHERE), ("1.0", NOWHERE)]


class Near:
    """The way to a membership that is in this process."""

    def __init__(self, membership):
        self.membership = membership

    def call(self, method, *args):
        return getattr(self.membership, method)(*args)


def reporter_of(peer, membership, **peers):
    """The reports of a peer, which go to the object ``membership``."""
    own = {f"peers.{name}": value for name, value in peers.items()}
    place = peer.place._replace(config=changed(peer.place.config, **own))
    peer.boundary.ready = True
    leave = lambda how: setattr(peer.boundary, "leaving", how)  # noqa: E731
    return Reporter(place, NOWHERE, Near(membership), peer.boundary, peer.common, leave)


def test_a_report_does_not_wait_for_the_device(in_process):
    """Otherwise a peer whose steps take longer than peers.silent_s is silent during each."""
    reporter = reporter_of(in_process, None)
    for t in range(4):
        assert reporter.report()["losses"] == (sum(range(t - 1)), max(t - 1, 0))
        make_step_of(in_process)


def test_a_row_has_what_peers_reported_and_the_mean_loss_since_the_row_before(in_process):
    """As in any other run; a peer that made no step since then does not count."""
    aggregate = Aggregate(in_process.place.config, in_process.experiment)

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
def test_who_ends_before_it_may_train_saves_nothing(leaving, tmp_path):
    """Its parameters are initial or outdated; a resumed run would average with them."""
    with alone(tmp_path, start=0 if leaving is None else None) as peer:
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
    assert reporter_of(in_process, members(0, *range(1, 1 + others))).beat()
    in_process.boundary.leaving = "leave"
    assert in_process.boundary.over(8) is not bool(others)


def test_a_state_is_given_at_a_boundary_and_refused_after_the_end(in_process):
    boundary = in_process.boundary
    wanted = boundary.want_state()
    make_step_of(in_process)
    assert wanted.result(0).t == 0
    boundary.end(1, in_process.state)
    with pytest.raises(RuntimeError):
        boundary.want_state().result(0)


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
    answers = Answers((0, BOTH), TimeoutError(), TimeoutError(), (8, BOTH), TimeoutError())
    reporter, counts = reporter_of(in_process, answers), in_process.averager.counts
    unanswered = []
    for _ in range(5):
        unanswered.append(reporter.report()["averaged_unanswered"])
        assert reporter.beat()
        counts["averaged"] += 1
    assert in_process.common.progress() == 8 // len(PACES)
    assert unanswered == [0, 0, 1, 2, 0]  # those before the network broke say nothing


def test_the_connection_to_the_membership_may_break():
    membership, served = members(0), []
    membership.add(1, 0, None)

    def serve(connection):
        served.append(connection)
        membership.serve(connection)

    listener, address = connections.listen("127.0.0.1", SECRET, serve)
    with listener:
        link = MembershipClient(address, SECRET, 30.0)
        for steps in (3, 5):
            found = link.call("beat", 0, 0, NOWHERE, REPORT | {"steps": steps})
            assert found == [steps, [["0.0", list(NOWHERE)]]]
        assert link.call("beat", 0, 1, NOWHERE, REPORT) == "stop"  # another has the rank
        assert len(served) == 1
        served[0].close()
        with pytest.raises(BROKEN):
            link.call("members")
        assert link.call("members") == [["0.0", list(NOWHERE)]]
        membership.remove(0)
        assert link.call("members") == [] and not membership.is_hopeful()
    with pytest.raises(BROKEN):
        MembershipClient(NOWHERE, SECRET, 1.0).call("members")


@pytest.mark.parametrize("how", ["stop", "lag"])
def test_a_peer_that_must_end_averages_with_nobody(how, in_process):
    """The mean is without its outdated parameters."""
    averager = in_process.averager
    for is_there in (True, False):
        averager.publish([np.zeros(3, np.float32)], 0)
        assert averager.agree("1.0-0") is is_there
        averager.withdraw()
        if is_there:
            assert not reporter_of(in_process, Answers(how)).beat()
    assert in_process.boundary.leaving == how


def test_reports_end_when_the_peer_does(in_process):
    many = 100_000  # it reports as often as it likes while this thread waits for a core
    beats = Answers(*[(0, BOTH)] * many)
    reporter = reporter_of(in_process, beats, silent_s=0.025)
    thread = threading.Thread(target=reporter.run)
    thread.start()
    while len(beats.answers) == many:
        thread.join(0.001)
    reporter.stopped.set()
    thread.join(10)
    assert not thread.is_alive()


def test_checkpoints_that_are_made_anew_are_forgotten(tmp_path):
    for name in ("3", "5", "7.being-written", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    peer_run.forget(tmp_path, 5)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"3", "notes"}
