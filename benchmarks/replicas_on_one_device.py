"""What mixing and replication cost on one device, measured side by side in one run.

    python benchmarks/replicas_on_one_device.py [--config FILE] [--config.x=y ...] [--repeats 15]

Variants of the same model and the same examples a step, taken in turn so that a noisy machine hits
all alike: the step with mixing, the same step without it, all-reduce, and one replica with its
share of the batch. Prints a table of medians, and one JSON line a variant to standard output.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from decent_jax import replicas
from decent_jax.train import config as config_lib
from decent_jax.train import flags
from decent_jax.train import step as step_lib

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.py"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(QUICKSTART))
    parser.add_argument("--repeats", type=int, default=15)
    parsed, overrides = parser.parse_known_args(arguments)

    def config(**changes):
        result = flags.load(parsed.config)
        for argument in overrides:
            name, _, value = argument.removeprefix("--config.").partition("=")
            flags.override(result, name, value)
        for name, value in changes.items():
            flags.override(result, name, str(value))
        return result

    whole = config()
    share = whole.batch_size // whole.num_replicas
    with tempfile.TemporaryDirectory() as folder:
        variants = {
            "with mixing": Variant(whole, folder, 0),
            "without mixing": Variant(whole, folder, None),
            "all-reduce": Variant(config(algorithm="all_reduce"), folder, None),
            "one replica": Variant(
                config(num_replicas=1, batch_size=share, local_size=1), folder, None
            ),
        }
        for _ in range(parsed.repeats):
            for variant in variants.values():
                variant.run()
    report(variants, whole.num_replicas)


class Variant:
    """A compiled step with its state; `run` times two steps."""

    def __init__(self, config, folder, round):
        config_lib.validate(config)
        module = config_lib.task_module(config.task)
        task = module.make(config, folder, lambda message: contextlib.nullcontext())
        placement = replicas.place(config.num_replicas, jax.devices()[:1])
        schedule = config_lib.make_schedule(config)
        rate = step_lib.learning_rate(config, 1000, 10)
        tx = step_lib.optimizer(config, schedule, rate, task.decay_mask, placement.axis_name)
        self.state = step_lib.init_state(config, task, tx, placement)
        shape = (config.num_replicas, config.batch_size // config.num_replicas)
        self.batch = jax.device_put(
            np.resize([task.train_source[i] for i in range(8)], (*shape, config.model.context + 1))
        )
        step = step_lib.make_step(config, task, tx, rate, schedule, placement)
        self.step = step.lower(self.state, self.batch, np.int32(0), round=round).compile()
        self.seconds: list[float] = []
        self.run()
        self.seconds.clear()

    def run(self):
        began = time.perf_counter()
        for t in range(2):
            self.state, metrics = self.step(self.state, self.batch, np.int32(t))
        jax.block_until_ready(metrics)
        self.seconds.append((time.perf_counter() - began) / 2)


def report(variants: dict[str, Variant], n: int) -> None:
    base = variants["without mixing"].seconds
    print(
        f"{'variant':<16} {'ms a step':>10} {'of no mixing':>13} {'of n x one':>11}",
        file=sys.stderr,
    )
    for name, variant in variants.items():
        pairs = zip(variant.seconds, base, strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        single = zip(variant.seconds, variants["one replica"].seconds, strict=True)
        of_single = statistics.median(a / (n * b) for a, b in single)
        median = statistics.median(variant.seconds)
        print(
            f"{name:<16} {1e3 * median:>10.1f} {ratio:>13.3f} {of_single:>11.3f}", file=sys.stderr
        )
        row = {"variant": name, "step_time_s": median, "of_no_mixing": ratio}
        print(json.dumps(row | {"of_n_single": of_single}))


if __name__ == "__main__":
    main(sys.argv[1:])
