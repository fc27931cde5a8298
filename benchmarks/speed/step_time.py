"""Step time of every algorithm on one model, measured in turn in one run.

    python benchmarks/speed/step_time.py [--algorithms none,all_reduce,...] [--json FILE]
        [--config.x=y ...]
    python benchmarks/run_on_hosts.py benchmarks/speed/step_time.py --batch_size 8

One process, or several (see run_on_hosts.py). The model is a GPT of 4.03M parameters in float32,
16.1 MB per message, or that of ``--config FILE``; any field of the config can be changed. ``none``
trains without communication, ``alone`` one replica with its share of the batch.
Rounds of measurement go through all algorithms in turn, so that a noisy machine hits all alike; the
number is the median. Prints a table; ``--json`` also writes a line per algorithm.

With ``--mbit``, the rate of a host's link, the last column is the time over its limit: for gossip
max(compute, P / rate) with P the bytes that a replica sends; for all-reduce the larger of the two,
out of reach for any method that begins with the gradients. Compute is the step of ``none``.

After a colon an algorithm may have fields of its own, ``one_peer_exp:codec=int8`` or
``complete:algorithm=diloco;optimizer.name=adamw``.

Of a method whose messages travel beside several steps it measures blocks of ``mix_every`` steps, in
ms per step; let ``--steps`` be a multiple of it:

    python benchmarks/run_on_hosts.py benchmarks/speed/step_time.py --algorithms none,one_peer_exp
        --steps 16 --config.algorithm=noloco --config.mix_every=8 --config.outer.delay=7
"""

import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax import replicas, tasks
from decent_jax.cluster import start as cluster
from decent_jax.cluster import watch
from decent_jax.data import loader
from decent_jax.ground.command_line import output_file
from decent_jax.ground.errors import DataError
from decent_jax.ground.extras import Unavailable
from decent_jax.ground.format import split_outside_brackets
from decent_jax.replicas import Placement
from decent_jax.tasks import Task
from decent_jax.topology import NAMES, Schedule
from decent_jax.train import ConfigError, algorithm, default_config, flags
from decent_jax.train import config as config_lib
from decent_jax.train import step as step_lib
from decent_jax.train.delayed_step import Blocks

ALGORITHMS = "none,all_reduce,complete,ring,one_peer_exp,hypercube,alternating_exp_ring"


class Parts(NamedTuple):
    """What a config's step is made of, and a batch for it."""

    task: Task
    schedule: Schedule
    rate: optax.Schedule
    tx: optax.GradientTransformationExtraArgs
    batch: Any  # of NumPy arrays, stacked over ``held``

    @staticmethod
    def of(config, folder: str | Path, placement: Placement, held: Sequence[int]) -> "Parts":
        """``held``: the replicas whose examples the batch has."""
        task = tasks.find(config.task).make(
            config, Path(folder), lambda message: contextlib.nullcontext()
        )
        schedule = config_lib.make_schedule(config)
        rate = step_lib.learning_rate(config, 1000, 10, [])
        tx = algorithm.transformation(config, schedule, rate, task.decay_mask, placement.axis_name)
        with loader.train_batches(
            task.train_source,
            seed=0,
            num_replicas=config.num_replicas,
            batch_size=config.batch_size,
            replicas=held,
        ) as batches:
            return Parts(task, schedule, rate, tx, next(batches))

    def step(self, config, placement: Placement):
        """As `decent_jax.train.step.make_step` makes it."""
        return step_lib.make_step(config, self.task, self.tx, self.rate, self.schedule, placement)


