"""What peers do to the mean, from their logs: real steps and averages, no Ray.

The peers are those of a run, `StepBoundary` and all, but stepped and connected by a loop of this
file, in a random order, with messages that take a random time.
"""

import contextlib
import json
import pickle
import queue
import time

import noise_task
import numpy as np
import pytest

from decent_jax import tasks, train
from decent_jax.data import loader
from decent_jax.peers import replay
from decent_jax.peers.__main__ import main
from decent_jax.peers.peer_run import CommonProgress, Place, Stream, open_peer
from decent_jax.peers.protocol import Averager, Format
from decent_jax.peers.step_boundary import StepBoundary, number, on_host
from decent_jax.train.config import parse
from decent_jax.train.step import make_step
from decent_jax.train.stepper import init

RATE, BATCH, SIZE = 0.01, 2, 500
PACES = (1.0, 1.0, 0.7, 0.2)  # of the peers, relative to the fastest


class InProcess:
    """A peer without Ray."""

    def __init__(self, place, experiment, steps, clock=time.monotonic):
        n = place.config.num_replicas
        self.place, self.experiment = place, experiment
        self.averager = Averager(place.name, Format(place.config.codec), 1e9, 1e9)
        self.averager.update_members({f"{rank}.0": ("127.0.0.1", 9) for rank in range(n)})
        self.common = CommonProgress(n, steps)
        self.jobs = queue.SimpleQueue()
        self.asks, self.now = 0, 0.0
        self.boundary = StepBoundary(
            *(experiment, place, self.common, self.averager, self.jobs, lambda: self.ask(), None),
            clock=clock,
        )
        self.state, self.t = init(experiment), self.boundary.begin(0)
        self.first = self.params()
        self.moved = np.zeros(SIZE)  # by its own steps
        self.batches = loader.train_batches(
            experiment.task.train_source,
            seed=place.config.seed,
            num_replicas=1,
            batch_size=BATCH,
            prefetch=0,
        )

    def ask(self):
        """In place of a question; a test may put another function here."""
        self.asks += 1

    def params(self):
        return np.array(on_host(self.state.params)[0], np.float64)

    def step(self, compiled):
        def measured(state, batch, t):
            before = np.array(on_host(state.params)[0], np.float64)
            state, metrics = compiled(state, batch, t)
            self.moved += np.array(on_host(state.params)[0], np.float64) - before
            return state, metrics

        batch = self.experiment.placement.put(next(self.batches))
        self.state, metrics = self.boundary.step(measured, self.state, batch, self.t)
        assert float(metrics["learning_rate"]) == np.float32(RATE)
        self.t += 1


def exchange(asker, answerer):
    """The messages of an average, one after the other; returns whether it was accepted.

    None where one of the two is busy.
    """
    asked = asker.ask()
    if asked is None:
        return None
    yield
    if not answerer.agree(asked[0].name):
        asker.give_up(asked[0].name, "declined")
        return None
    yield
    offer, message = asked
    reply = answerer.answer(offer, message())
    if reply is None:  # too late
        asker.give_up(offer.name, "lost")
        return None
    yield
    decoded = asker.receive(*reply)
    yield
    accepted = answerer.settle(asked[0].name, decoded)
    yield
    asker.close(asked[0].name, accepted)
    return accepted


def config_of(form="float32", steps=8, algorithm="swarm"):
    config = train.default_config("noise")
    config.trainer, config.codec = "peers", form
    config.algorithm, config.optimizer.name, config.optimizer.momentum = algorithm, "sgd", 0.0
    config.num_replicas, config.batch_size = len(PACES), BATCH * len(PACES)
    config.steps, config.learning_rate, config.mix_every = steps, RATE, 2
    config.lr_schedule.name, config.lr_schedule.warmup = "constant", 0
    config.model.size, config.data.points = SIZE, 10**6
    return config


