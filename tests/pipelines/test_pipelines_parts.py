"""Parts of pipelines: messages, workers, links, and what is refused."""

import os
import shutil
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import tiny
from local_actors import LocalActors, Pending
from pipeline_threads import Threads
from refusals import ANY, refused, refuses
from test_pipelines import config_of

from decent_jax import pipelines, topology, train
from decent_jax.actors.handles import Lost, Node, Silent
from decent_jax.gossip import codecs
from decent_jax.ground import connections, machine
from decent_jax.ground.errors import ConfigError, PeerLost, TrainingFailed
from decent_jax.monitor.goodput import Clock
from decent_jax.pipelines import links, part, worker
from decent_jax.pipelines.executor import Channel, Key, Mailbox, Span
from decent_jax.pipelines.runner import Pipelines
from decent_jax.pipelines.worker import open_run
from decent_jax.pipelines.workers import Workers, nodes_of
from decent_jax.plan.plan_file import Plan
from decent_jax.train.config import parse
from decent_jax.train.same_data import facts_of
from decent_jax.train.synchronous import TIMED

SECRET = b"0123456789abcdef"

pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture
def box():
    """A mailbox and its address."""
    box = Mailbox()
    listener, address = connections.listen("127.0.0.1", SECRET, box.fill)
    with listener:
        yield box, address


def test_messages_keep_their_order_and_a_stranger_sends_none(box):
    box, address = box
    stranger, friend = Channel(address, b"another secret"), Channel(address, SECRET)
    keys = [Key("activation", 7, k, 0) for k in range(3)]
    sent = np.arange(100_000, dtype=ml_dtypes.bfloat16).reshape(2, -1)
    stranger.send(keys[0], (sent,))
    for key in keys:
        friend.send(key, (sent + key.k,))
    for key in keys:
        (value,) = box.take(key, 30)
        np.testing.assert_array_equal(value, sent + key.k)
    ends = time.monotonic() + 30
    with refuses("activation of step 7", error=PeerLost):
        while time.monotonic() < ends:
            stranger.send(keys[1], None)
            time.sleep(0.01)
    with pytest.raises(PeerLost):
        box.take(keys[0], 0.0)


@pytest.mark.slow
def test_rounded_activations_give_nearly_the_same_gradient(tiny_data, tmp_path):
    """A step of plain SGD, relative to its norm: int8 rounds to 1/127 of a row's largest."""

    def parameters(stages, codec):
        model = {"layers": 2, "dropout": 0.0}
        config = config_of(tiny_data, stages, 2, algorithm="decentralized_sgd", model=model)
        config.update(num_replicas=1, mix_every=config.steps)
        config.optimizer.update(momentum=0.0, weight_decay=0.0, clip_norm=0.0)
        config.pipeline.codec = codec
        with Threads(config, tmp_path) as threads:
            before = threads.params()
            threads.train(0, 1)
            after = threads.params()
        return np.concatenate([(after[k] - before[k]).ravel() for k in sorted(before)])

    exact = parameters(1, "float32")
    error = np.linalg.norm(parameters(2, "int8") - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.06


# --- Refusals -------------------------------------------------------------------------------------


def test_a_plan_of_another_number_of_stages_is_refused(tiny_data, tmp_path):
    names = tuple(f"host{k}/0" for k in range(6))
    Plan(names, topology.make("one_peer_exp", 2), stages=3).save(tmp_path / "plan.json")
    config = tiny.config(tiny_data, num_replicas=2, batch_size=16, model={"layers": 2})
    config.trainer, config.pipeline.stages, config.cluster.plan = (
        "pipelines",
        2,
        str(tmp_path / "plan.json"),
    )
    with refused("cluster.plan", ANY):
        train.validate(config)


@pytest.mark.parametrize("codec", codecs.NAMED)
def test_every_format_of_activations_has_a_size(codec, tiny_data):
    config = config_of(tiny_data, 2)
    config.pipeline.codec = codec
    rows, width = 8 * 32, 16
    bits = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}[codec]
    found = part.bytes_between_stages(config, SimpleNamespace(context=32, width=width))
    assert rows * width * bits // 8 <= found <= rows * (width * bits // 8 + 4)


