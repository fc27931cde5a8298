"""The program that XLA makes of a step for GPUs: overlap, memory and the update. Needs no GPU.

    pip install -e ".[cuda12]"
    python benchmarks/speed/programs.py [--algorithms one_peer_exp,...] [--json FILE] [--config.x=y]

Compiles a step of GPT-2 124M (any field of the config can be changed) for H100s, one replica on
each (or on several: --config.mesh.fsdp), from a description of the device, and reads the program.
Nothing runs.

options     with those of decent_jax.train.xla, or XLA's own alone.
messages    collectives under way while kernels run.
first, last the part of the gradient's time that is over when the first of these messages starts,
            and when the last does.
x0.5, x1    a step over the larger of gradient and messages, where the messages take half as long
            as the gradient on a bare link, or as long. Computed: see `step_over_limit`. Where a
            round has permutes, only they are on the link: the rest stays inside nodes.
GB          peak memory per GPU.
of P        the same over the bytes of the parameters there; in brackets the least possible:
            parameters, optimizer's state, gradients, and one more for received messages. The rest
            are activations: see --batch_size 4 --config.model.context=64.
update      bytes that its kernels read and write, over the bytes of one pass over parameters,
            received messages, gradients and the optimizer's state.

Of a method with a delay it compiles a message and the steps beside which it travels, and prints the
order of messages and loops of steps instead, and the memory:

    python benchmarks/speed/programs.py --algorithms complete --config.algorithm=diloco
        --config.mix_every=8 --config.diloco.delay=7
"""

import collections
import itertools
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin for GPUs compiles only; it would miss its GPUs

import jax
import numpy as np
from jax.experimental import topologies
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from benchmarks.speed.step_time import Parts, override
from decent_jax import replicas
from decent_jax.ground.command_line import output_file
from decent_jax.ground.format import split_outside_brackets
from decent_jax.train import ConfigError, default_config, xla
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.delayed_step import Blocks
from decent_jax.train.xla import memory_of

ALGORITHMS = "all_reduce,one_peer_exp,hypercube,alternating_exp_ring,complete"
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)")
_NO_KERNELS = ("parameter", "bitcast", "get-tuple-element", "tuple", "constant")
_MATMULS = ("__triton_gemm", "__triton_nested_gemm", "__cublas", "__cudnn$fmha")
BANDWIDTH, FLOPS = 3.35e12, 600e12  # bytes and bfloat16 products a second of the H100 below
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


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__, allow_abbrev=False)
    parser.add_argument("--algorithms", default=ALGORITHMS, help=f"some of {ALGORITHMS}, ...")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--round", type=int, default=0, help="of the schedule, modulo its period")
    parser.add_argument("--batch_size", type=int, default=48, help="sequences, over all replicas")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="for the JSON lines")
    parser.add_argument("--hlo", type=Path, metavar="FOLDER", help="for the programs' text")
    parsed, overrides = parser.parse_known_args(arguments)
    configs = {
        name: config_of(name, parsed, overrides)
        for name in split_outside_brackets(parsed.algorithms)
    }
    rows, flights = [], []
    with tempfile.TemporaryDirectory() as folder:
        cases = [(name, own) for name in configs for own in (False, True)]
        for name, own in tqdm(cases, desc="compiling", file=sys.stderr):
            row = {"algorithm": name, "options": "ours" if own else "XLA's"}
            text, facts = compiled(configs[name], folder, parsed.round, own)
            if facts.pop("spans_steps"):
                flights.append(row | facts | {"outline": outline(entry(text))})
            else:
                rows.append(row | facts | facts_of(entry(text), facts))
            if parsed.hlo:
                parsed.hlo.mkdir(parents=True, exist_ok=True)
                (parsed.hlo / f"{name}-{'ours' if own else 'xla'}.txt").write_text(text)
    if rows:
        print(table(rows))
    for row in flights:
        memory = f"{row['memory'] / 1e9:.2f} GB"
        print(f"{row['algorithm']}, options {row['options']}, {memory}: {row['outline']}")
    if parsed.json:
        commands.write_rows(parsed.json, rows + flights)


