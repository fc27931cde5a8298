"""Configs checked on devices that are not here, and what XLA makes of a step for them."""

import contextlib
import importlib.util
from types import SimpleNamespace

import jax
import optax
import pytest
import tiny
from refusals import refused
from test_config import main, one_sentence, train_py  # noqa: F401 (a fixture)

from decent_jax import optim
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import format_bytes
from decent_jax.train import config as config_lib
from decent_jax.train import default_config, described, experiment, hlo, xla

needs_tpus = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="XLA's compiler for TPUs is not here: pip install -e '.[tpu]'",
)


def small(on, **changes):
    """A GPT of one layer, one replica on each device."""
    config = default_config("language_modeling")
    config.data.path = "stdlib"
    sizes = {"layers": 1, "heads": 2, "width": 128, "context": 32, "vocab_size": 256}
    config.model.update(dtype="bfloat16", bias=False, **sizes)
    config.num_replicas = config.batch_size = sum(map(len, on.by_process))
    return config_lib.changed(config_lib.parse(config), **changes)


def kernels_of(on, **changes):
    config = small(on, **changes)
    step = described.compiled(config, config_lib.make_schedule(config), on)
    return hlo.entry(step.program.as_text())


@needs_tpus
@pytest.mark.slow
@pytest.mark.parametrize("slices", ["", ",slices=2"])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_on_tpus_all_messages_start_with_the_step_and_are_hidden(topology, slices):
    on = described.target(topology + slices)
    found = hlo.overlap(kernels_of(on), on.seconds)
    assert (found.first, found.last) == (0, 0) and found.least > 0.99
    assert not found.exposed
    crosses = {"send", "recv"} if slices else {"collective-permute"}
    assert crosses <= {one.kind for one in found.counted}


@needs_tpus
@pytest.mark.slow
def test_between_slices_more_messages_are_hidden_than_xla_has_under_way_by_itself():
    """By itself it has 32; the others would start after the gradient."""
    on = described.target("v5e:2x2,slices=2")
    found = hlo.overlap(kernels_of(on, **{"model.layers": 9}), on.seconds)
    assert len(found.counted) > 2 * 32
    assert found.last == 0 and not found.exposed


@needs_tpus
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["hierarchical", "alternating_exp_ring"])
def test_what_groups_of_a_slice_send_to_others_is_hidden(schedule):
    """The sums and gathers inside a slice are not."""
    on = described.target("v5e:2x2,slices=2")
    found = hlo.overlap(kernels_of(on, schedule=schedule, replicas_per_node=4), on.seconds)
    assert found.last == 0 and found.least > 0.99
    assert {one.kind for one in found.counted} == {"send", "recv"}


@needs_tpus
@pytest.mark.slow
def test_without_our_options_messages_on_tpus_wait_for_the_gradient(monkeypatch):
    monkeypatch.setattr("decent_jax.train.xla.FOR_TPUS", {})
    on = described.target("v5p:2x2x1")
    assert hlo.overlap(kernels_of(on), on.seconds).least < 0.01


@needs_tpus
def test_an_option_that_this_compiler_does_not_know_is_left_out(monkeypatch):
    """Those that are set are known to jaxlib 0.10.2 and 0.12.0.1."""
    on = described.target("v5e:2x2")
    monkeypatch.setitem(xla.FOR_TPUS, "xla_tpu_no_such_option", True)
    config = small(on)
    schedule = config_lib.make_schedule(config)
    with pytest.warns(UserWarning, match="xla_tpu_no_such_option"):
        options = xla.options_of_step(
            described.place(config, on), schedule, optim.as_method(optax.identity())
        )
    assert set(options) == set(xla.FOR_TPUS) - {"xla_tpu_no_such_option"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "v5e", "v5e:", "v5e:4", "cpu:2x2", "v5e:4x4,slices=", "v5e:2x2 ", "V5E:2x2"),
        *("v5e:0x2", "v5e:1000x1000", "v5e:2x2,slices=0", "v5e:99999999999999999x2"),
        *("h100:8", "h100:2x2x2", "h100:2x2,slices=2"),
        pytest.param("v5e:3x5", marks=needs_tpus),
        pytest.param("tpu7x:1x1x1", marks=needs_tpus),
    ],
)
def test_devices_that_do_not_exist(text):
    with refused("--on", text):
        described.target(text)


def test_without_a_compiler_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("--on", "v5e:2x2"), named("jax[tpu]"):
        described.target("v5e:2x2")

    def no_plugin(*args, **kwargs):
        raise NotImplementedError("no topologies")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", no_plugin)
    with refused("--on", "h100:2x2"), named("jax[cuda12]"):
        described.target("h100:2x2")


@contextlib.contextmanager
def named(what):
    with pytest.raises(ConfigError) as caught:
        yield
    assert what in str(caught.value)
    raise caught.value


# --- The lines of --check --on; devices that are here stand for those that are not ---------------


@pytest.fixture(name="check_on")
def on_two_hosts_of_four(monkeypatch):
    """What `--check --on` says of the tiny config with these changes."""

    def check(memory=1 << 40, clock=None, **changes):
        devices = jax.devices()
        on = described.Target("h100:2x4", [devices[:4], devices[4:]], memory, clock)
        monkeypatch.setattr(described, "target", lambda text: on)
        config = tiny.waves(**({"mesh": {"devices": 0}} | changes))
        return described.check_on(config_lib.parse(config), "h100:2x4")

    return check


