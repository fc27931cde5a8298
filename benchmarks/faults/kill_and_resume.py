"""Kill a run at random moments with SIGKILL, resume it, and compare it bit by bit.

    python benchmarks/faults/kill_and_resume.py [--times 10] [--steps 60] [--config.x=y ...]

One uninterrupted run and, ``--times`` times, a run that is killed once at a random step and started
again with the same command. Every array of the last checkpoints (parameters, moments, window,
counts) must be equal to the last bit, and metrics.jsonl must have every step once. Prints one JSON
line per kill, and exits with 1 if any differs. About 20 s per kill on 2 cores.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax.ground.run_folder import read_metrics
from decent_jax.train import ConfigError, flags, validate

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"num_replicas": 4, "batch_size": 8, "optimizer.accum_steps": 3, "checkpoint.every": 7}
SMALL |= {"model.layers": 1, "model.width": 32, "model.context": 32, "model.dropout": 0.1}
SMALL |= {"log.every": 5, "eval.every": 0, "eval.batches": 2}


def main(arguments: list[str]) -> int:
    parser = commands.parser(__doc__, allow_abbrev=False)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parsed, overrides = parser.parse_known_args(arguments)
    command = [sys.executable, str(ROOT / "train.py")]
    command += ["--config", "quickstart", f"--config.steps={parsed.steps}"]
    command += [f"--config.{name}={value}" for name, value in SMALL.items()] + overrides
    if parsed.times < 1 or parsed.steps < 2:
        parser.error(
            "--times must be at least 1 and --steps at least 2 (a run is killed before its last), "
            f"got {parsed.times} and {parsed.steps}"
        )
    try:
        config, _ = flags.parse([*command[2:], "--workdir", "of each run"])
        validate(config)
    except ConfigError as error:
        parser.error(str(error))
    moment = random.Random(parsed.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        run(command, whole)
        wanted = final_arrays(whole, parsed.steps)
        failures = 0
        for k in range(parsed.times):
            workdir = Path(folder) / f"killed{k}"
            step = moment.randrange(1, parsed.steps)
            reached = run(command, workdir, kill_at=step, delay=moment.random() * 0.1)
            run(command, workdir)
            got = final_arrays(workdir, parsed.steps)
            equal = all(map(np.array_equal, got, wanted)) and len(got) == len(wanted)
            steps = [row["step"] for row in read_metrics(workdir)]
            unique = steps == sorted(set(steps))
            failures += not (equal and unique)
            row = {"kill": k, "killed_after_step": reached, "arrays": len(got)}
            print(json.dumps(row | {"equal": equal, "steps_unique": unique}), flush=True)
    return 1 if failures else 0


def run(command, workdir: Path, kill_at: int | None = None, delay: float = 0.0) -> int | None:
    """Run to the end, or kill a moment after the row of step ``kill_at`` is in metrics.jsonl."""
    log = open(workdir.with_suffix(".log"), "ab")  # noqa: SIM115 (closed below)
    with log, subprocess.Popen([*command, "--workdir", workdir], stderr=log) as process:
        if kill_at is None:
            if process.wait(600):
                raise SystemExit(workdir.with_suffix(".log").read_text())
            return None
        deadline = time.monotonic() + 600
        while process.poll() is None and commands.last_step(workdir) < kill_at:
            if time.monotonic() > deadline:
                raise SystemExit(workdir.with_suffix(".log").read_text())
            time.sleep(0.005)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        return commands.last_step(workdir)


def final_arrays(workdir: Path, step: int) -> list[np.ndarray]:
    """Every array of the last checkpoint."""
    folder = workdir / "checkpoints" / str(step) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(checkpointer.restore(folder))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
