"""Train every combination of some settings: seeds, schedules, learning rates.

    decent-jax sweep --config quickstart --out runs/sweep \\
        --over seed=0,1,2 --over schedule=ring,one_peer_exp --config.steps=1000

The runs are trained one after the other, each in a folder of --out that is named after its values,
with what it prints in its log.txt. Repeat the command to continue: runs that have ended are left
alone, and others resume. --out/table.csv has a row per run. --slurm FILE writes the runs as a SLURM
array instead; afterwards --table gathers their results.
"""

import argparse
import contextlib
import csv
import itertools
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decent_jax.ground import extras

extras.need("train", "ml_collections", "tqdm")

from tqdm import tqdm

from decent_jax.cluster import supervised
from decent_jax.ground.command_line import Parser
from decent_jax.ground.errors import ConfigError, Interrupted
from decent_jax.ground.fields import LARGEST
from decent_jax.ground.format import format_number, printable, split_outside_brackets
from decent_jax.ground.replaceable import check_replaceable
from decent_jax.ground.run_folder import entries, read_metrics
from decent_jax.train import config as config_lib
from decent_jax.train import flags
from decent_jax.train.workdir import Signals

MOST_RUNS = 10_000
_LOOK_S = 1.0  # seconds between two looks at a run's metrics
# Columns of the table besides those of the settings: name, key in summary.json.
RESULTS = (
    ("steps", "steps"),
    ("validation_loss", "final.eval/loss"),
    ("best_validation_loss", "best_eval_loss"),
    ("training_seconds", "training_seconds"),
    ("bytes_sent_per_step", "bytes_sent_per_step"),
)


@dataclass(frozen=True)
class SweptRun:
    """One combination: its values by field, and its folder."""

    values: dict[str, str]
    folder: Path

    def overrides(self, common: Sequence[str]) -> list[str]:
        """The flags that change the config."""
        return [*common, *(f"--config.{name}={value}" for name, value in self.values.items())]

    def arguments(self, config: str, common: Sequence[str]) -> list[str]:
        """The arguments of ``decent-jax train``."""
        return ["--config", config, *self.overrides(common), "--workdir", str(self.folder)]

    def summary(self) -> dict:
        """What ``summary.json`` holds, flat; empty before the end of the run."""
        summary = entries(self.folder / "summary.json")
        return {} if summary.get("interrupted") else summary

    def state(self) -> str:
        """``done``, ``step 20``, or ``not begun``."""
        if self.summary():
            return "done"
        with contextlib.suppress(OSError, ValueError, IndexError):
            return f"step {read_metrics(self.folder)[-1]['step']}"
        return "not begun"


def main(arguments: list[str] | None = None) -> int:
    """0: all runs have ended; 1: some failed; 2: refused; 128 + signal: interrupted."""
    prog = "decent-jax sweep"
    try:
        options, common = _parse(prog, arguments)
        runs = runs_of(options.over, Path(options.out))
        _check(options.config, common, runs)
        _check_files(options, runs)
        if options.slurm is not None:
            write_slurm_array(Path(options.slurm), options.config, common, runs)
            print(f"{options.slurm}: {len(runs)} runs; set what your cluster needs, then sbatch it")
            return 0
        failed = [] if options.table else train_all(options.config, common, runs)
        print(write_table(runs, Path(options.out) / "table.csv"))
    except (ConfigError, OSError) as error:
        print(f"{prog}: {ConfigError(error)}", file=sys.stderr)
        return 2
    except Interrupted as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 128 + error.signal
    for run in failed:
        print(f"{prog}: a run failed; see {run.folder / 'log.txt'}", file=sys.stderr)
    return 1 if failed else 0


