"""Which of XLA's options a step is compiled with, and where compiled programs are kept."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
import tiny

from decent_jax import optim, replicas, tasks, topology
from decent_jax.train import algorithm, xla
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.config import parse

pytestmark = pytest.mark.usefixtures("users_hlo")


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    xla.known.cache_clear()


def options_on(platform, fsdp=1, schedule="one_peer_exp", combine="awc"):
    schedule = topology.make(schedule, 8, replicas_per_node=2)
    tx = optim.decentralized(optax.sgd(0.1), schedule, combine)
    mesh = SimpleNamespace(devices=np.array(jax.devices()))
    placement = SimpleNamespace(platform=platform, fsdp=fsdp, mesh=mesh)
    return xla.options_of_step(placement, schedule, tx)


def test_xla_knows_all_of_those_that_a_platform_has():
    """On GPUs none where a replica has several, or stages of a round are not held back."""
    assert options_on("cpu") == xla.FOR_CPUS
    assert options_on("gpu") == options_on("cuda") == xla.FOR_GPUS
    assert options_on("gpu", fsdp=2) == {}
    assert options_on("gpu", schedule="alternating_exp_ring") == xla.FOR_GPUS
    assert options_on("gpu", schedule="alternating_exp_ring", combine="atc") == {}
    assert options_on("gpu", schedule="complete", combine="atc") == xla.FOR_GPUS


def test_the_user_goes_first(monkeypatch):
    taken, *others = xla.FOR_GPUS
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x --{taken}=false")
    assert list(options_on("gpu")) == others


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_tpus_have_their_own(variable, monkeypatch):
    """XLA for TPUs alone knows them; tests/train/test_described.py compiles with it."""
    monkeypatch.setattr(xla, "known", lambda *option: True)
    monkeypatch.setenv(variable, "--xla_tpu_use_aggressive_scheduling=false")
    taken = "xla_tpu_use_aggressive_scheduling"
    assert options_on("tpu") == {k: v for k, v in xla.FOR_TPUS.items() if k != taken}
    monkeypatch.delenv(variable)
    assert options_on("tpu") == options_on("tpu", fsdp=2) == xla.FOR_TPUS


def test_an_option_that_is_gone_is_left_out_with_a_word(monkeypatch):
    monkeypatch.setitem(xla.FOR_GPUS, "xla_gpu_no_such_option", True)
    with pytest.warns(UserWarning, match="xla_gpu_no_such_option"):
        options = options_on("gpu")
    assert "xla_gpu_no_such_option" not in options and len(options) == 2


def test_a_value_that_an_option_cannot_have_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="maybe"):
        xla.known(next(iter(xla.FOR_CPUS)), "maybe")


def compiled(config):
    """A step of 4 replicas on 4 devices, and the bytes of each array of a replica's parameters."""
    schedule, placement = config_lib.make_schedule(config), replicas.place(4, jax.devices()[:4])
    task = tasks.find(config.task).make(config, None, lambda *_, **__: None)
    tx = algorithm.transformation(parse(config), schedule, 0.01, task.decay_mask)
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.sharding(x.shape)),
        jax.eval_shape(lambda: step_lib.init_state(config, task, tx, placement)),
    )
    shape = (4, config.batch_size // 4, tiny.CONTEXT + 1)
    batch = jax.ShapeDtypeStruct(shape, np.int32, sharding=placement.stacked)
    step = step_lib.make_step(config, task, tx, lambda t: 0.01, schedule, placement)
    params = [x.size * x.dtype.itemsize // 4 for x in jax.tree.leaves(state.params)]
    return step.lower(state, batch, np.int32(0), round=0).compile(), params


def test_the_step_is_compiled_with_them(tiny_data, monkeypatch):
    monkeypatch.setattr(xla, "options_of_step", lambda *_: {"xla_no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compiled(tiny.config(tiny_data))


@pytest.mark.parametrize(
    ("name", "copies", "model", "order"),
    [
        ("accum_adam", 4, {"layers": 1, "dropout": 0.0}, "MEMORY_OPTIMIZED"),
        ("all_reduce", 3, {"layers": 2}, "DEFAULT"),
    ],
)
def test_memory_is_state_and_gradients_and_what_is_received(
    name, copies, model, order, tiny_data, monkeypatch
):
    """With next to no activations: a sequence of 8 tokens through a million parameters.

    That is what a step needs, and the place of one array for what kernels work on, one after the
    other (jaxlib 0.12 has it beside both trees, as its buffer assignment shows). XLA's CPU backend
    also writes out the update, to see whether it is finite; on GPUs a kernel does both
    (docs/accelerators.md). XLA's default order for CPUs takes half a copy more in gossip, to save
    time; the one that saves memory takes half a copy more in all-reduce.
    """
    order = {"xla_cpu_scheduler_type": f"CPU_SCHEDULER_TYPE_{order}"}
    monkeypatch.setattr(xla, "FOR_CPUS", xla.FOR_CPUS | order)
    changes = {"algorithm": name, "batch_size": 4, "model": {"width": 256} | model}
    program, arrays = compiled(tiny.config(tiny_data, **changes))
    memory, params = xla.memory_of(program), sum(arrays)
    assert memory.state == pytest.approx(copies * params, rel=0.01)
    assert memory.temporary < 3.02 * params + max(arrays), memory.temporary / params


# --- where compiled programs are kept -------------------------------------------------------------


TWICE_SLOW = """
import jax, jax.numpy as jnp
from decent_jax.train import xla
xla._MIN_SECONDS = 0.0
print(xla.use_cache())
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3))).block_until_ready()
print(sum(name == "/jax/compilation_cache/cache_hits" for name in hits))
"""


def call(home):
    """(folder, cache hits) of a process of its own."""
    variables = {"XDG_CACHE_HOME": str(home), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    variables = os.environ | variables
    variables.pop("JAX_COMPILATION_CACHE_DIR", None)  # a user's own would come first
    argv = [sys.executable, "-c", TWICE_SLOW]
    said = subprocess.check_output(argv, env=variables, text=True)
    folder, hits = said.split()
    return folder, int(hits)


def test_a_second_process_compiles_nothing(tmp_path):
    folder, hits = call(tmp_path)
    assert Path(folder) == tmp_path / "decent_jax" / "compiled" and hits == 0
    assert any(Path(folder).iterdir())
    same, hits = call(tmp_path)
    assert same == folder and hits >= 1


def test_a_user_without_a_home_has_no_cache(tmp_path, monkeypatch):
    """Nor a folder that is named ~ where the run was started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without an entry in passwd
    jax.config.update("jax_enable_compilation_cache", True)
    try:
        assert xla.use_cache() is None and not any(tmp_path.iterdir())
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
        jax.config.update("jax_compilation_cache_dir", None)


def test_the_users_own_settings_come_first(tmp_path, monkeypatch):
    """No cache, as in these tests, a folder of the user's own, or a home that is read-only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    assert xla.use_cache() is None
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert xla.use_cache() is None and not jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", "/my/own")
        assert xla.use_cache() is None and jax.config.jax_compilation_cache_dir == "/my/own"
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
        jax.config.update("jax_compilation_cache_dir", None)


def test_what_was_read_longest_ago_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(xla, "CACHE_LIMIT", 100)
    for age, name in enumerate("abcde"):
        path = tmp_path / name
        path.write_bytes(bytes(30))
        os.utime(path, (1000 - age, 1000 - age))
    for _ in range(2):  # the second time it is below the limit
        xla._prune(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
