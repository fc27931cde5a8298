"""Train every combination of some settings: seeds, schedules, learning rates.

    decent-jax sweep --config quickstart --out runs/sweep \\
        --over seed=0,1,2 --over schedule=ring,one_peer_exp --config.steps=1000

The runs are trained one after the other, each in a folder of --out that is named after its values,
with what it prints in its log.txt. Repeat the command to continue: runs that have ended with these
settings are left alone, and others resume. --out/table.csv has a row per run; `decent-jax plot
--mean` draws means over seeds.
"""

import argparse
import contextlib
import csv
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict
from tqdm import tqdm

from decent_jax.cluster.supervise import GREETING, VARIABLE
from decent_jax.ground.command_line import Parser, check_replaceable, command
from decent_jax.ground.errors import ConfigError, Interrupted
from decent_jax.ground.format import split_outside_brackets, table
from decent_jax.ground.json_files import flat, plain, read_json
from decent_jax.ground.run_folder import entries
from decent_jax.train import config as config_lib
from decent_jax.train import flags
from decent_jax.train.workdir import Signals

_LOOK_S = 0.1  # seconds between two looks for a signal
# Columns of the table besides those of the settings: name, key in summary.json.
RESULTS = (
    ("steps", "steps"),
    ("validation_loss", "final.eval/loss"),
    ("best_validation_loss", "best_eval_loss"),
    ("training_seconds", "training_seconds"),
    ("bytes_sent_per_step", "bytes_sent_per_step"),
)
Train = Callable[[list[str], Path, Signals], int]  # arguments of train, log: its exit code


class Combination(NamedTuple):
    """The values of one run by field, its folder and its config."""

    values: dict[str, str]
    folder: Path
    config: ConfigDict