@pytest.mark.parametrize(("stages", "layers"), [(3, ""), (2, "2,1")])
def test_layers_that_the_model_has_not_got_are_refused(stages, layers, tiny_data, tmp_path):
    """Before a worker starts, and in a sentence that names the number."""
    config = tiny.config(tiny_data, num_replicas=2, batch_size=16, model={"layers": 2})
    config.pipeline.update(stages=stages, layers=layers)
    with refuses(layers or stages, error=ConfigError), open_run(parse(config), tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_a_plan_puts_workers_on_its_machines_and_is_refused_elsewhere():
    plan = Plan(("x/0", "b/0"), topology.make("one_peer_exp", 1), stages=2)
    named, by_host = Node("aa", ("a", "x")), Node("bb", ("b",))
    assert nodes_of(plan, [by_host, named], 2) == [named, by_host]
    assert nodes_of(None, [by_host, named], 2) == [None, None]
    with refused("cluster.plan", "x"):
        nodes_of(plan, [by_host], 2)


class WorkerSpec:
    """In place of the actor of a worker."""

    def __init__(self, worker, secret):
        self.worker, self.error = worker, None

    def beat(self):
        if self.error is not None:
            raise self.error
        return 1

    def train(self, *_):
        if self.error is not None:
            raise self.error
        return self.worker.name

    def addresses(self):
        return self.worker.name, (self.worker.name, 1)

    def open(self, coordinator, addresses, data):
        assert data["the manifest of data.path"] and data["the training data"]
        assert coordinator == f"stage {self.worker.stage} of replica 0"
        own = [f"stage {s} of replica {self.worker.replica}" for s in range(2)]
        assert addresses == [(name, 1) for name in own]

    def connect(self):
        pass

    def begin(self, start, ahead):
        assert (start, ahead) == (0, 0)


@pytest.fixture
def workers(tiny_data, tmp_path):
    """2 x 2 workers, and their actors; waiting takes no time."""
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    config, actors = config_of(tiny_data, 2), LocalActors(wait=wait)
    config.ray.update(cpus=2.0, gpus=0.5)
    given = parse(config), tmp_path, [1, 1], [*"abcd"], actors, WorkerSpec
    with Workers(*given, clock=SimpleNamespace(monotonic=lambda: now[0], sleep=wait)) as made:
        yield made, [actor.there for actor in actors.started]
    assert all(actor.killed for actor in actors.started)
    ways = [tuple(actor.options[k] for k in ("on", "cpus", "gpus")) for actor in actors.started]
    assert ways == [(node, 2.0, 0.5) for node in "abcd"]


def test_a_dry_run_lets_all_workers_make_steps(tiny_data, tmp_path, capsys):
    """Up to and with the next round; the first ones compile."""
    config, made = config_of(tiny_data, 2, model={"layers": 2}), []

    class Counts(WorkerSpec):
        def train(self, start, stop, row):
            made.append((self.worker.name, stop - start))

    config.mix_every = 3
    with open_run(parse(config), tmp_path / "run") as (experiment, work, _, counts):
        given = experiment.config, tmp_path, counts, [None] * 4, LocalActors(), Counts
        with Workers(*given) as workers:
            Pipelines(experiment, work, counts, workers).time_steps()
            names = [f"stage {s} of replica {k}" for k in (0, 1) for s in (0, 1)]
    assert made == [(name, 3) for _ in range(1 + TIMED) for name in names]
    said = capsys.readouterr().err
    assert "in 2 stages of 1 + 1 layers" in said and "the config is valid: 20 steps" in said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_row_is_that_of_all_replicas_and_the_distance_that_of_all_stages(tiny_data, tmp_path):
    """By hand; after a checkpoint of step 4, whose data are those of step 7."""
    asked = []

    class Scripted(WorkerSpec):
        def begin(self, *given):
            asked.append(given)

        def train(self, *given):
            asked.append(given)
            i, s, steps = self.worker.replica, self.worker.stage, range(*given[:2])
            both = [np.array([10.0 * t + i]) for t in steps], [np.array([t + i / 2]) for t in steps]
            squares = (1 + i) * np.array([16.0, 36.0] if s else [9.0, 64.0])
            seconds = {"compute_s": 0.5 + s, "wait_s": 5.0 + s}
            return Span(*both, *np.array([[3 + i], [7 + i]]), squares, 2.0 + i + 50 * s, seconds)

        def evaluate(self):
            return np.array([6.0 + self.worker.replica, 2.0]) if self.worker.stage else None

    config = config_of(tiny_data, 2, model={"layers": 2}, log={"every": 10}, steps=18)
    config.lr_schedule.name = "cosine"
    with open_run(parse(config), tmp_path / "run") as (experiment, work, _, counts):
        given = experiment.config, tmp_path, counts, [None] * 4, LocalActors(), Scripted
        with Workers(*given) as workers:
            runner, clock = Pipelines(experiment, work, counts, workers), Clock()
            meta = {"step": 4, "examples": 7 * config.batch_size, "num_replicas": 2}
            runner.checkpoints = SimpleNamespace(newest=lambda say: meta)
            assert runner.restore() == (4, meta)
            with runner.training(4, 3, clock):  # the first step compiles, the second one is timed
                *_, made = (runner.step(done, 10) for done in (4, 5, 6))
                assert clock.waited == 2 * 3.0  # of a stage 0, but for what compiles
                assert len(runner.step(10, 18)) == 8
            assert runner.evaluate(lambda: None) == ({"eval/loss": 13 / 4}, (None, None))
    calls = [(4, 3), (4, 5, False), (5, 6, False), (6, 10, True), (10, 18, True)]
    assert asked == [call for call in calls for _ in range(4)]
    for t, metrics in zip(range(6, 10), made, strict=True):
        wanted = {"loss": [10 * t, 10 * t + 1], "grad_norm": [t, t + 0.5], "skipped": [3, 4]}
        wanted |= {"failing": [7, 8], "learning_rate": experiment.rate(t)}
        for name, value in wanted.items():
            np.testing.assert_allclose(metrics.pop(name), value, rtol=1e-6)
        assert not metrics
    assert runner.consensus() == (5.0, 0.5)
    seconds = {"0/compute_s": 0.5, "0/wait_s": 5, "1/compute_s": 1.5, "1/wait_s": 6}
    assert runner.measured(18, 14, 1.0) == {f"stages/{name}": x for name, x in seconds.items()}
    sent = 4 * experiment.task.summary()["parameters"], 8 * 8 * 16 * 4
    assert tuple(runner.messages.values()) == (*sent, 2)


def test_a_worker_with_other_data_is_refused_before_it_has_a_state(
    tiny_data, tmp_path, monkeypatch
):
    """Its host has another folder at the same path."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_data, "data")
    config = parse(config_of("data", 2, model={"layers": 2}))
    with open_run(config, tmp_path / "run") as (run, *_, counts):
        facts = facts_of(config, run.task)
    spec = worker.WorkerSpec(config, str(tmp_path / "run"), 0, 1, counts)
    monkeypatch.setattr(worker, "Stage", lambda *_: "a stage")
    assert worker.open_stage(spec, facts) == "a stage"
    for name in facts:
        for others in (facts | {name: "300"}, {k: facts[k] for k in facts if k != name}):
            with refuses(f"{name}: {others.get(name, 'none')} in train.py, {facts[name]} on "):
                worker.open_stage(spec, others)
    shutil.rmtree("data")
    with refuses("data", error=ConfigError):
        worker.open_stage(spec, facts)


def test_the_states_of_all_workers_of_a_machine_are_compared_with_it_together(
    tiny_data, tmp_path, monkeypatch
):
    """Here Ray is refused before it starts; a cluster reserves what each of them needs."""
    config = config_of(tiny_data, 2, model={"layers": 2, "width": 1024})
    with open_run(parse(config), tmp_path / "run") as (run, *_, counts):
        needs = worker.needs_of(run, counts)
        parameters = run.task.summary()["parameters"]
    # AccumAdam has two moments and the sum of a window; the table is lent, not copied.
    assert sum(needs) == pytest.approx(4 * 4 * parameters, rel=0.01) and needs[0] != needs[1]
    monkeypatch.setattr(machine, "memory_bytes", lambda: 2 * sum(needs) + 4 * 250e6 - 1)
    monkeypatch.setitem(os.environ, "RAY_AUTH_MODE", "token")
    with refuses("4 Ray actors", error=ConfigError):
        pipelines.run(parse(config), tmp_path / "run")
    config.ray.gpus = 1.0
    with open_run(parse(config), tmp_path / "run") as (run, *_, counts):
        assert worker.needs_of(run, counts) == [0, 0]
    config.ray.address, actors = "host:1", LocalActors()
    given = parse(config), tmp_path, counts, [None] * 4, actors, WorkerSpec
    with Workers(*given, needs=needs):
        reserved = [actor.options["memory"] for actor in actors.started]
    assert reserved == [need + 250e6 for need in 2 * needs]


@pytest.mark.parametrize("step", [0, 7])
def test_a_worker_that_is_killed_is_named_and_what_is_left_of_the_run(step, workers, tmp_path):
    """Others notice its end in an exchange before Ray does, and fail as well."""
    made, (first, *_, killed) = workers
    if step:
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    first.error, killed.error = ValueError("gloo"), Lost(RuntimeError(), killed=True)
    left = f"step {step}" if step else "no checkpoint"
    with refuses("stage 1 of replica 1", "killed", "1-1.txt", left, error=TrainingFailed):
        made.all("train", 0, 1, False)


def test_a_worker_that_fails_by_itself_is_named_with_its_error(workers):
    made, (silent, fails, *_) = workers
    silent.train = lambda *_: exec("raise Pending", globals())
    assert not made.over(made.begin("train", 0, 1, False)) and made.over(made.begin("beat"))
    fails.train = lambda *_: 1 / 0
    assert made.over(made.begin("train", 0, 1, False))  # as soon as one has failed
    with refuses("stage 1 of replica 0", "ZeroDiv", error=TrainingFailed):
        made.all("train", 0, 1, False)
    fails.train = lambda *_: (_ for _ in ()).throw(ConfigError("memory", field="x", value=1))
    with refuses("stage 1 of replica 0", error=ConfigError):  # its machine lacks something
        made.all("train", 0, 1, False)


@pytest.mark.parametrize(("answers", "name"), [(1, "heartbeat_s"), (0, "timeout_s")])
def test_a_worker_that_is_silent_is_named(answers, name, tiny_data, tmp_path):
    """At first its process must start, which may take longer."""
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    class Silent(WorkerSpec):
        answers_left = answers

        def beat(self):
            if (self.worker.replica, self.worker.stage) == (1, 0):
                if not self.answers_left:
                    raise Pending
                self.answers_left -= 1
            return 1

        def train(self, *_):
            raise Pending

    config = config_of(tiny_data, 2)
    config.cluster.update(heartbeat_s=30, timeout_s=200)
    given = parse(config), tmp_path, [1, 1], [None] * 4, LocalActors(wait=wait), Silent
    with (
        Workers(*given, clock=SimpleNamespace(monotonic=lambda: now[0], sleep=wait)) as made,
        refuses("stage 0 of replica 1", name, error=TrainingFailed),
    ):
        made.all("train", 0, 1, False)
    assert now[0] == pytest.approx(config.cluster[name], abs=2)


class Probe:
    """In place of a node's process."""

    def address(self):
        return "host:1"

    def measure(self, place, *asked):
        return f"of {place}", asked


class NeverStarts(Probe):
    def address(self):
        raise Silent("gives no answer")


@pytest.mark.parametrize("kind", [Probe, NeverStarts])
def test_links_are_measured_or_a_node_that_starts_no_process_is_given_up(kind, tiny_data):
    """It may have fewer cores than the config asks for; Ray itself never gives up."""
    config = config_of(tiny_data, 2)
    config.ray.update(cpus=2.0, gpus=0.5)
    nodes = [Node("aa", ("a",)), Node("bb", ("b", "host"))]
    actors = LocalActors({links.Probe: kind}, nodes)
    if kind is Probe:
        found = links.measured(config, actors, 1000, 3)
        asked = 200, ["a", "b"], 1000, 3
        assert found == ("of ('host:1', 2, 0)", asked, ["a/0", "b/0"])
        ways = [{"on": node, "cpus": 2.0, "gpus": 0.5} for node in nodes]
        assert [probe.options for probe in actors.started] == ways
    else:
        with pytest.raises(PeerLost):
            links.measured(config, actors, 1000, 1)
    assert len(actors.started) == 2 and all(probe.killed for probe in actors.started)
    with refused("ray.address", ""):
        links.measured(config, LocalActors(nodes=[Node("aa", ("a",))]), 1000, 1)


def test_stages_are_balanced_unless_the_config_names_their_layers(tiny_data):
    config = config_of(tiny_data, 2, model={"layers": 4})
    model = SimpleNamespace(layers=4, vocab_size=256, width=16)
    assert part.layers_of(config, model) == [3, 1]  # the output layer is 256 / (12 * 16)
    sizes = [SimpleNamespace(layers=8, vocab_size=192 * k, width=16) for k in range(8)]  # of k
    assert [part.layers_of(config, one)[1] for one in sizes] == [4, 4, 3, 3, 2, 2, 1, 1]
    config.pipeline.layers = "2,2"
    assert part.layers_of(config, model) == [2, 2]