def train_in_process(workdir, form, steps, algorithm="swarm"):
    """A whole run; its peers afterwards, and what a replay needs in the folder."""
    config = config_of(form, steps, algorithm)
    random = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        peers = []
        for rank in range(len(PACES)):
            place = Place(parse(config), str(workdir), rank, 0, None, len(PACES))
            experiment, _ = stack.enter_context(open_peer(place))
            peers.append(InProcess(place, experiment, steps))
            stack.enter_context(peers[-1].batches)
        first = peers[0].experiment
        step = make_step(
            *(first.config, first.task, first.tx, first.rate, first.schedule, first.placement)
        )
        batch = first.placement.put(np.zeros((1, BATCH, SIZE), np.float32))
        compiled = step.lower(peers[0].state, batch, number(0, 0), round=0).compile()
        under_way, training = [], list(peers)
        while training:
            for peer in peers:
                peer.common.update(sum(one.t for one in peers), peer.t)
            k = random.choice(len(peers), p=np.array(PACES) / sum(PACES))
            peer = peers[k]
            if peer in training:
                if peer.boundary.over(peer.t):
                    training.remove(peer)
                    peer.boundary.end(peer.t, peer.state)
                else:
                    peer.step(compiled)
            for one in peers:
                if not one.jobs.empty() and random.random() < 0.7:
                    one.jobs.get()()
                for _ in range(one.asks):
                    others = [other.averager for other in peers if other is not one]
                    other = others[random.integers(len(others))]
                    under_way.append(exchange(one.averager, other))
                one.asks = 0
            for one in list(under_way):
                if random.random() < 0.8 and next(one, one) is one:
                    under_way.remove(one)
    workdir.joinpath("config.json").write_text(json.dumps(config.to_dict()))
    each = config.batch_size // config.num_replicas
    manifest = {"batch": each, "streams": len(PACES), "best": None, "seconds": 0.0, "peers": {}}
    workdir.joinpath("peers.json").write_text(json.dumps(manifest))
    return peers


@pytest.fixture(autouse=True)
def noise(monkeypatch, compile_once):
    monkeypatch.setitem(tasks.TASKS, "noise", noise_task)


def averages_of(workdir, form, count):
    """[[(name, own copy, share of the difference)]] of each peer, by its log.

    After a replay, which must be identical.
    """
    copies, versions = {}, [0] * count

    def observe(name, t, arrays):
        rank = int(name[0])
        copies[name, versions[rank]] = arrays
        versions[rank] += 1

    found = replay.replay(workdir, observe=observe)
    assert len(found) == count and all(one.survived and not one.differs for one in found)
    averages, form = [], Format(form)
    for log in replay.read_logs(workdir):
        averages.append([])
        for line in (line for t in sorted(log.averages) for line in log.averages[t]):
            uses = (log.name, line["mine"]), (line["with"], line["theirs"])
            mine, theirs = (
                replay.sent_of(form, *use, copies[use], side)
                for use, side in zip(uses, line["sides"], strict=True)
            )
            part = (theirs[0] - mine[0]) * np.float32(0.5)
            averages[-1].append((line["average"], copies[uses[0]][0], part))
    return averages


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


@contextlib.contextmanager
def alone(tmp_path, mix_every=1, start=None, **peers):
    """A peer without Ray, of a run of 8 steps, at its beginning; with ``start`` it joins there."""
    config = config_of()
    config.mix_every = mix_every
    config.peers.update(peers)
    place = Place(parse(config), str(tmp_path), 0, 0, start, len(PACES))
    with open_peer(place) as (experiment, _):
        peer = InProcess(place, experiment, 8, clock=lambda: peer.now)
        yield peer
        peer.boundary.end(peer.t, peer.state)


@pytest.fixture(name="in_process")
def peer_in_process(tmp_path):
    """One that asks after every step."""
    with alone(tmp_path) as peer:
        yield peer


def make_step_of(peer):
    """A step that changes nothing, and what comes before it; the loss of the step."""
    loss = Loss(peer.t)

    def compiled(state, *_):
        assert peer.boundary.ready  # others may ask it during its first step
        return state, {"loss": loss}

    peer.boundary.step(compiled, peer.state, None, peer.t)
    peer.t += 1
    return loss


def do_jobs(peer):
    while not peer.jobs.empty():
        peer.jobs.get()()


def test_nobody_asks_while_a_question_is_under_way(in_process):
    """With questions that take longer than a step, all would be busy and decline for ever."""
    for asks in (1, 2):
        for _ in range(3):
            make_step_of(in_process)
        do_jobs(in_process)
        assert in_process.asks == asks


