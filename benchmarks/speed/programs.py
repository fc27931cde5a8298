"""The program that XLA makes of a step for GPUs and TPUs: overlap, memory, the update. Needs none.

    pip install -e ".[cuda12,tpu]"
    python benchmarks/speed/programs.py [--on h100:4x1 v5e:2x2,slices=2 ...]
        [--algorithms one_peer_exp,...] [--options ours] [--json FILE] [--config.x=y]

Compiles a step of GPT-2 124M (any field of the config can be changed) for devices that are only
described, one replica on each (or on several: --config.mesh.fsdp), and reads the program. Nothing
runs: the columns say what is scheduled.

options     with those of decent_jax.train.xla, or XLA's own alone.
messages    collectives of the step, and what crosses TPU slices: send, recv.
first, last the part of the gradient's time that is over when the first of these messages starts,
            and when the last does.
hides       the part that runs between start and end of the message that has least.
x0.5, x1    a step over the larger of gradient and messages, where the messages take half as long
            as the gradient on a bare link, or as long. Computed: see `step_over_limit`. Where a
            round has permutes, only they are on the link: the rest stays inside nodes.
GB          peak memory per device.
of P        the same over the bytes of the parameters there; in brackets the least possible:
            parameters, optimizer's state, gradients, and one more for received messages. The rest
            are activations: see --batch_size 1 --config.model.context=64.
update      of GPUs: bytes that its kernels read and write, over the bytes of one pass over
            parameters, received messages, gradients and the optimizer's state.

The time of a kernel is what XLA estimates on TPUs, and that of its bytes or of its matrix products
on GPUs. What LIBTPU_INIT_ARGS and XLA_FLAGS set holds for all rows.

Of a method with a delay it compiles a message and the steps beside which it travels, and prints the
order of messages and loops of steps instead, and the memory:

    python benchmarks/speed/programs.py --algorithms complete --config.algorithm=diloco
        --config.mix_every=8 --config.outer.delay=7
"""

import os
import re
import sys
from pathlib import Path
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin for GPUs compiles only; it would miss its GPUs

import jax
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from benchmarks.speed.step_time import override
from decent_jax.ground.command_line import output_file
from decent_jax.ground.format import split_outside_brackets
from decent_jax.train import ConfigError, default_config, described, hlo, xla
from decent_jax.train import config as config_lib
from decent_jax.train.hlo import Instruction, Window

ALGORITHMS = "all_reduce,one_peer_exp,hypercube,alternating_exp_ring,complete"
OPTIONS = {"both": (False, True), "ours": (True,), "xla": (False,)}


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__, allow_abbrev=False)
    parser.add_argument("--on", nargs="+", default=["h100:4x1"], metavar="DEVICES")
    parser.add_argument("--algorithms", default=ALGORITHMS, help=f"some of {ALGORITHMS}, ...")
    parser.add_argument("--options", choices=OPTIONS, default="both", help="XLA's own, ours")
    parser.add_argument(
        "--round", type=int, help="of the schedule, modulo its period; else where most is sent"
    )
    parser.add_argument("--batch_size", type=int, default=12, help="sequences per replica")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="for the JSON lines")
    parser.add_argument("--hlo", type=Path, metavar="FOLDER", help="for the programs' text")
    parsed, overrides = parser.parse_known_args(arguments)
    rows, several_steps = [], []
    cases = [
        (on, name, own)
        for on in map(described.target, parsed.on)
        for name in split_outside_brackets(parsed.algorithms)
        for own in OPTIONS[parsed.options]
    ]
    for on, name, own in tqdm(cases, desc="compiling", file=sys.stderr):
        config = config_of(name, on, parsed.batch_size, overrides)
        row = {"on": on.name, "algorithm": name, "options": "ours" if own else "XLA's"}
        step = compiled(config, on, parsed.round, own)
        text = step.program.as_text()
        sizes, kernels = sizes_of(step), hlo.entry(text)
        if step.spans_steps:
            several_steps.append(row | sizes | {"outline": hlo.outline(kernels)})
        else:
            rows.append(row | sizes | facts_of(kernels, sizes, on))
        if parsed.hlo:
            parsed.hlo.mkdir(parents=True, exist_ok=True)
            file = f"{on.name.replace(':', '-')}-{name}-{'ours' if own else 'xla'}.txt"
            (parsed.hlo / file).write_text(text)
    if rows:
        print(table(rows))
    for row in several_steps:
        memory = f"{row['memory'] / 1e9:.2f} GB"
        words = f"{row['on']}, {row['algorithm']}, options {row['options']}"
        print(f"{words}, {memory}: {row['outline']}")
    if parsed.json:
        commands.write_rows(parsed.json, rows + several_steps)


