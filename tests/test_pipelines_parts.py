"""Parts of pipelines: the bubble, checkpoints of another cut, gradients, and what is refused."""

import contextlib
import itertools
import queue
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import tiny
from pipeline_threads import Threads
from ray.exceptions import GetTimeoutError
from refusals import refuses
from test_pipelines import config_of

from decent_jax import topology
from decent_jax.commands import main as command
from decent_jax.peers import start
from decent_jax.pipelines import channels, links, part, watched
from decent_jax.pipelines.channels import Channel, Door, Key, Mailbox
from decent_jax.pipelines.part import Part
from decent_jax.pipelines.worker import Worker
from decent_jax.plan import plan_file
from decent_jax.plan.plan_file import Plan
from decent_jax.train import ConfigError, PeerLost

pytestmark = pytest.mark.usefixtures("compile_once")


FORWARD_S = 0.15


class Sleeper:
    """A stage whose micro-batches only take time, as long backward as forward."""

    def __init__(self, config, stage):
        self.grid = SimpleNamespace(config=config)
        task = SimpleNamespace(config=SimpleNamespace(tied=False))
        self.part = Part(task, stage, [1] * config.pipeline.stages)
        self.state = SimpleNamespace(params={})
        self.busy = 0.0  # seconds; a loaded machine wakes late

    def sleep(self, seconds):
        began = time.monotonic()
        time.sleep(seconds)
        self.busy += time.monotonic() - began

    def rows(self, tree):
        return tree

    def begin_mix(self, rnd):
        return None

    def zeros(self, params, borrowed):
        return np.zeros(1), ({}, {})

    def forward(self, *_):
        self.sleep(FORWARD_S)
        return ()

    def backward(self, params, borrowed, x, tokens, total, *_):
        # The last one's includes its forward.
        self.sleep(2 * FORWARD_S if self.part.is_last else FORWARD_S)
        return total, ()

    def mean(self, loss, grads):
        return loss, grads

    def squares(self, grads):
        return np.ones(1)

    def update(self, *_):
        pass


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_bubble_of_equal_stages(order, tiny_data, monkeypatch):
    """A share (S - 1) / (M + S - 1) of a step, within 10 percent; cores do not matter to sleep."""
    stages, cuts = 4, 4
    config = config_of(tiny_data, stages, cuts, algorithm="all_reduce")
    config.pipeline.order = order
    endless = itertools.repeat(np.zeros((1, cuts, 1)))
    monkeypatch.setattr(Worker, "_open", lambda self, start: endless)
    boxes = [Mailbox() for _ in range(stages)]
    workers = [
        Worker(Sleeper(config, s), boxes[s], lambda to, key, value: boxes[to].put(key, value))
        for s in range(stages)
    ]
    shares = []
    with ThreadPoolExecutor(stages) as threads:
        for t in range(2):
            for worker in workers:
                worker.stage.busy = 0.0
            began = time.monotonic()
            for call in [threads.submit(worker._step, t) for worker in workers]:
                call.result()
            busy = np.mean([worker.stage.busy for worker in workers])
            shares.append(1 - busy / (time.monotonic() - began))
    assert min(shares) == pytest.approx((stages - 1) / (cuts + stages - 1), rel=0.1)


def test_a_message_that_does_not_come_is_named():
    with pytest.raises(PeerLost, match=r"stage 3 has sent no activation of step 7 within"):
        Mailbox().take(Key("activation", 7, 0, 3), 0.01)


def test_messages_keep_their_order_and_a_stranger_sends_none():
    box, secret = queue.SimpleQueue(), b"secret"
    door = Door("127.0.0.1", secret, lambda *message: box.put(message))
    stranger, friend = Channel(door.address, b"other"), Channel(door.address, secret)
    keys = [Key("activation", 7, k, 0) for k in range(3)]
    sent = np.arange(100_000, dtype=ml_dtypes.bfloat16).reshape(2, -1)
    stranger.send(keys[0], None)
    for key in keys:
        friend.send(key, (sent + key.k,))
    for key in keys:
        got, (value,) = box.get(timeout=10)
        assert got == key
        np.testing.assert_array_equal(value, sent + key.k)
    ends = time.monotonic() + 10
    with pytest.raises(PeerLost, match="activation of step 7 could not be sent"):
        while time.monotonic() < ends:
            stranger.send(keys[1], None)
            time.sleep(0.01)
    assert box.empty()


def test_a_silent_stranger_keeps_no_stage_waiting(monkeypatch):
    """Such as a scan of ports. It is left alone after a while."""
    monkeypatch.setattr(channels, "_ANSWER_S", 1)
    box, secret = queue.SimpleQueue(), b"secret"
    door = Door("127.0.0.1", secret, lambda *message: box.put(message))
    with socket.create_connection(door.address) as stranger:
        Channel(door.address, secret).send(Key("activation", 7, 0, 0), None)
        assert box.get(timeout=10)[1] is None
        stranger.settimeout(10)
        while stranger.recv(1000):  # the question, and then the end
            pass