@pytest.mark.parametrize("start", [None, 6])
def test_a_peer_makes_its_local_steps_before_it_asks(start, tmp_path):
    with alone(tmp_path, mix_every=3, start=start) as peer:
        for asks in (0, 0, 0, 1):
            make_step_of(peer)
            do_jobs(peer)
            assert peer.asks == asks


def test_streams_together_read_every_record_once_an_epoch():
    """And those of another draw of the order as well."""

    def rows(ranks):
        streams = [Stream(np.arange(24), rank, 4, 2).train_blocks(1, 2, seed=0) for rank in ranks]
        return np.concatenate([stream[t] for stream in streams for t in range(3)]).tolist()

    first, other = rows(range(4)), rows(range(4, 8))
    assert sorted(first) == sorted(other) == list(range(24))
    assert first != other
    copied = pickle.loads(pickle.dumps(Stream(np.arange(24), 1, 4, 2)))  # as for another process
    assert copied.shape == (24,)  # of the source


@pytest.mark.parametrize(("seconds", "rests"), [(1.0, True), (11.0, False)])
def test_a_peer_rests_after_an_answer_but_not_after_silence(seconds, rests, in_process):
    """A request times out after peers.exchange_s, 10 s; a rest after it would only add to that."""

    def ask():
        in_process.now += seconds

    in_process.ask = ask
    for _ in range(2):
        make_step_of(in_process)
    do_jobs(in_process)
    make_step_of(in_process)
    assert in_process.jobs.empty() is rests


def test_a_peer_begins_a_step_when_its_device_has_made_the_one_before(in_process):
    losses = [make_step_of(in_process) for _ in range(5)]
    assert [loss.made for loss in losses] == [True] * 4 + [False]


@pytest.mark.parametrize("form", ["float32", "lattice16"])
def test_the_log_has_every_change_and_keeps_the_mean(form, tmp_path):
    peers = train_in_process(tmp_path, form, 80)
    averages = averages_of(tmp_path, form, len(peers))
    pull_of = {}
    for name, _, pull in (average for group in averages for average in group):
        pull_of.setdefault(name, []).append(pull)
    assert len(pull_of) > 20 and all(len(both) == 2 for both in pull_of.values())
    assert all((a == -b).all() for a, b in pull_of.values())
    added = np.array([np.sum([pull for *_, pull in group], axis=0) for group in averages])
    for peer, pull in zip(peers, added, strict=True):
        rest = peer.params() - peer.first - peer.moved - pull
        assert np.abs(rest).max() < 1e-5  # a hundred sums in float32
    mean = np.mean([peer.params() - peer.first - peer.moved for peer in peers], axis=0)
    assert np.abs(mean).max() < 2e-6 and np.abs(added).max() > 1e-2


def test_a_log_that_says_otherwise_is_noticed(tmp_path, capsys):
    """Such as one in which the pull of the last average was never added."""
    train_in_process(tmp_path, "float32", 20)
    path = tmp_path / "peers" / "0" / "events-0.jsonl"
    lines = path.read_text().splitlines()
    lines.remove([line for line in lines if '"average"' in line][-1])
    path.write_text("\n".join(lines) + "\n")
    assert main(["replay", "--workdir", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "peer 0.0" in said and "differs: " in said


def test_the_log_has_every_outer_step(tmp_path):
    """No step of a peer makes one, and its replay is identical, with the state that is not sent."""
    peers = train_in_process(tmp_path, "lattice16", 40, "noloco")
    averages = averages_of(tmp_path, "lattice16", len(peers))
    for peer, group in zip(peers, averages, strict=True):
        assert len(group) > 2
        theta, m, pulled = peer.first, 0.0, 0.0
        for _, copy, part in group:
            m = 0.5 * m + 0.7 * (copy + part - theta)
            theta = theta + m
            pulled += theta - copy
        outer = np.array(on_host(peer.state.opt_state.own.theta)[0], np.float64)
        assert np.abs(outer - theta).max() < 1e-5
        assert np.abs(peer.params() - peer.first - peer.moved - pulled).max() < 1e-5
        assert np.abs(pulled).max() > 1e-2