def train_in_a_process(arguments: list[str], log: Path, signals: Signals) -> int:
    """``decent-jax train`` in a process of its own, which gets the signals of this one."""
    with (
        log.open("a") as words,
        subprocess.Popen(
            [sys.executable, "-m", "decent_jax.commands.main", "train", *arguments],
            stdin=subprocess.PIPE,  # which ends with this process, and the other one then stops
            stdout=words,
            stderr=words,
            bufsize=0,
            env=os.environ | {VARIABLE: "1"},
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            process.stdin.write(GREETING)
        passed = False
        while (code := process.poll()) is None:
            if signals.received is not None and not passed:
                passed = True
                os.killpg(process.pid, signal.SIGTERM)
            time.sleep(_LOOK_S)
    return code


@command("sweep")
def main(arguments: list[str] | None = None, train: Train = train_in_a_process) -> int:
    """0: all runs have ended; 1: some failed; 2: refused; 128 + signal: interrupted."""
    prog = "decent-jax sweep"
    options, common = _parse(prog, arguments)
    runs = combinations(options.config, options.over, Path(options.out), common)
    try:
        failed = _train_all(options.config, common, runs, train)
    except Interrupted as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.code
    print(write_table(runs, Path(options.out) / "table.csv"))
    for run in failed:
        print(f"{prog}: a run failed; see {run.folder / 'log.txt'}", file=sys.stderr)
    return 1 if failed else 0


def _parse(prog: str, arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE[:ARGUMENTS]", help="as for train")
    parser.add_argument(
        "--over",
        action="append",
        required=True,
        metavar="NAME=VALUE,VALUE",
        help="a field of the config and its values; several times for every combination",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the runs")
    return parser.parse_known_args(arguments)


def combinations(
    config: str, over: Sequence[str], out: Path, common: Sequence[str] = ()
) -> list[Combination]:
    """Every combination of ``NAME=VALUE,VALUE`` texts, the last setting fastest.

    Args:
      config: file, as for train.
      over: the texts.
      out: the folder of all runs.
      common: flags of all runs, as for train.

    Raises:
      ConfigError: a text cannot be read, one of the runs would be refused, or its folder belongs to
        another one; nothing has been trained.
    """
    choices: dict[str, list[str]] = {}
    for text in over:
        name, equals, listed = text.removeprefix("config.").partition("=")
        found = split_outside_brackets(listed)
        if not equals or not all(found):
            raise ConfigError.about("--over", text, "takes NAME=VALUE,VALUE,...")
        if name in choices or len(set(found)) < len(found):
            raise ConfigError.about("--over", text, f"must name {name} and each of its values once")
        choices[name] = found
    runs = []
    for combination in itertools.product(*choices.values()):
        values = dict(zip(choices, combination, strict=True))
        folder = out / _name(values)
        try:
            loaded = flags.override_all(flags.load(config), [*common, *_overrides(values)])
            config_lib.validate(loaded)
        except ConfigError as error:
            raise ConfigError(
                f"{folder.name}: {error}", field=error.field, value=error.value
            ) from None
        runs.append(Combination(values, folder, loaded))
    if len({run.folder for run in runs}) < len(runs):
        raise ConfigError.about("--over", over, "must name each folder once")
    check_replaceable(out / "table.csv", "--out")
    for run in runs:
        saved, wanted = _configs(run)
        if saved and (refused := config_lib.refused_changes(saved, wanted)):
            why = f"has a run with another config in {run.folder} ({'; '.join(refused)})"
            raise ConfigError.about("--out", str(out), f"{why}; take another")
    return runs


def _name(values: dict[str, str]) -> str:
    """The name of a folder: values as in the command, without the signs of shells and paths."""
    words = (f"{name.rpartition('.')[2]}={value}" for name, value in values.items())
    return re.sub(r"[^\w.=,+-]+", "-", ",".join(words)).strip("-")[:200]


def _overrides(values: dict[str, str]) -> list[str]:
    return [f"--config.{name}={value}" for name, value in values.items()]


def _configs(run: Combination) -> tuple[dict, dict]:
    """The config that was trained in its folder, and its own, both flat; {}: none was."""
    wanted = json.loads(json.dumps(plain(flat(run.config))))
    try:
        saved = flat(read_json(run.folder / "config.json"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}, wanted  # where it is damaged, train says so
    settled = ["schedule", "local_size"] if run.config.schedule == config_lib.AUTO else []
    settled += ["schedule", "local_size", "mix_every"] if run.config.cluster.plan else []
    return saved | {name: wanted[name] for name in settled}, wanted


def _summary(run: Combination) -> dict:
    """What ``summary.json`` holds, flat; empty where no run of this config has ended."""
    saved, wanted = _configs(run)
    summary = entries(run.folder / "summary.json")
    return {} if summary.get("interrupted") or saved != wanted else summary


def _train_all(
    config: str, common: Sequence[str], runs: Sequence[Combination], train: Train
) -> list[Combination]:
    """Train the runs that have not ended, one after the other; returns those that failed.

    Raises:
      Interrupted: a signal came; the run under way has saved a checkpoint.
    """
    for run in runs:
        run.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    with Signals() as signals, tqdm(runs, unit="run", dynamic_ncols=True, smoothing=0) as bar:
        for run in bar:
            bar.set_postfix_str(run.folder.name)
            if _summary(run):
                continue
            arguments = ["--config", config, *common, *_overrides(run.values)]
            arguments += ["--workdir", str(run.folder)]
            code = train(arguments, run.folder / "log.txt", signals)
            if signals.received is not None:
                raise Interrupted("interrupted; the same command continues", signals.received)
            failed += [run] if code else []
    return failed


def write_table(runs: Sequence[Combination], path: Path) -> str:
    """Write a row per run as CSV; returns the table as text."""
    heads = [*runs[0].values, "state", *(name for name, _ in RESULTS)]
    rows = []
    for run in runs:
        summary = _summary(run)
        results = [summary.get(key, "") for _, key in RESULTS]
        rows.append([*run.values.values(), "done" if summary else "not done", *results])
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*heads, "folder"])
        writer.writerows([*row, str(run.folder)] for row, run in zip(rows, runs, strict=True))
    return f"{table(heads, rows)}\n{path}"
