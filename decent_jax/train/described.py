"""Compiles a config's step for devices that this machine lacks: ``train.py --check --on v5e:4x4``.

XLA needs only a description of the devices. Nothing runs: the result is a compiled schedule, not a
measurement.
"""

import contextlib
import importlib.util
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib.version
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pallas_tpu

from decent_jax import replicas, tasks
from decent_jax.cluster import start as cluster
from decent_jax.data import loader
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.format import format_bytes, format_number, shown
from decent_jax.ground.pytree import PyTree
from decent_jax.monitor.goodput import peak_of
from decent_jax.replicas import Placement, TrainState
from decent_jax.tasks import Task
from decent_jax.topology import Schedule
from decent_jax.train import algorithm, experiment, hlo, xla
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.delayed_step import Blocks
from decent_jax.train.settings import Config

MOST_DEVICES = 10_000
TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
_FORM = re.compile(r"(\w+):(\d+(?:x\d+)+)(?:,slices=(\d+))?")
_EXAMPLES = "write v5e:4x4, tpu7x:2x2x1,slices=2 or h100:2x8 (nodes x GPUs per node)"
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84942979072
  runtime_version: "12.8.0" driver_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
H100_BANDWIDTH, H100_FLOPS = 3.35e12, 600e12  # bytes, and FLOPs of bfloat16 products, per second


class Target(NamedTuple):
    """Devices that are described to XLA and need not be present.

    name: the value of ``--on``.
    by_process: the devices of each process.
    memory: bytes per device.
    clock: cycles per second of a TPU; None on a GPU, for which XLA estimates no cycles.
    """

    name: str
    by_process: list[list[jax.Device]]
    memory: int
    clock: float | None

    def nodes(self, placement: Placement) -> list[int]:
        """The TPU slice or host of each replica."""
        hosts = {device: k for k, held in enumerate(self.by_process) for device in held}
        by_host = [hosts[device] for device in placement.device_of_each]
        return experiment.slices_of(placement) or by_host

    def per_node(self, placement: Placement) -> int:
        """Replicas per slice or host; 1 if these hold different numbers."""
        return experiment.replicas_per_host(self.nodes(placement))

    def seconds(self, kernel: hlo.Instruction) -> float:
        """Estimated seconds of a kernel: by XLA on TPUs, from its bytes and FLOPs on GPUs."""
        if self.clock:
            return kernel.cycles / self.clock
        return max((kernel.read + kernel.written) / H100_BANDWIDTH, kernel.flops / H100_FLOPS)


def target(text: str) -> Target:
    """The devices that ``--on`` names.

    Raises:
      ConfigError: no such devices are known, or their compiler is not installed.
    """
    match = _FORM.fullmatch(text)
    kind, sizes, slices = match.groups() if match else ("", "", None)
    if kind not in (*TPUS, "h100"):
        raise _refused(text, f"names no devices: {_EXAMPLES}")
    count = math.prod(map(int, sizes.split("x"))) * int(slices or 1)
    if not 0 < count <= MOST_DEVICES:
        raise _refused(text, f"must name from 1 to {MOST_DEVICES} devices")
    if kind == "h100":
        if slices or sizes.count("x") != 1:
            raise _refused(text, "must be nodes x GPUs per node, such as h100:2x8")
        return Target(text, _gpus(text, *map(int, sizes.split("x"))), 84_942_979_072, None)
    devices = _tpus(text, f"{kind}:{sizes}", int(slices or 1))
    by_process: dict[int, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda d: (d.process_index, d.id)):
        by_process.setdefault(device.process_index, []).append(device)
    cores = 2 if kind in ("v4", "v5p") else 1  # TensorCores per `jax.Device`
    info = pallas_tpu.get_tpu_info_for_chip(pallas_tpu.ChipVersion(kind.removeprefix("tpu")), cores)
    # From v6e on, a matrix unit computes two rows of products per cycle, by `TpuInfo`'s figures.
    flops = 2 * info.num_mxus * info.mxu_column_size**2 * (2 if info.generation > 5 else 1)
    memory = info.hbm_capacity_bytes * cores
    return Target(text, list(by_process.values()), memory, info.bf16_ops_per_second / flops)


def _refused(text: str, why: str) -> ConfigError:
    return ConfigError(f"--on {shown(text)} {why}", field="--on", value=text)


def _tpus(text: str, topology: str, slices: int) -> list[jax.Device]:
    if not importlib.util.find_spec("libtpu"):
        raise _refused(text, "needs the compiler for TPUs: pip install 'jax[tpu]'")
    # There is no TPU here whose metadata libtpu could query, or which processes could compete for.
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    several = {"num_slices": slices} if slices > 1 else {}
    try:
        described = topologies.get_topology_desc(  # pyright: ignore[reportUnknownMemberType]
            platform="tpu", topology_name=topology, **several
        )
    except RuntimeError as error:
        why = (str(error).partition(": ")[2] or str(error)).splitlines()[0]
        raise _refused(text, f"is not a topology that XLA knows: {why}") from None
    return list(described.devices)