class Variant:
    """The steps of a config, compiled for ``rounds`` of its schedule, with their state and a batch.

    A round that is None is a step without communication (or, in all-reduce, with its own).
    """

    def __init__(self, config, folder, rounds: Sequence[int | None], devices: list[jax.Device]):
        placement = replicas.place(config.num_replicas, devices)
        parts = Parts.of(config, folder, placement, placement.local_replicas)
        self.schedule = parts.schedule
        self.state = step_lib.init_state(config, parts.task, parts.tx, placement)
        self.cost = algorithm.cost(config, self.schedule, self.state, config.replicas_per_node)
        self.batch = placement.put(parts.batch)
        step, blocks = parts.step(config, placement), Blocks.of(config, self.schedule, parts.tx)
        self.steps, self.compile_s, self._given = [], [], []  # a program, its time, what it gets
        for r in rounds:
            count, batch = 1, self.batch
            if blocks.spans_steps(r):
                count, batch = blocks.delay, (self.batch,) * blocks.delay
            lowered = step.lower(self.state, batch, np.int32(0), round=r)
            began = time.perf_counter()
            self.steps.append(lowered.compile())
            self._given.append((count, batch))
            self.compile_s.append(time.perf_counter() - began)
        leaves = jax.tree.leaves(self.state.params)
        self.model_bytes = sum(x.nbytes for x in leaves) // config.num_replicas
        self.units = config.batch_size * parts.task.units_per_example  # a step, over all replicas
        self.seconds: list[float] = []
        # Others may still compile, and gloo waits 30 s only.
        watch.barrier(config.cluster.exchange_s)
        self.run(sum(count for count, _ in self._given) + 1)
        self.seconds.clear()

    def run(self, steps: int) -> None:
        """Time so many steps or a few more, with the rounds in turn; ``seconds`` gets the mean."""
        jax.block_until_ready(self.state)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("measure")
        began = time.perf_counter()
        made, metrics = 0, None
        programs = itertools.cycle(zip(self.steps, self._given, strict=True))
        while made < steps:
            program, (count, batch) = next(programs)
            self.state, metrics = program(self.state, batch, np.int32(made))
            made += count
        jax.block_until_ready((self.state, metrics))
        self.seconds.append((time.perf_counter() - began) / made)


def override(config, arguments: Sequence[str]) -> None:
    """Set fields as ``--config.NAME=VALUE`` says; anything else is a ConfigError."""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not name.startswith("--config.") or not equals:
            raise ConfigError(f"unknown argument {argument!r} (--help shows how)")
        flags.override(config, name.removeprefix("--config."), value)