def test_the_lines_say_what_a_step_takes(check_on):
    lines = check_on(num_replicas=8, batch_size=16)
    assert len(lines) <= 10
    said = "\n".join(lines)
    assert "8 replicas, 1 on each, on 8 of 8 devices" in said and "hosts: 2" in said
    assert f"has {format_bytes(1 << 40)}" in said
    # XLA waits for messages on CPUs where it sends them.
    assert "hidden: 0 of" in said


def test_products_for_which_xla_finds_no_tiles_without_a_gpu(check_on, monkeypatch):
    compiled = jax.stages.Lowered.compile

    def compile_as_for_gpus(lowered, options=None):
        if options == {"xla_gpu_enable_triton_gemm": False}:
            return compiled(lowered)
        message = "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.350"
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_as_for_gpus)
    assert "on 8 of 8 devices" in check_on(num_replicas=8, batch_size=16)[0]


def test_devices_that_hold_several_replicas_or_a_part_of_one(check_on):
    assert "16 replicas, 2 on each, on 8 of 8" in check_on(num_replicas=16, batch_size=16)[0]
    assert "4 replicas, 1 on each, on 4 of 8" in check_on(num_replicas=4, batch_size=16)[0]
    both = {"mesh": {"fsdp": 2, "devices": 0}, "num_replicas": 4, "batch_size": 8}
    assert "4 replicas, 2 for each, on 8 of 8" in check_on(**both)[0]


def test_auto_takes_the_schedule_of_these_hosts(check_on):
    lines = check_on(num_replicas=8, batch_size=16, schedule="auto")
    assert any("hierarchical(complete, one_peer_exp)" in line for line in lines)


def test_a_message_that_travels_beside_several_steps(check_on):
    changes = {"algorithm": "noloco", "mix_every": 4, "outer": {"delay": 3}}
    lines = check_on(num_replicas=8, batch_size=16, **changes)
    assert any("in this order: " in line and "loop" in line for line in lines)


def test_what_cannot_run_there_is_one_sentence(check_on):
    with refused("--on", "h100:2x4"), named("micro_batches"):
        check_on(memory=1000, num_replicas=8, batch_size=16)
    with refused("--on", "h100:2x4"), named("16"):
        check_on(num_replicas=8, batch_size=16, mesh={"fsdp": 2, "devices": 0})
    with refused("num_replicas", 3):
        check_on(num_replicas=3, batch_size=6)
    with refused("--on", "h100:2x4"):
        check_on(trainer="peers")


# As libtpu 0.0.42.1 words it for v5e; the second is of others.
@pytest.mark.parametrize(
    "words",
    [
        "Ran out of memory on HBM, the total memory required for HLO temporaries (54.77G) exceeds "
        "available HBM (15.75G).",
        "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 54.77G of "
        "15.75G hbm. Exceeded hbm capacity by 39.02G.",
    ],
)
def test_what_does_not_fit_a_tpu_says_how_much_is_there(words, check_on, monkeypatch):
    def refuse(*args):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {words}")

    monkeypatch.setattr(described, "compiled", refuse)
    with refused("--on", "h100:2x4"), named("54.77GiB"), named("15.75GiB"):
        check_on(num_replicas=8, batch_size=16)


def test_cudnn_is_not_for_tpus(monkeypatch, tiny_data):
    monkeypatch.setattr(described, "target", lambda text: described.Target(text, [], 0, 1e9))
    with refused("model.attention", "cudnn"):
        config = tiny.config(tiny_data, model={"attention": "cudnn"})
        described.check_on(config_lib.parse(config), "v5e:2x2")


def test_without_cudnn_the_sentence_says_what_to_install(check_on, monkeypatch):
    def refuse(*args):
        raise RuntimeError("cuDNN not found.")  # as jax words it

    monkeypatch.setattr(described, "compiled", refuse)
    with refused("--on", "h100:2x4"), named("jax[cuda12]"), named("model.attention=xla"):
        check_on(num_replicas=8, batch_size=16)


def test_the_command(call, monkeypatch):
    code, err = call("--check", "--on", "v5e", workdir=None)
    assert code == 2 and "--on" in one_sentence(err)
    code, err = call("--on", "v5e:2x2")
    assert code == 2 and "--check" in one_sentence(err)
    monkeypatch.setattr(described, "check_on", lambda config, on: [f"{on} is fine"])
    with pytest.raises(SystemExit) as left:
        call("--check", "--on", "v5e:2x2", workdir=None)
    assert not left.value.code


# --- Slices ---------------------------------------------------------------------------------------


def placed(platform, slices):
    devices = [SimpleNamespace(slice_index=k) for k in slices]
    return SimpleNamespace(platform=platform, device_of_each=devices)


def test_a_slice_of_tpus_counts_as_a_host():
    assert experiment.slices_of(placed("tpu", [0, 0, 1, 1])) == [0, 0, 1, 1]
    assert experiment.slices_of(placed("gpu", [0, 0, 1, 1])) is None
    alone = SimpleNamespace(platform="tpu", device_of_each=[object(), object()])
    assert experiment.slices_of(alone) == [0, 0]  # as described devices of one slice are


@needs_tpus
def test_auto_knows_slices(tmp_path):
    """Eight hosts of one slice are one; two slices are two, whatever hosts they have."""
    for text, wanted in (("v5e:4x4", 16), ("v5e:2x4,slices=2", 8)):
        on = described.target(text)
        placement = described.place(small(on), on)
        assert experiment.replicas_per_host(experiment.slices_of(placement)) == wanted