def config_of(name: str, on: described.Target, batch_size: int, overrides: list[str]):
    config = default_config("language_modeling")
    config.data.path = "stdlib"
    config.model.update(preset="small", vocab_size=50304, bias=False, context=1024)
    config.model.dtype = "bfloat16"
    config.optimizer.clip_norm = 1.0
    config.replicas_per_node = 2
    if name == "all_reduce":
        config.algorithm = name
    else:
        config.schedule = name
    override(config, overrides)
    config.num_replicas = sum(map(len, on.by_process)) // config.mesh.fsdp
    config.batch_size = config.num_replicas * batch_size
    config_lib.validate(config)
    return config_lib.parse(config)


def compiled(config, on: described.Target, rnd: int | None, own: bool) -> described.Described:
    """The step of a round, with our options or with XLA's own alone."""
    kept = {name: getattr(xla, name) if own else {} for name in ("FOR_GPUS", "FOR_TPUS")}
    with mock.patch.multiple(xla, **kept):
        return described.compiled(config, config_lib.make_schedule(config), on, rnd)


def sizes_of(step: described.Described) -> dict[str, int]:
    """Bytes on a device."""
    memory = xla.memory_of(step.program)
    trees = {"parameters": step.state.params, "optimizer": step.state.opt_state}
    devices = step.placement.mesh.devices.size
    return {
        **{
            name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) // devices
            for name, tree in trees.items()
        },
        "memory": sum(memory),
        "temporary": memory.temporary,
    }


# --- What the columns show -----------------------------------------------------------------------


def facts_of(kernels: list[Instruction], sizes: dict, on: described.Target) -> dict:
    """What the columns show."""
    found, times = hlo.overlap(kernels, on.seconds), hlo.gradient_times(kernels, on.seconds)
    # jax 0.10 calls the scope /update/, jax 0.12 /vmap(update)/.
    fusions = [one for one in kernels if one.opcode == "fusion"]
    update = [one for one in fusions if re.search(r"\bupdate\b", one.scope)]
    return {
        "messages": hlo.kinds(hlo.windows(kernels)),
        "sent": sum(window.nbytes for window in found.counted),
        "first": found.first,
        "last": found.last,
        "hides": found.least,
        "half": step_over_limit(times, found.counted, 0.5),
        "equal": step_over_limit(times, found.counted, 1.0),
        "of_parameters": sizes["memory"] / sizes["parameters"],
        "least": 3 + sizes["optimizer"] / sizes["parameters"],
        "update_passes": None
        if on.clock
        else sum(one.read + one.written for one in update) / least_update(sizes),
    }


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
    heads = ("on", "algorithm", "options", "messages", "first", "last", "hides", "x0.5", "x1", "GB")
    lines = [f"| {' | '.join(heads)} | of P | update |", "|---" * 12 + "|"]
    for row in rows:
        cells = [row[name] for name in ("on", "algorithm", "options", "messages")]
        cells += [f"{100 * row[name]:.0f}%" for name in ("first", "last", "hides")]
        cells += [f"{row[name]:.2f}" for name in ("half", "equal")]
        cells += [f"{row['memory'] / 1e9:.2f}", f"{row['of_parameters']:.2f} ({row['least']:.2f})"]
        cells += ["" if row["update_passes"] is None else f"{row['update_passes']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"programs.py: {error}", file=sys.stderr)
        sys.exit(2)
