"""One process trains: killed at random moments, or watched for as long as it takes.

    python benchmarks/faults/one_run.py kill [--times 10] [--steps 60] [--config.x=y ...]
    python benchmarks/faults/one_run.py watch [--steps 20000] [--out long_run.jsonl]

kill    One uninterrupted run and, ``--times`` times, a run that is killed by SIGKILL after a random
        step and started again with the same command. Every array of the last checkpoints must be
        equal to the last bit, and metrics.jsonl must have every step once. A JSON line per kill;
        about 20 s each on 2 cores. Exit code 1: one differs.
watch   A run that logs every 20 steps, and evaluates and saves every 500. About every 200 steps a
        JSON line says what its process holds: file descriptors, threads, resident memory. At the
        end the medians of the sixth and the last tenth are compared (pools of threads fill up
        within the first third). Exit code 1: there are more of the first two, or 2% more memory.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax.ground.run_folder import read_metrics
from decent_jax.train import ConfigError, flags, validate

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"num_replicas": 4, "model.layers": 1, "eval.batches": 2}
KILLED = SMALL | {"model.width": 32, "model.context": 32, "model.dropout": 0.1, "batch_size": 8}
KILLED |= {"optimizer.accum_steps": 3, "checkpoint.every": 7, "log.every": 5, "eval.every": 0}
WATCHED = SMALL | {"model.width": 16, "model.context": 16, "batch_size": 4, "log.every": 20}
WATCHED |= {"eval.every": 500, "checkpoint.every": 500, "checkpoint.every_minutes": 0.0}
EVERY = 200  # steps between two looks
HELD = ("descriptors", "threads", "memory_mb")
GROWTH = 1.02  # of resident memory, of which an allocator keeps a little


def main(arguments: list[str]) -> int:
    parser = commands.parser(__doc__, allow_abbrev=False)
    parser.add_argument("what", choices=("kill", "watch"))
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--steps", type=int, help="60, or 20000")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--out", type=Path, default=Path("long_run.jsonl"))
    parsed, overrides = parser.parse_known_args(arguments)
    kill = parsed.what == "kill"
    steps = parsed.steps or (60 if kill else 20_000)
    least = 2 if kill else 10 * EVERY
    if steps < least or parsed.times < 1:
        parser.error(f"--steps must be at least {least} and --times at least 1")
    command = [sys.executable, str(ROOT / "train.py")]
    command += ["--config", "quickstart", f"--config.steps={steps}"]
    fields = KILLED if kill else WATCHED
    command += [f"--config.{name}={value}" for name, value in fields.items()] + overrides
    try:
        validate(flags.parse([*command[2:], "--workdir", "of each run"])[0])
    except ConfigError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        if kill:
            return killed(command, Path(folder), steps, parsed.times, random.Random(parsed.seed))
        return watched(command, Path(folder), steps, parsed.out)


# --- Killed and resumed ---------------------------------------------------------------------------


def killed(command: list[str], folder: Path, steps: int, times: int, draw: random.Random) -> int:
    """1 if a run that was killed does not end as one that was not, else 0."""
    run(command, folder / "whole")
    wanted, failures = final_arrays(folder / "whole", steps), 0
    for k in range(times):
        workdir, step = folder / f"killed{k}", draw.randrange(1, steps)
        reached = run(command, workdir, kill_at=step, delay=draw.random() * 0.1)
        run(command, workdir)
        got = final_arrays(workdir, steps)
        equal = all(map(np.array_equal, got, wanted)) and len(got) == len(wanted)
        made = [row["step"] for row in read_metrics(workdir)]
        unique = made == sorted(set(made))
        failures += not (equal and unique)
        row = {"kill": k, "killed_after_step": reached, "arrays": len(got)}
        print(json.dumps(row | {"equal": equal, "steps_unique": unique}), flush=True)
    return int(failures > 0)


def run(command: list[str], workdir: Path, kill_at: int = 0, delay: float = 0.0) -> int:
    """Run to the end, or kill a moment after the row of step ``kill_at``; the last step."""
    log = workdir.with_suffix(".log")
    with (
        log.open("ab") as file,
        subprocess.Popen([*command, "--workdir", workdir], stderr=file) as process,
    ):
        deadline = time.monotonic() + 600
        while process.poll() is None and not 0 < kill_at <= commands.last_step(workdir):
            if time.monotonic() > deadline:
                raise SystemExit(log.read_text())
            time.sleep(0.005 if kill_at else 0.1)
        time.sleep(delay)
        process.kill()
    if process.returncode and not kill_at:
        raise SystemExit(log.read_text())
    return commands.last_step(workdir)


def final_arrays(workdir: Path, step: int) -> list[np.ndarray]:
    """Every array of the last checkpoint."""
    folder = workdir / "checkpoints" / str(step) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(checkpointer.restore(folder))]


# --- Watched --------------------------------------------------------------------------------------


def watched(command: list[str], folder: Path, steps: int, out: Path) -> int:
    """1 if the process holds more at the end, else 0; writes a row per look."""
    with out.open("w") as file:
        rows = []
        for row in looks(command, folder):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
    early, late = tenths([row | {"at": row["step"] / steps} for row in rows])
    for name in HELD:
        print(f"{name}: {early[name]:g} in the sixth tenth, {late[name]:g} in the last")
    grown = late["memory_mb"] > GROWTH * early["memory_mb"]
    return int(grown or any(late[name] > early[name] for name in HELD[:2]))


def looks(command: list[str], folder: Path) -> Iterator[dict[str, float]]:
    """Runs train.py; yields the resources of its process, about every `EVERY` steps."""
    workdir, log, last, began = folder / "run", folder / "log", 0, time.monotonic()
    with (
        log.open("wb") as file,
        subprocess.Popen([*command, "--workdir", workdir], stderr=file) as process,
    ):
        while process.poll() is None:
            time.sleep(0.5)
            step = commands.last_step(workdir)
            if step >= last + EVERY and (found := of_process(process.pid)):
                last = step
                yield {"step": step, "seconds": round(time.monotonic() - began, 1)} | found
    if process.returncode:
        raise SystemExit(log.read_text())


def of_process(pid: int) -> dict[str, float]:
    """The resources of a process; empty if it has just ended."""
    try:
        process = psutil.Process(pid)
        memory_mb = round(process.memory_info().rss / 2**20, 1)
        numbers = process.num_fds(), process.num_threads(), memory_mb
    except psutil.Error:
        return {}
    return dict(zip(HELD, numbers, strict=True))


def tenths(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The medians over the sixth tenth of a run and over the last; ``at`` is from 0 to 1."""
    parts = ([row for row in rows if k <= 10 * row["at"] <= k + 1] for k in (5, 9))
    return [{name: float(np.median([row[name] for row in p])) for name in HELD} for p in parts]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