def runs_of(over: Sequence[str], out: Path) -> list[SweptRun]:
    """Every combination of ``NAME=VALUE,VALUE`` texts, the last setting fastest.

    Raises:
      ConfigError: a text that cannot be read, a setting or a value that occurs twice, too many.

    >>> [str(run.folder) for run in runs_of(["seed=0,1", "schedule=ring"], Path("runs"))]
    ['runs/seed=0,schedule=ring', 'runs/seed=1,schedule=ring']
    """
    values: dict[str, list[str]] = {}
    for text in over:
        name, equals, listed = text.removeprefix("config.").partition("=")
        choices = split_outside_brackets(listed)
        if not equals or not all(choices):
            raise ConfigError(f"--over takes NAME=VALUE,VALUE,..., got {text!r}")
        if name in values or len(set(choices)) < len(choices):
            raise ConfigError(f"--over: {name} or one of its values occurs twice, got {text!r}")
        values[name] = choices
    count = math.prod(map(len, values.values()))
    if count > MOST_RUNS:
        raise ConfigError(f"--over asks for {count} runs; a sweep has at most {MOST_RUNS}")
    runs = []
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        runs.append(SweptRun(chosen, out / _name(chosen)))
    if len({run.folder for run in runs}) < len(runs):
        raise ConfigError("--over: two runs would have the same folder; give values other names")
    return runs


def _name(values: dict[str, str]) -> str:
    """The name of a folder: values as in the command, without the signs of shells and paths."""
    words = (f"{name.rpartition('.')[2]}={value}" for name, value in values.items())
    return re.sub(r"[^\w.=,+-]+", "-", ",".join(words)).strip("-")[:200]


def _parse(prog: str, arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        prog=prog,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE[:ARGUMENTS]", help="as for train")
    parser.add_argument(
        "--over",
        action="append",
        required=True,
        metavar="NAME=VALUE,VALUE",
        help="a field of the config and its values; several times for every combination",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the runs")
    parser.add_argument("--slurm", metavar="FILE", help="write a SLURM array, train nothing")
    parser.add_argument("--table", action="store_true", help="write the table, train nothing")
    return parser.parse_known_args(arguments)


def _check_files(options: argparse.Namespace, runs: Sequence[SweptRun]) -> None:
    """Raises ConfigError where what the command writes cannot be written, or would be lost."""
    out = Path(options.out)
    for folder in (out, *(run.folder for run in runs)):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out: {folder} is a file, and a folder of the sweep has its name")
        if (folder / "log.txt").is_dir():
            raise ConfigError(f"--out: {folder / 'log.txt'} is a folder; move it away")
    if options.slurm is None:
        check_replaceable(out / "table.csv", "--out")
        return
    check_replaceable(options.slurm, "--slurm")
    if not Path(options.slurm).absolute().parent.is_dir():
        raise ConfigError(f"--slurm {options.slurm}: there is no such folder")


def _check(config: str, common: Sequence[str], runs: Sequence[SweptRun]) -> None:
    """Raises ConfigError where one of the runs would be refused, before the first begins."""
    for run in runs:
        try:
            config_lib.validate(flags.override_all(flags.load(config), run.overrides(common)))
        except ConfigError as error:
            raise ConfigError(f"{run.folder.name}: {error}") from None


# --- On this machine ------------------------------------------------------------------------------


def train_all(config: str, common: Sequence[str], runs: Sequence[SweptRun]) -> list[SweptRun]:
    """Train the runs that have not ended, one after the other; returns those that failed.

    Raises:
      Interrupted: a signal came; the run under way has saved a checkpoint.
    """
    failed = []
    bar = tqdm(total=len(runs), unit="run", dynamic_ncols=True, smoothing=0)
    with Signals() as signals, bar:
        for run in runs:
            bar.set_postfix_str(run.folder.name)
            if not run.summary():
                code = _train(run, run.arguments(config, common), signals, bar)
                if signals.received is not None:
                    raise Interrupted("interrupted; the same command continues", signals.received)
                failed += [run] if code else []
            bar.update()
    return failed


def _train(run: SweptRun, arguments: Sequence[str], signals: Signals, bar: tqdm) -> int:
    """Train a run, passing signals on to it; returns its exit code."""
    run.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "decent_jax.commands.main", "train", *arguments]
    with (
        (run.folder / "log.txt").open("a") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # the run ends with this process, see `supervised`
            stdout=log,
            stderr=log,
            env=os.environ | {supervised.VARIABLE: "1"},
            start_new_session=True,  # Ctrl-C reaches it once, from here
        ) as process,
    ):
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended at once
            os.write(process.stdin.fileno(), supervised.GREETING)
        while True:
            try:
                return process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                _show(run, bar)
            if signals.received is not None:
                process.terminate()
                return process.wait()