@pytest.mark.parametrize(("wire", "bound"), [("bfloat16", 0.02), ("int8", 0.06)])
def test_rounded_activations_give_nearly_the_same_gradient(wire, bound, tiny_data, tmp_path):
    """A step of plain SGD, relative to its norm; int8 rounds to 1/127 of a row's largest."""

    def parameters(stages, wire):
        model = {"layers": 2, "dropout": 0.0}
        config = config_of(tiny_data, stages, 2, algorithm="decentralized_sgd", model=model)
        config.update(num_replicas=1, mix_every=100)
        config.optimizer.update(momentum=0.0, weight_decay=0.0, clip_norm=0.0)
        config.pipeline.wire = wire
        with Threads(config, tmp_path) as threads:
            before = threads.params()
            threads.train(0, 1)
            after = threads.params()
        return np.concatenate([(after[k] - before[k]).ravel() for k in sorted(before)])

    exact, rounded = parameters(1, "float32"), parameters(2, wire)
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < bound


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"pipeline__stages": 3}, "pipeline.stages", "3"),
        ({"pipeline__micro_batches": 3}, "pipeline.micro_batches", "3"),
        ({"micro_batches": 2}, "micro_batches", "2"),
        ({"model__preset": "llama_125m"}, "model.preset", "llama_125m"),
        ({"algorithm": "gradient_tracking"}, "algorithm", "gradient_tracking"),
        ({"pipeline__layers": "2,1"}, "layers", "2,1"),
        ({"eval__ema_decay": 0.9}, "eval.ema_decay", "0.9"),
        ({"cluster__plan": "PLAN"}, "cluster.plan", "3"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    changes, field, value, tiny_data, tmp_path, capsys
):
    plan = tmp_path / "plan.json"
    names = tuple(f"host{k}/0" for k in range(6))
    Plan(names, topology.make("one_peer_exp", 2), stages=3).save(plan)
    path = tiny.write_config(tmp_path / "config.py", tiny_data)
    settings = {"num_replicas": 2, "batch_size": 16, "model__layers": 2, "pipeline__stages": 2}
    settings |= changes
    flags = [f"--config.{k.replace('__', '.')}={v}" for k, v in settings.items()]
    flags = [flag.replace("=PLAN", f"={plan}") for flag in flags]
    argv = ["--config", str(path), "--workdir", str(tmp_path / "run"), *flags]
    assert command.train(argv, "train.py") == 2
    err = capsys.readouterr().err
    assert err.startswith("train.py: ") and err.count("\n") == 1, err
    assert field in err and value in err, err


def test_a_plan_puts_cells_on_its_machines_and_is_refused_elsewhere():
    plan = Plan(("a/0", "b/0"), topology.make("one_peer_exp", 1), stages=2, layers=(1, 3))
    node = {"Alive": True, "NodeManagerHostname": "b", "NodeID": "bb" * 28}
    nodes = [node, node | {"NodeName": "a", "NodeManagerHostname": "x", "NodeID": "aa" * 28}]
    found = watched.strategies(plan, nodes, 2)
    assert [one.node_id for one in found] == ["aa" * 28, "bb" * 28]
    assert watched.strategies(None, nodes, 2) == ["SPREAD", "SPREAD"]
    with pytest.raises(ConfigError, match="other machines: it names a, and the Ray cluster has b;"):
        watched.strategies(plan, [node], 2)


def test_a_plan_is_read_as_it_was_written(tmp_path):
    plan = Plan(("a/0", "b/0"), topology.make("one_peer_exp", 1), stages=2, layers=(1, 3))
    plan.save(tmp_path / "plan.json")
    again = plan_file.load(tmp_path / "plan.json")
    assert (again.devices, again.stages, again.layers) == (plan.devices, 2, (1, 3))
    with refuses(3, 2):
        Plan(plan.devices, plan.schedule, stages=3)


def test_too_few_machines_are_refused(tiny_data, monkeypatch):
    monkeypatch.setattr(start.ray, "cluster_resources", lambda: {"CPU": 3.0})
    config = config_of(tiny_data, 2)
    config.pipeline.cpus = 1.0
    with pytest.raises(ConfigError, match=r"4 pipeline actors .* need 4 CPU, and Ray has 3"):
        start.check_resources(config, "pipeline", 4)


def test_a_node_that_starts_no_process_is_not_waited_for_without_end(tiny_data, monkeypatch):
    """It may have fewer cores than the config asks for; Ray itself never gives up."""
    killed = []

    def get(calls, timeout=None):
        if timeout is None:
            pytest.fail("this would wait for ever")
        raise GetTimeoutError

    node = {"Alive": True, "NodeManagerHostname": "a", "NodeID": "aa" * 28}
    nodes = lambda: [node, node | {"NodeManagerHostname": "b"}]  # noqa: E731
    fake = SimpleNamespace(nodes=nodes, get=get, kill=killed.append)
    monkeypatch.setattr(links, "ray", fake)
    monkeypatch.setattr(links, "ray_for", lambda *_: contextlib.nullcontext())
    actor = SimpleNamespace(address=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(links, "start_actor", lambda *_: actor)
    with pytest.raises(PeerLost, match=r"no process within cluster.timeout_s \(300 s\)"):
        links.measure(config_of(tiny_data, 2), 1000, 1)
    assert len(killed) == 2


def test_layers_of_the_plan_are_used_unless_the_config_names_others(tiny_data):
    config = config_of(tiny_data, 2, model={"layers": 4})
    model = SimpleNamespace(layers=4, vocab_size=256, width=16)
    plan = Plan(("a/0", "b/0"), topology.make("one_peer_exp", 1), stages=2, layers=(1, 3))
    assert part.layers_of(config, model, plan) == [1, 3]
    assert part.layers_of(config, model) == [3, 1]  # the output layer is 256 / (12 * 16)
    config.pipeline.layers = "2,2"
    assert part.layers_of(config, model, plan) == [2, 2]