def _gpus(text: str, processes: int, each: int) -> list[list[jax.Device]]:
    form = f"1x{processes}x{each}"
    try:
        described = topologies.get_topology_desc(  # pyright: ignore[reportUnknownMemberType]
            "", "cuda", topology=form, target_config=H100
        )
    except (NotImplementedError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        needed = "needs XLA's compiler for GPUs"
        raise _refused(text, f"{needed}: pip install 'jax[cuda12]' ({why})") from None
    devices = list(described.devices)
    return [devices[k : k + each] for k in range(0, len(devices), each)]


# --- The step -------------------------------------------------------------------------------------


class Described(NamedTuple):
    """The compiled step of a round, and the inputs of its compilation."""

    program: Any
    task: Task
    schedule: Schedule
    placement: Placement
    state: TrainState  # shapes of the stacked state, with the placement's shardings
    rnd: int | None
    spans_steps: bool  # whether the program makes all steps that a delayed message overlaps


def place(config: Config, on: Target) -> Placement:
    """Place the replicas on the described devices.

    Raises:
      ConfigError: the described devices cannot hold the replicas.
    """
    wanted, fsdp, there = config.num_replicas, config.mesh.fsdp, sum(map(len, on.by_process))
    if wanted * fsdp > there and fsdp > 1:
        needed = f"{wanted} replicas of {fsdp} devices each need {wanted * fsdp}"
        raise _refused(on.name, f"has {there} devices, and {needed}: lower one of the two")
    devices = cluster.choose_devices(wanted * fsdp, config.mesh.devices, on.by_process)
    return replicas.place(wanted, devices, fsdp)


def compiled(config: Config, schedule: Schedule, on: Target, rnd: int | None = None) -> Described:
    """Compile the step of one round for described devices.

    Args:
      config: the run's config.
      schedule: its communication schedule.
      on: the devices.
      rnd: a round, taken modulo the period; None: the round that sends the most between hosts.

    Raises:
      ConfigError, DataError: the config or its data cannot be used.
      jax.errors.JaxRuntimeError: XLA's own message, for example if the program does not fit a TPU.
    """

    def described(tree: PyTree, sharding: Callable[[tuple[int, ...]], object]):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x.shape)), tree
        )

    n, placement = config.num_replicas, place(config, on)
    with tempfile.TemporaryDirectory() as folder:
        task = tasks.find(config.task).make(
            config, Path(folder), lambda message: contextlib.nullcontext()
        )
        with loader.train_batches(
            task.train_source,
            seed=config.seed,
            num_replicas=n,
            batch_size=config.batch_size,
            replicas=[0],
        ) as batches:
            of_one = next(batches)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), of_one)
    batch = described(batch, placement.sharding_of_batch)
    _, _, rate = experiment.durations(config, task)
    tx = algorithm.transformation(config, schedule, rate, task.decay_mask, placement.axis_name)
    state = jax.eval_shape(lambda: step_lib.init_state(config, task, tx, placement))
    state = described(state, placement.sharding)
    step = step_lib.make_step(config, task, tx, rate, schedule, placement)
    blocks = Blocks.of(config, schedule, tx)
    if config.algorithm == "all_reduce":
        rnd = None
    elif rnd is None:
        most = [round_.models_sent_by_nodes(on.per_node(placement)) for round_ in schedule.rounds]
        rnd = int(np.argmax(most))
    else:
        rnd %= schedule.period
    t = jax.ShapeDtypeStruct((), np.int32, sharding=placement.replicated)
    of_step = (batch,) * blocks.delay if blocks.spans_steps(rnd) else batch
    lowered = step.lower(state, of_step, t, round=rnd)
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "tile sizes" not in str(error):
            raise
        # Without a GPU for autotuning, XLA finds no tile sizes for some matrix products; cuBLAS
        # needs none.
        program = lowered.compile({"xla_gpu_enable_triton_gemm": False})
    return Described(program, task, schedule, placement, state, rnd, blocks.spans_steps(rnd))


# --- What the user reads --------------------------------------------------------------------------


def check_on(config: Config, text: str) -> list[str]:
    """Describe, in about ten lines, a run of the config on the devices that ``--on`` names.

    Raises:
      ConfigError: the run is impossible or does not fit there; the message says what to change.
    """
    jax.config.update("jax_platforms", "cpu")  # jax must not look for the described devices
    if config.trainer != config_lib.SYNCHRONOUS or config.cluster.plan:
        raise _refused(text, f"is for trainer={config_lib.SYNCHRONOUS} without a cluster.plan")
    schedule, _ = config_lib.check(config)
    on = target(text)
    kernel = getattr(config.model, "attention", "")
    if kernel == "cudnn" and on.clock:
        wanted = f"must be auto or xla on {text}: cuDNN is for NVIDIA's GPUs"
        raise ConfigError.about("model.attention", kernel, wanted)
    if config.schedule == config_lib.AUTO:
        per_node = on.per_node(place(config, on))
        config = experiment.settle(config, per_node, os.devnull, not on.clock)
        schedule = config_lib.make_schedule(config)
    began = time.perf_counter()
    try:
        step = compiled(config, schedule, on)
    except DataError as error:
        raise ConfigError(str(error)) from None
    except RuntimeError as error:  # from XLA, or from jax if it finds no cuDNN
        raise _refusal(config, on, str(error)) from None
    seconds = time.perf_counter() - began
    memory = xla.memory_of(step.program)
    if memory and sum(memory) > on.memory:
        raise _too_large(config, on, format_bytes(sum(memory)), format_bytes(on.memory))
    return list(_lines(config, on, step, memory, seconds))