def _show(run: SweptRun, bar: tqdm) -> None:
    """Show the newest row of a run behind the bar."""
    words = [run.folder.name]
    with contextlib.suppress(OSError, ValueError, IndexError):
        row = read_metrics(run.folder)[-1]
        words.append(f"step {row['step']}")
        if "train/loss" in row:
            words.append(f"loss {format_number(float(row['train/loss']), digits=4)}")
    bar.set_postfix_str(printable("  ".join(words)))


# --- Under SLURM ----------------------------------------------------------------------------------

_ARRAY = """\
#!/bin/bash
# {count} runs of `decent-jax sweep`, one per task; a run that is started again resumes.
#SBATCH --job-name=decent_jax_sweep
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
#SBATCH --output={out}/slurm-%A_%a.log
# SIGTERM two minutes before the time is up: the run saves a checkpoint and ends.
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

runs=(
{runs}
)
eval "set -- ${{runs[$SLURM_ARRAY_TASK_ID]}}"
exec srun {train} "$@"
"""


def write_slurm_array(
    path: Path, config: str, common: Sequence[str], runs: Sequence[SweptRun]
) -> None:
    """A script for ``sbatch``: task k of the array trains run k."""
    lines = [shlex.quote(shlex.join(run.arguments(config, common))) for run in runs]
    runs[0].folder.parent.mkdir(parents=True, exist_ok=True)  # SLURM does not make it for its logs
    path.write_text(
        _ARRAY.format(
            count=len(runs),
            last=len(runs) - 1,
            out=runs[0].folder.parent,
            runs="\n".join(f"    {line}" for line in lines),
            train=shlex.join([sys.executable, "-m", "decent_jax.commands.main", "train"]),
        )
    )


# --- The table ------------------------------------------------------------------------------------


def write_table(runs: Sequence[SweptRun], path: Path) -> str:
    """Write a row per run as CSV; returns the table as text, with means over seeds if they vary."""
    fields = list(runs[0].values)
    heads = [*fields, "state", *(name for name, _ in RESULTS)]
    rows = []
    for run in runs:
        summary = run.summary()
        results = [_entry(summary, key) for _, key in RESULTS]
        rows.append([*run.values.values(), run.state(), *results])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*heads, "folder"])
        writer.writerows([*row, str(run.folder)] for row, run in zip(rows, runs, strict=True))
    shown = [[_words(value) for value in row] for row in rows]
    text = _aligned([heads, *shown])
    if "seed" in fields and len(fields) > 1:
        text += "\n\n" + _aligned(_over_seeds(runs, fields))
    return f"{text}\n{path}"


def _over_seeds(runs: Sequence[SweptRun], fields: list[str]) -> list[list[str]]:
    """Mean and standard deviation of the validation loss over the seeds that are done."""
    others = [name for name in fields if name != "seed"]
    losses: dict[tuple, list[float]] = {}
    for run in runs:
        loss = _entry(run.summary(), "final.eval/loss")
        of = losses.setdefault(tuple(run.values[name] for name in others), [])
        if isinstance(loss, float | int):
            of.append(loss)
    rows = [[*others, "seeds", "validation_loss", "standard deviation"]]
    for values, found in losses.items():
        mean = f"{statistics.fmean(found):.4f}" if found else ""
        spread = f"{statistics.stdev(found):.4f}" if len(found) > 1 else ""
        rows.append([*values, str(len(found)), mean, spread])
    return rows


def _entry(summary: dict, key: str) -> float | int | str:
    value = summary.get(key, "")
    is_number = isinstance(value, float | int) and abs(value) <= LARGEST[float]
    return value if is_number else ""


def _words(value: float | int | str) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
