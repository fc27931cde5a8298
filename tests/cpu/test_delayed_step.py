"""Messages that overlap several steps: a message and its steps in one program, and a run."""

import itertools
from types import SimpleNamespace

import harness
import jax
import numpy as np
import pytest
import small_runs
import tiny
from test_overlap import Layers

from decent_jax import replicas
from decent_jax.cpu import overlap
from decent_jax.train import algorithm
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.config import parse

pytestmark = pytest.mark.usefixtures("compile_once")

# A coded mean of all in two stages; neighbours beside one step; nodes, whose last stage waits.
CASES = {
    "mean": ("diloco", "complete", 3, {"delay": 2, "carry": True}, {"codec": "int8"}),
    "pairs": ("noloco", "one_peer_exp", 2, {"delay": 1}, {}),
    "nodes": ("noloco", "hierarchical", 3, {"delay": 2}, {"replicas_per_node": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_delayed_step_is_a_message_and_its_steps(name):
    """The message is that of the parameters before; the steps know nothing of it. In one program,
    and on CPU hosts in several."""
    method, schedule, every, numbers, changes = CASES[name]
    changes = {"schedule": schedule, "mix_every": every, "outer": numbers} | changes
    config = tiny.config("no data", algorithm=method, mesh={"devices": 4}, **changes)
    config = parse(config)
    schedule, task = config_lib.make_schedule(config), Layers(mixes_state=name == "nodes")
    placement = replicas.place(4, jax.devices()[:4])
    tx = algorithm.transformation(config, schedule, lambda t: 0.01, None, placement.axis_name)
    assert tx.delayed.delay == numbers["delay"]
    step = step_lib.make_step(config, task, tx, rate, schedule, placement)
    state = step_lib.init_state(config, task, tx, placement)
    rng = np.random.default_rng(0)
    shape, delay, r = (4, 2, 32), numbers["delay"], schedule.period - 1
    batches = [placement.put(rng.normal(size=shape).astype(np.float32)) for _ in range(1 + delay)]

    def program(batch, round):
        return step.lower(state, batch, np.int32(0), round=round).compile()

    start = jax.tree.map(jax.numpy.copy, state)
    local_step, delayed = program(batches[0], None), program(tuple(batches[1:]), r)
    state, _ = local_step(state, batches[0], np.int32(0))
    copy = jax.tree.map(jax.numpy.copy, state)
    arrived, metrics = delayed(copy, tuple(batches[1:]), np.int32(1))

    def stacked(fn, *args):
        return jax.jit(jax.vmap(lambda *own: fn(*own, r), axis_name="replica"))(*args)

    late, own = jax.device_get((state.params, state.opt_state.own))
    message = stacked(tx.delayed.depart, late, own, jax.device_get(state.opt_state.count))
    for k, (batch, got) in enumerate(zip(batches[1:], metrics, strict=True)):
        state, wanted = local_step(state, batch, np.int32(1 + k))
        tiny_close(got, wanted)
    now = jax.device_get((state.params, state.opt_state.own))
    params, own = stacked(tx.delayed.arrive, *now, late, message)
    tiny_close(arrived.params, params)
    tiny_close(arrived.opt_state, state.opt_state._replace(own=own))
    if name in ("mean", "nodes"):
        with harness.as_if(over_gloo=True):
            hosts = step_lib.make_step(config, task, tx, rate, schedule, placement)
            local_step = hosts.lower(start, batches[0], np.int32(0), round=None).compile()
            delayed = hosts.lower(start, tuple(batches[1:]), np.int32(0), round=r).compile()
        start, _ = local_step(start, batches[0], np.int32(0))
        copy, args = jax.tree.map(jax.numpy.copy, start), (tuple(batches[1:]), np.int32(1))
        tiny_close(delayed(start, *args), (arrived, metrics))
        ticks = SimpleNamespace(perf_counter=itertools.count().__next__)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overlap, "time", ticks)
            before = delayed._replace(compute=Before(delayed.compute))
            made, (steps_s, message_s) = before.timed(copy, *args)
        tiny_close(made, (arrived, metrics))
        assert 0 < steps_s < message_s == 5  # after four devices
    spread = np.ptp(np.asarray(arrived.model_state["mean"]))
    assert (spread < np.ptp(np.asarray(state.model_state["mean"]))) == task.mixes_state


class Before:
    """In place of a `PerDevice`: its steps end before a message does."""

    def __init__(self, steps):
        self.steps = steps

    def begin(self, run, *trees):
        made = self.steps.begin(run, *trees)()
        return lambda: made


def rate(t):
    return 0.01 * t


def tiny_close(got, wanted):
    got, wanted = jax.device_get((got, wanted))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_what_falls_due_during_a_flight_waits_until_it_has_arrived(tmp_path):
    """Messages span steps 1 to 4 and 5 to 8; one sent at step 9 would arrive after the end."""
    changes = {"algorithm": "noloco", "mix_every": 4, "outer": {"delay": 3, "carry": True}}
    changes |= {"log": {"every": 2}, "eval": {"every": 5}, "checkpoint": {"every": 3, "keep": 9}}

    def run(folder):
        return tiny.run(tiny.waves(steps=10, **changes), tmp_path / folder)

    whole = run("whole")
    rows = tiny.rows(whole)
    assert [row["step"] for row in rows if "train/loss" in row] == [4, 8, 10]
    assert [row["step"] for row in rows if "eval/loss" in row] == [5, 10]
    saved = sorted(int(path.name) for path in whole.glob("checkpoints/[0-9]*"))
    assert saved == [4, 8, 9, 10]
    for step in (4, 9):
        small_runs.killed_after(step, whole, tmp_path / str(step))
        tiny.assert_same_state(whole, run(str(step)), 10)