def _refusal(config: Config, on: Target, words: str) -> ConfigError:
    sizes = re.findall(r"\b\d[\d.]*[KMGT]\b", words)  # needed, and available
    if "RESOURCE_EXHAUSTED" in words and "hbm" in words.lower() and len(sizes) > 1:
        return _too_large(config, on, *(f"{size}iB" for size in sizes[:2]))
    if words.startswith("cuDNN"):
        either = "pip install 'jax[cuda12]', or set model.attention=xla"
        return _refused(on.name, f"needs cuDNN here for this config's attention: {either}")
    return _refused(on.name, f"cannot run this step; XLA says: {words.splitlines()[0]}")


def _too_large(config: Config, on: Target, used: str, there: str) -> ConfigError:
    remat = ", model.remat=True" if not getattr(config.model, "remat", True) else ""
    smaller = f"more micro_batches (now {config.micro_batches}){remat}"
    return _refused(
        on.name,
        f"has {there} of memory per device, and a step needs {used}: try {smaller} or "
        f"mesh.fsdp={2 * config.mesh.fsdp}",
    )


def _lines(
    config: Config, on: Target, step: Described, memory: xla.Memory | None, seconds: float
) -> Iterable[str]:
    placement, nodes = step.placement, on.nodes(step.placement)
    device, used = placement.mesh.devices.flat[0], placement.mesh.devices.size
    each = f"{placement.block} on each" if placement.fsdp == 1 else f"{placement.fsdp} for each"
    where = "slices" if on.clock else "hosts"
    yield (
        f"{on.name}: {config.num_replicas} replicas, {each}, on {used} of "
        f"{sum(map(len, on.by_process))} devices ({device.device_kind}), "
        f"{where}: {len(set(nodes))}"
    )
    per_node = on.per_node(placement)
    several = 1 < per_node < config.num_replicas
    cost = algorithm.cost(
        config, step.schedule, step.state, per_node if several else config.replicas_per_node
    )
    yield algorithm.describe(config, step.schedule, cost)
    between = algorithm.messages(cost, list(map(str, nodes)), per_node)
    crossing = between.get("bytes_between_hosts_per_step")
    if crossing is not None:
        yield f"between {where}: {format_bytes(crossing)} per step sent by the busiest"
    yield f"it fits: {memory}; a device has {format_bytes(on.memory)}"
    flops = step.task.flops_per_example * config.batch_size / config.num_replicas
    flops *= placement.block / placement.fsdp
    peak = peak_of(device.device_kind)
    least = f": at least {format_number(1e3 * flops / peak)} ms" if peak else ""
    yield f"the model: {format_number(flops / 1e9)} GFLOP per device per step{least}"
    yield from _messages(on, step)
    versions = f"jaxlib {jaxlib.version.__version__}"
    yield f"compiled in {format_number(seconds)} s by {versions}; scheduled, not run"


def _messages(on: Target, step: Described) -> Iterable[str]:
    kernels = hlo.entry(step.program.as_text())
    by_compiler = "by the compiler's estimate" if on.clock else "by their bytes and products"
    if step.spans_steps:
        yield f"round {step.rnd}, in this order: {hlo.outline(kernels)}"
        return
    gradient = sum(hlo.gradient_times(kernels, on.seconds))
    rest = sum(map(on.seconds, kernels)) - gradient
    yield (
        f"kernels: the gradient {format_number(1e3 * gradient)} ms, all others "
        f"{format_number(1e3 * rest)} ms, {by_compiler}"
    )
    if step.placement.mesh.shape["replica"] == 1:
        yield "messages: none, one device holds all replicas"
        return
    overlap = hlo.overlap(kernels, on.seconds)
    name = "all-reduce" if step.rnd is None else f"round {step.rnd} of {step.schedule.period}"
    hidden = len(overlap.counted) - len(
        [message for message in overlap.exposed if message in overlap.counted]
    )
    yield (
        f"messages ({name}): {hlo.kinds(overlap.counted)}; the first starts after "
        f"{100 * overlap.first:.0f}% of the gradient, the last after {100 * overlap.last:.0f}%; "
        f"at least {100 * overlap.least:.0f}% of it overlaps each"
    )
    exposed = "none"
    if overlap.exposed:
        size = format_bytes(sum(message.nbytes for message in overlap.exposed))
        exposed = f"{hlo.kinds(overlap.exposed)}, {size}"
    yield f"hidden: {hidden} of {len(overlap.counted)}; less than half hidden: {exposed}"
