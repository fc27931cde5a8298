"""A narrow ResNet-18 on real photographs, 8 replicas, four arms over several seeds.

    python benchmarks/photographs.py --images CLOTHING_IMAGES --workdir runs/photographs
    python benchmarks/photographs.py --images CLOTHING_IMAGES --workdir runs/search --seeds 100 \\
        --rates 0.3 1 3 --config.model.width=16 --config.epochs=10

Every run is ``configs/clothing_images.py`` with one arm and one seed, the same budget for all; what
is given as --config.NAME=VALUE is changed in all of them. Runs that are done in the working
directory are not done again, so more seeds can be added later. With several --rates, the learning
rate is multiplied by each.

Prints the table of docs/images.md: mean over the seeds and standard deviation between them, of the
consensus model at the last step; the time is that of training without compiling and evaluating.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import jax

from decent_jax import train
from decent_jax.train import flags

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "clothing_images.py"
ARMS = ("all_reduce", "accum_adam", "accum_adam_ring", "momentum_sgd")
COLUMNS = ("top-1 %", "top-5 %", "loss", "consensus distance", "seconds", "ms a step", "waiting %")


def main(argv: list[str] | None = None) -> int:
    """0 once the table is printed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", required=True, help="folder with train/ and val/")
    parser.add_argument("--workdir", required=True, type=Path, help="of all runs")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--rates", nargs="+", type=float, default=(1.0,), metavar="FACTOR")
    parsed, changes = parser.parse_known_args(argv)
    jax.config.update("jax_compilation_cache_dir", str(parsed.workdir / "compiled"))
    changes.append(f"--config.data.path={parsed.images}")
    rows: dict[tuple[str, float], list[dict]] = {}
    for seed in parsed.seeds:  # a noisy hour hits all arms alike
        for arm in parsed.arms:
            for rate in parsed.rates:
                result = run(parsed.workdir, arm, seed, rate, changes)
                rows.setdefault((arm, rate), []).append(result)
                print(json.dumps({"arm": arm, "rate": rate, "seed": seed} | result), flush=True)
    print(table(rows, len(parsed.rates) > 1))
    return 0


def run(workdir: Path, arm: str, seed: int, rate: float, changes: list[str]) -> dict[str, float]:
    """One run's numbers, from its folder where it has been done."""
    folder = workdir / f"{arm}-{rate:g}-{seed}"
    if not (folder / "summary.json").exists():
        arguments = [f"--config={CONFIG}:{arm}", f"--workdir={folder}", f"--config.seed={seed}"]
        config, _ = flags.parse(arguments + changes)
        config.learning_rate *= rate
        train.run(config, folder)
    summary = json.loads((folder / "summary.json").read_text())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [row for row in metrics if "perf/step_time_s" in row][1:]  # the first warms up
    final = summary["final"]
    step = statistics.median(row["perf/step_time_s"] for row in timed)
    return {
        "top-1 %": 100 * final["eval/top1"],
        "top-5 %": 100 * final["eval/top5"],
        "loss": final["eval/loss"],
        "consensus distance": final["eval/consensus_distance"],
        "seconds": summary["training_seconds"],
        "ms a step": 1000 * step,
        "waiting %": 100 * statistics.mean(row["perf/data_wait_s"] for row in timed) / step,
    }


def table(rows: dict[tuple[str, float], list[dict]], rates: bool) -> str:
    """Markdown: mean and standard deviation over seeds of every column."""
    lines = [f"| arm |{' factor |' * rates} {' | '.join(COLUMNS)} |"]
    lines.append("|---" * (1 + rates + len(COLUMNS)) + "|")
    for (arm, rate), results in rows.items():
        cells = [arm] + [f"{rate:g}"] * rates
        for column in COLUMNS:
            values = [result[column] for result in results]
            spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.4g}{spread}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