# --- The table -----------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__, allow_abbrev=False)
    parser.add_argument("--algorithms", default=ALGORITHMS, help=f"some of {ALGORITHMS}, alone")
    parser.add_argument("--config", metavar="FILE", help="in place of the GPT")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--replicas_per_node", type=int, default=2, help="of alternating_exp_ring")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences, over all replicas")
    parser.add_argument("--steps", type=int, default=6, help="steps a measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    parser.add_argument("--mbit", type=float, default=0.0, help="rate of a link, Mbit/s")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="for the JSON lines")
    parser.add_argument("--network", default="", help="words for the JSON lines, such as 200mbit")
    parsed, overrides = parser.parse_known_args(arguments)
    if parsed.steps < 1 or parsed.repeats < 1:
        parser.error("--steps and --repeats must be at least 1")
    names = split_outside_brackets(parsed.algorithms)
    configs = {name: config_of(name, parsed, overrides) for name in names}
    cluster.start(next(iter(configs.values())))
    with tempfile.TemporaryDirectory() as folder:
        variants = measure(configs, folder, parsed)
    report(variants, max(config.num_replicas for config in configs.values()), parsed)


def config_of(label: str, parsed, overrides: list[str]):
    name, _, own = label.partition(":")
    config = flags.load(parsed.config) if parsed.config else gpt(parsed)
    override(config, [*overrides, *(f"--config.{field}" for field in own.split(";") if field)])
    if name == "all_reduce":
        config.algorithm = name
    elif name == "alone":
        config.batch_size //= config.num_replicas
        config.num_replicas = config.replicas_per_node = 1
    elif name != "none":
        if name.partition("(")[0] not in NAMES:
            words = ", ".join(("none", "alone", "all_reduce", *NAMES))
            raise ConfigError(f"--algorithms takes {words}; got {name!r}")
        config.schedule = name
        config.replicas_per_node = parsed.replicas_per_node
    config_lib.validate(config)
    return config_lib.parse(config)


def gpt(parsed):
    config = default_config("language_modeling")
    config.data.path = "stdlib"
    config.model.update(layers=5, heads=4, width=256, context=128, bias=False, dtype="float32")
    config.num_replicas, config.batch_size = parsed.replicas, parsed.batch_size
    config.optimizer.clip_norm = 1.0
    return config


def delay_of(config) -> int:
    """Steps beside which a message travels."""
    return config.outer.delay if config.algorithm in ("diloco", "noloco") else 0


def communicates(name: str) -> bool:
    """Whether replicas exchange parameters."""
    return name not in ("none", "alone", "all_reduce")


def measure(configs, folder, parsed) -> dict[str, Variant]:
    variants = {}
    total = len(configs) * (1 + parsed.repeats)
    with tqdm(total=total, disable=jax.process_index() > 0, file=sys.stderr) as bar:
        for name, config in configs.items():
            bar.set_description(f"compiling {name}")
            schedule, delay = config_lib.make_schedule(config), delay_of(config)
            rounds = [None]
            if communicates(name):
                cycle = Blocks(schedule, config.mix_every, delay).cycle()
                rounds = [r for r, _ in cycle] if delay else range(schedule.period)
            devices = cluster.choose_devices(config.num_replicas, config.mesh.devices)
            variants[name] = Variant(config, folder, rounds, devices)
            bar.update()
        for _ in range(parsed.repeats):
            for name, variant in variants.items():
                bar.set_description(f"measuring {name}")
                variant.run(parsed.steps)
                bar.update()
    return variants


COLUMNS = {  # key of a row, factor, digits
    "ms per step": ("step_time_s", 1e3, 0),
    "tokens/s": ("tokens_per_s", 1, 0),
    "exposed ms": ("exposed_s", 1e3, 0),
    "of none": ("of_none", 1, 2),
    "of n alone": ("of_n_alone", 1, 2),
    "MB sent": ("bytes_sent", 1e-6, 1),
    "of limit": ("of_limit", 1, 2),
}


def report(variants: dict[str, Variant], n: int, parsed) -> None:
    if jax.process_index():
        return
    medians = {name: statistics.median(variant.seconds) for name, variant in variants.items()}
    base, single = medians.get("none"), medians.get("alone")
    print(f"{'algorithm':<22}{''.join(f'{head:>12}' for head in COLUMNS)}", file=sys.stderr)
    rows = []
    for name, variant in variants.items():
        median = medians[name]
        row = {"algorithm": name, "num_replicas": n, "processes": jax.process_count()}
        row |= {"network": parsed.network, "step_time_s": median, "step_times_s": variant.seconds}
        row |= {"tokens_per_s": variant.units / median, "model_bytes": variant.model_bytes}
        row["bytes_sent"] = 0.0 if name in ("none", "alone") else variant.cost.sent_a_step
        if communicates(name):
            row["replicas_per_node"] = parsed.replicas_per_node
        if base:
            row |= {"exposed_s": median - base, "of_none": median / base}
            if parsed.mbit:
                sending = row["bytes_sent"] / (parsed.mbit * 1e6 / 8)
                row["of_limit"] = median / max(base, sending)
        if single:
            row["of_n_alone"] = median / single / n
        cells = [
            f"{factor * row[key]:.{digits}f}" if key in row else ""
            for key, factor, digits in COLUMNS.values()
        ]
        print(f"{name:<22}{''.join(f'{cell:>12}' for cell in cells)}", file=sys.stderr)
        rows.append(row)
    if parsed.json:
        commands.write_rows(parsed.json, rows)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, DataError, Unavailable) as error:
        print(f"step_time.py: {error}", file=sys.stderr)
        sys.exit(2)
