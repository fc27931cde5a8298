"""Step time of every algorithm on one model, measured in turn in one run.

    python benchmarks/step_time.py [--algorithms none,all_reduce,...] [--config.x=y ...]
    python benchmarks/run_on_hosts.py benchmarks/step_time.py --batch_size 8

One process, or several (see run_on_hosts.py). The model is a GPT of 4.2M parameters in float32, 17
MB a message; any field of the config can be changed. ``none`` trains without communication. Rounds
of measurement go through all algorithms in turn, so that a noisy machine hits all alike; the number
is the median. Prints a table; ``--json`` also writes a line an algorithm, which
``decent_jax.planner predict --measured`` reads.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from decent_jax.data import loader
from decent_jax.train import ConfigError, default_config, flags
from decent_jax.train import config as config_lib

ALGORITHMS = "none,all_reduce,complete,ring,one_peer_exp,hypercube,alternating_exp_ring"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", default=ALGORITHMS, help=f"some of {ALGORITHMS}")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--local_size", type=int, default=2, help="of alternating_exp_ring")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences, over all replicas")
    parser.add_argument("--steps", type=int, default=6, help="steps a measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    parser.add_argument("--json", metavar="FILE", help="where the JSON lines go")
    parser.add_argument("--network", default="", help="words for the JSON lines, such as 200mbit")
    parsed, overrides = parser.parse_known_args(arguments)

    from decent_jax.train import cluster

    configs = {name: config_of(name, parsed, overrides) for name in parsed.algorithms.split(",")}
    first = next(iter(configs.values()))
    config_lib.validate(first)
    cluster.start(first)
    with tempfile.TemporaryDirectory() as folder:
        variants = measure(configs, folder, parsed)
    report(variants, parsed)


def config_of(algorithm: str, parsed, overrides: list[str]):
    config = default_config("language_modeling")
    config.data.path = "stdlib"
    config.model.update(layers=5, heads=4, width=256, context=128, bias=False, dtype="float32")
    config.num_replicas, config.batch_size = parsed.replicas, parsed.batch_size
    config.optimizer.clip_norm = 1.0
    for override in overrides:
        name, _, value = override.removeprefix("--config.").partition("=")
        flags.override(config, name, value)
    if algorithm == "all_reduce":
        config.algorithm = "all_reduce"
    elif algorithm != "none":
        config.schedule = algorithm
        config.local_size = parsed.local_size
    config_lib.validate(config)
    return config


def measure(configs, folder, parsed) -> dict[str, "Variant"]:
    import jax

    quiet = jax.process_index() > 0
    variants = {}
    bar = tqdm(total=len(configs) * (1 + parsed.repeats), disable=quiet, file=sys.stderr)
    with bar:
        for name, config in configs.items():
            bar.set_description(f"compiling {name}")
            variants[name] = Variant(name, config, folder)
            bar.update()
        for _ in range(parsed.repeats):
            for name, variant in variants.items():
                bar.set_description(f"measuring {name}")
                variant.run(parsed.steps)
                bar.update()
    return variants


class Variant:
    """The compiled steps of an algorithm, with their state."""

    def __init__(self, name, config, folder):
        import jax

        from decent_jax import replicas
        from decent_jax.train import cluster
        from decent_jax.train import step as step_lib

        devices = cluster.choose_devices(config.num_replicas, config.mesh.devices)
        placement = replicas.place(config.num_replicas, devices)
        task = config_lib.task_module(config.task).make(
            config, folder, lambda message: contextlib.nullcontext()
        )
        self.schedule = config_lib.make_schedule(config)
        rate = step_lib.learning_rate(config, 1000, 10)
        tx = step_lib.optimizer(config, self.schedule, rate, task.decay_mask, placement.axis_name)
        self.state = step_lib.init_state(config, task, tx, placement)
        with loader.train_batches(
            task.train_source,
            seed=0,
            num_replicas=config.num_replicas,
            batch_size=config.batch_size,
            replicas=placement.local_replicas,
        ) as batches:
            self.batch = placement.put(next(batches))
        self.local_size = config.local_size
        self.communicates = name not in ("none", "all_reduce")
        rounds = range(self.schedule.period) if self.communicates else [None]
        step = step_lib.make_step(config, task, tx, rate, self.schedule, placement)
        self.steps = [
            step.lower(self.state, self.batch, np.int32(0), round=r).compile() for r in rounds
        ]
        leaves = jax.tree.leaves(self.state.params)
        self.model_bytes = sum(x.nbytes for x in leaves) // config.num_replicas
        self.seconds: list[float] = []
        self.run(len(self.steps) + 1)
        self.seconds.clear()

    def run(self, steps: int) -> None:
        import jax
        from jax.experimental import multihost_utils

        jax.block_until_ready(self.state)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("measure")
        began = time.perf_counter()
        for t in range(steps):
            step = self.steps[t % len(self.steps)]
            self.state, metrics = step(self.state, self.batch, np.int32(t))
        jax.block_until_ready((self.state, metrics))
        self.seconds.append((time.perf_counter() - began) / steps)

    def bytes_sent(self, name: str, n: int) -> float:
        """By the busiest replica, a step."""
        if name == "all_reduce":
            return 2 * (n - 1) / n * self.model_bytes
        return self.schedule.bytes_sent(self.model_bytes) if self.communicates else 0.0


def report(variants: dict[str, Variant], parsed) -> None:
    import jax

    if jax.process_index():
        return
    alone = statistics.median(variants["none"].seconds) if "none" in variants else None
    print(f"{'algorithm':<22}{'ms a step':>10}{'of none':>9}{'MB sent':>9}", file=sys.stderr)
    rows = []
    for name, variant in variants.items():
        median = statistics.median(variant.seconds)
        row = {
            "algorithm": name,
            "num_replicas": parsed.replicas,
            "processes": jax.process_count(),
            "network": parsed.network,
            "step_time_s": median,
            "step_times_s": variant.seconds,
            "model_bytes": variant.model_bytes,
            "bytes_sent": variant.bytes_sent(name, parsed.replicas),
        }
        if variant.communicates:
            row |= {"local_size": variant.local_size, "execution": "plain"}
        if alone:
            row["of_none"] = median / alone
        ratio = f"{row['of_none']:.2f}" if alone else ""
        print(
            f"{name:<22}{1e3 * median:>10.0f}{ratio:>9}{row['bytes_sent'] / 1e6:>9.1f}",
            file=sys.stderr,
        )
        rows.append(row)
    if parsed.json:
        Path(parsed.json).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"step_time.py: {error}", file=sys.stderr)
        sys.exit(2)
