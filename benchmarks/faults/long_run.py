"""Train a tiny model for many steps, and watch the resources of its process: none may grow.

    python benchmarks/faults/long_run.py [--steps 20000] [--out long_run.jsonl]

The run logs every 20 steps, and evaluates and saves a checkpoint every 500. About every 200 steps
this program writes a JSON line: the step, and what the process holds:
open file descriptors, threads, resident memory. At the end it compares the sixth tenth of the run
with the last, by their medians. Exit code 1: the last tenth has more descriptors or threads, or 2%
more memory. (Thread pools fill up within the first third.)
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"model.layers": 1, "model.width": 16, "model.context": 16, "num_replicas": 4}
SMALL |= {"batch_size": 4, "log.every": 20, "eval.every": 500, "eval.batches": 2}
SMALL |= {"checkpoint.every": 500, "checkpoint.every_minutes": 0.0}
EVERY = 200  # steps between two looks
SHARE = 10  # the run is compared by tenths
GROWTH = 1.02  # of resident memory, of which an allocator keeps a little
HELD = ("descriptors", "threads", "memory_mb")


def main(arguments: list[str]) -> int:
    parser = commands.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("long_run.jsonl"))
    parsed = parser.parse_args(arguments)
    if parsed.steps < 10 * EVERY:
        parser.error(f"--steps must be at least {10 * EVERY}, got {parsed.steps}")
    with parsed.out.open("w") as file:
        rows = []
        for row in look(parsed.steps):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
    early, late = (held(rows, parsed.steps, tenth) for tenth in (SHARE // 2, SHARE - 1))
    for name in HELD:
        print(f"{name}: {early[name]:g} in the sixth tenth, {late[name]:g} in the last")
    grown = late["memory_mb"] > GROWTH * early["memory_mb"]
    return int(grown or any(late[name] > early[name] for name in ("descriptors", "threads")))


def look(steps: int) -> Iterator[dict[str, float]]:
    """Runs train.py; yields the resources of its process, about every `EVERY` steps."""
    with tempfile.TemporaryDirectory() as folder:
        workdir, last = Path(folder) / "run", 0
        command = [sys.executable, str(ROOT / "train.py"), "--workdir", str(workdir)]
        command += ["--config", str(ROOT / "configs" / "quickstart.py")]
        command += [f"--config.{name}={value}" for name, value in SMALL.items()]
        command.append(f"--config.steps={steps}")
        log = Path(folder) / "log"
        began = time.monotonic()
        with log.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
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


def held(rows: list[dict[str, float]], steps: int, tenth: int) -> dict[str, float]:
    """The medians over a tenth of the run, counted from 0."""
    own = [row for row in rows if tenth <= SHARE * row["step"] / steps <= tenth + 1]
    return {name: float(np.median([row[name] for row in own])) for name in HELD}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