def config_of(name: str, parsed, overrides: list[str]):
    config = default_config("language_modeling")
    config.data.path = "stdlib"
    config.model.update(preset="small", vocab_size=50304, bias=False, context=1024)
    config.model.update(dtype="bfloat16", attention="cudnn")
    config.num_replicas, config.batch_size = parsed.replicas, parsed.batch_size
    config.optimizer.clip_norm = 1.0
    config.replicas_per_node = 2
    if name == "all_reduce":
        config.algorithm = name
    else:
        config.schedule = name
    override(config, overrides)
    config_lib.validate(config)
    return config


def gpus(processes: int, each: int) -> list[jax.Device]:
    """Descriptions of H100s, the same number for each process."""
    try:
        description = topologies.get_topology_desc(
            "", "cuda", topology=f"1x{processes}x{each}", target_config=H100
        )
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f'XLA\'s compiler for GPUs is not here ({error}); pip install -e ".[cuda12]" brings it'
        ) from error
    return list(description.devices)


def compiled(config, folder: str, round: int, own_options: bool):
    """The text of the program of a round, and the numbers that are known without it."""
    n, k = config.num_replicas, config.mesh.fsdp
    placement = replicas.place(n, gpus(n, k), k)
    parts = Parts.of(config, folder, placement, range(config.num_replicas))

    def described(tree, sharding):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x.shape)), tree
        )

    batch = described(parts.batch, placement.sharding_of_batch)
    state = jax.eval_shape(lambda: step_lib.init_state(config, parts.task, parts.tx, placement))
    state = described(state, placement.sharding)
    kept = xla.FOR_GPUS if own_options else {}
    with mock.patch.object(xla, "FOR_GPUS", kept):
        step = parts.step(config, placement)
    round = None if config.algorithm == "all_reduce" else round % parts.schedule.period
    t = jax.ShapeDtypeStruct((), np.int32, sharding=placement.replicated)
    blocks = Blocks.of(config, parts.schedule, parts.tx)
    spans_steps = blocks.spans_steps(round)
    batch = (batch,) * blocks.delay if spans_steps else batch
    program = step.lower(state, batch, t, round=round).compile()
    sizes = {
        "parameters": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params)),
        "optimizer": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state)),
    }
    memory = memory_of(program)
    return program.as_text(), {
        **{name: size // (n * k) for name, size in sizes.items()},  # on a GPU
        "spans_steps": spans_steps,
        "memory": sum(memory),
        "temporary": memory.temporary,
    }


# --- Kernels and messages, in the order in which XLA has scheduled them ---------------------------


class Instruction(NamedTuple):
    """An instruction of the entry computation; those that run nothing are left out."""

    name: str
    opcode: str
    scope: str  # as jax.named_scope has it, with the function and the primitive
    operands: list[str]
    read: int  # bytes
    written: int  # bytes
    flops: float  # of matrix products, otherwise 0


def entry(text: str) -> list[Instruction]:
    """The instructions of ``compiled.as_text()``, in the order in which they are started."""
    shapes: dict[str, str] = {}
    found = []
    for line in text[text.index("\nENTRY ") :].splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        name, shape, opcode, rest = match.groups()
        shapes[name] = shape
        if opcode in _NO_KERNELS:
            continue
        operands = re.findall(r"%([^\s,()]+)", rest.split("), ")[0])
        scope = re.search(r'op_name="([^"]*)"', line)
        flops = 0.0
        if any(kind in line for kind in _MATMULS):
            arrays = [shapes.get(operand, "") for operand in operands[:2]] + [shape]
            flops = 2 * math.sqrt(math.prod(_largest(array) for array in arrays))
        read = sum(size_of(shapes.get(operand, "")) for operand in operands)
        found.append(
            Instruction(
                name, opcode, scope[1] if scope else "", operands, read, size_of(shape), flops
            )
        )
    return found


def size_of(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    return sum(_BYTES.get(kind, 4) * _elements(dims) for kind, dims in _ARRAY.findall(shape))


def _largest(shape: str) -> int:
    return max((_elements(dims) for _, dims in _ARRAY.findall(shape)), default=1)


def _elements(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)


def outline(instructions: list[Instruction]) -> str:
    """Messages and loops in the order in which they start and end, as ``2 all-gather-start, loop``.

    A message that is not split into a start and an end is written without either.
    """
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    found = [
        "loop" if one.opcode == "while" else one.opcode
        for one in instructions
        if one.opcode == "while" or one.opcode.startswith(kinds)
    ]
    runs = ((name, len(list(same))) for name, same in itertools.groupby(found))
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in runs)


class Window(NamedTuple):
    """A message that travels while kernels run."""

    kind: str  # such as "collective-permute"
    start: int  # index among the instructions
    done: int
    nbytes: int


def windows(instructions: list[Instruction]) -> list[Window]:
    """The collectives that are started and waited for separately."""
    started = {
        instruction.name: k
        for k, instruction in enumerate(instructions)
        if instruction.opcode.endswith("-start")
    }
    return [
        Window(
            instruction.opcode.removesuffix("-done"),
            started[instruction.operands[0]],
            k,
            instruction.written,
        )
        for k, instruction in enumerate(instructions)
        if instruction.opcode.endswith("-done")
    ]


# --- What the columns show -----------------------------------------------------------------------


def facts_of(instructions: list[Instruction], sizes: dict) -> dict:
    """What the columns show."""
    found = windows(instructions)
    on_links = [one for one in found if one.kind == "collective-permute"] or found
    times = [gradient_time(one) for one in instructions]
    total = sum(times)
    passed = np.cumsum([0.0, *times]) / total
    # jax 0.10 calls the scope /update/, jax 0.12 /vmap(update)/.
    fusions = [one for one in instructions if one.opcode == "fusion"]
    update = [one for one in fusions if re.search(r"\bupdate\b", one.scope)]
    return {
        "messages": collections.Counter(window.kind for window in found),
        "sent": sum(window.nbytes for window in on_links),
        "first": passed[min(window.start for window in on_links)],
        "last": passed[max(window.start for window in on_links)],
        "half": step_over_limit(times, on_links, 0.5),
        "equal": step_over_limit(times, on_links, 1.0),
        "of_parameters": sizes["memory"] / sizes["parameters"],
        "least": 3 + sizes["optimizer"] / sizes["parameters"],
        "update_passes": sum(one.read + one.written for one in update) / least_update(sizes),
    }


def gradient_time(one: Instruction) -> float:
    """Seconds of a kernel of the gradient by its bytes or its matrix products."""
    if "forward_backward" not in one.scope or one.opcode.endswith(("-start", "-done")):
        return 0.0
    return max((one.read + one.written) / BANDWIDTH, one.flops / FLOPS)


def step_over_limit(times: list[float], found: list[Window], ratio: float) -> float:
    """The gradient with its messages, ``ratio`` times as long as it, over the longer of the two.

    Kernels follow each other, and so do messages on the link.
    """
    compute, sent = sum(times), sum(window.nbytes for window in found)
    starts = {window.start: window for window in found}
    arrival: dict[int, float] = {}  # by where it is waited for
    now = link = 0.0
    for k, seconds in enumerate(times):
        if k in starts:
            link = max(link, now) + ratio * compute * starts[k].nbytes / sent
            arrival[starts[k].done] = link
        now = max(now, arrival.get(k, 0.0)) + seconds
    return now / (compute * max(1.0, ratio))


def least_update(sizes: dict) -> int:
    """Own and received parameters (or the mean gradient), gradients and state read; the new ones
    of parameters and state written."""
    return 4 * sizes["parameters"] + 2 * sizes["optimizer"]


def table(rows: list[dict]) -> str:
    """In Markdown."""
    heads = ("algorithm", "options", "messages", "first", "last", "x0.5", "x1", "GB", "of P")
    lines = [f"| {' | '.join(heads)} | update |", "|---" * 10 + "|"]
    for row in rows:
        messages = ", ".join(f"{count} {kind}" for kind, count in row["messages"].items())
        cells = [row["algorithm"], row["options"], messages]
        cells += [f"{100 * row[name]:.0f}%" for name in ("first", "last")]
        cells += [f"{row[name]:.2f}" for name in ("half", "equal")]
        cells += [f"{row['memory'] / 1e9:.2f}"]
        cells += [f"{row['of_parameters']:.2f} ({row['least']:.2f})", f"{row['update_passes']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"programs.py: {error}", file=sys.stderr)
        sys.exit(2)
