"""The cost of mixing and of replication on one device, measured side by side in one run.

    python benchmarks/replicas_on_one_device.py [--config FILE] [--config.x=y ...] [--repeats 15]

Variants of the same model and the same examples per step, in turn so that a noisy machine hits all
alike: the step with mixing, the same step without it, all-reduce, and one replica with its
share of the batch. Prints a table of medians, and one JSON line per variant to standard output.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

import commands
import jax
from variant import Variant, override

from decent_jax.train import ConfigError, flags
from decent_jax.train import config as config_lib

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.py"


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__, allow_abbrev=False)
    parser.add_argument("--config", default=str(QUICKSTART))
    parser.add_argument("--repeats", type=int, default=15)
    parsed, overrides = parser.parse_known_args(arguments)
    if parsed.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {parsed.repeats}")

    def config(**changes):
        result = flags.load(parsed.config)
        override(result, overrides)
        for name, value in changes.items():
            flags.override(result, name, str(value))
        config_lib.validate(result)
        return result

    whole = config()
    share = whole.batch_size // whole.num_replicas
    cases = {
        "with mixing": (whole, 0),
        "without mixing": (whole, None),
        "all-reduce": (config(algorithm="all_reduce"), None),
        "one replica": (config(num_replicas=1, batch_size=share, local_size=1), None),
    }
    with tempfile.TemporaryDirectory() as folder:
        variants = {
            name: Variant(case, folder, [r], jax.devices()[:1]) for name, (case, r) in cases.items()
        }
        for _ in range(parsed.repeats):
            for variant in variants.values():
                variant.run(2)
    report(variants, whole.num_replicas)


def report(variants: dict[str, Variant], n: int) -> None:
    base = variants["without mixing"].seconds
    print(
        f"{'variant':<16} {'ms per step':>11} {'of no mixing':>13} {'of n x one':>11}",
        file=sys.stderr,
    )
    for name, variant in variants.items():
        pairs = zip(variant.seconds, base, strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        single = zip(variant.seconds, variants["one replica"].seconds, strict=True)
        of_single = statistics.median(a / (n * b) for a, b in single)
        median = statistics.median(variant.seconds)
        print(
            f"{name:<16} {1e3 * median:>11.1f} {ratio:>13.3f} {of_single:>11.3f}", file=sys.stderr
        )
        row = {"variant": name, "step_time_s": median, "of_no_mixing": ratio}
        print(json.dumps(row | {"of_n_single": of_single}))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"replicas_on_one_device.py: {error}", file=sys.stderr)
        sys.exit(2)
