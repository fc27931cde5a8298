"""Runs of one config with several arms and seeds, and the table of their results."""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from decent_jax import train
from decent_jax.train import flags
from decent_jax.train.metrics import read_metrics


def compare(
    config: Path,
    arms: Sequence[str],
    parsed: argparse.Namespace,
    changes: Sequence[str],
    results: Callable[[dict, list[dict]], dict[str, float]],
) -> None:
    """Runs those that are missing in ``parsed.workdir``; prints JSON lines and a Markdown table.

    Args:
      config: a config file that takes an arm after the colon.
      arms: those to compare.
      parsed: ``workdir``, ``seeds`` and ``rates`` of `add_arguments`.
      changes: as on the command line, ``--config.NAME=VALUE``.
      results: from ``summary.json`` and the rows of ``metrics.jsonl`` to what the table shows.
    """
    jax.config.update("jax_compilation_cache_dir", str(parsed.workdir / "compiled"))
    rows: dict[tuple[str, float], list[dict]] = {}
    for seed in parsed.seeds:  # a noisy hour hits all arms alike
        for arm in arms:
            for rate in parsed.rates:
                folder = parsed.workdir / f"{arm}-{rate:g}-{seed}"
                if not (folder / "summary.json").exists():
                    arguments = [f"--config={config}:{arm}", f"--workdir={folder}"]
                    loaded, _ = flags.parse([*arguments, f"--config.seed={seed}", *changes])
                    loaded.learning_rate *= rate
                    train.run(loaded, folder)
                summary = json.loads((folder / "summary.json").read_text())
                result = results(summary, read_metrics(folder))
                rows.setdefault((arm, rate), []).append(result)
                print(json.dumps({"arm": arm, "rate": rate, "seed": seed} | result), flush=True)
    print(_table(rows, len(parsed.rates) > 1))


def add_arguments(parser: argparse.ArgumentParser, arms: Sequence[str], seeds: Sequence[int]):
    """The flags of every comparison."""
    parser.add_argument("--workdir", required=True, type=Path, help="of all runs")
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms)
    parser.add_argument("--seeds", nargs="+", type=int, default=seeds)
    parser.add_argument("--rates", nargs="+", type=float, default=(1.0,), metavar="FACTOR")


def times(metrics: list[dict]) -> dict[str, float]:
    """The median step, and the share of it spent waiting for data."""
    timed = [row for row in metrics if "perf/step_time_s" in row][1:]  # the first warms up
    step = statistics.median(row["perf/step_time_s"] for row in timed)
    waiting = statistics.mean(row["perf/data_wait_s"] for row in timed)
    return {"ms per step": 1000 * step, "waiting %": 100 * waiting / step}


def _table(rows: dict[tuple[str, float], list[dict]], rates: bool) -> str:
    """Markdown: mean and standard deviation over seeds of every column."""
    columns = list(next(iter(rows.values()))[0])
    lines = [f"| arm |{' factor |' * rates} {' | '.join(columns)} |"]
    lines.append("|---" * (1 + rates + len(columns)) + "|")
    for (arm, rate), results in rows.items():
        cells = [arm] + [f"{rate:g}"] * rates
        for column in columns:
            values = [result[column] for result in results]
            spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.4g}{spread}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
