"""Lose a process in every way, and see how soon the run goes on: a table of docs/clusters.md.

    python benchmarks/losses.py [WAY ...] [--out FOLDER]

A run on four hosts made of this machine (benchmarks/hosts.sh, 1 Gbit/s) under `decent-jax
supervise` loses a process in each way of `WAYS`, one after the other, with 15 steps between them.
Then the same steps are made without losses, and every row of metrics must be equal. Needs root.
Prints a row per way, and exits with 1 if rows differ; FOLDER/losses.jsonl has the rows, too.

There are fewer cores than hosts, so computing is a sleep of 0.2 s (benchmarks/waiting.py).
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import goodput
import psutil
from peers import CONFIG
from peers_tables import COMPUTE_S

from decent_jax.ground.run_folder import read_metrics
from decent_jax.train.copies import MEMORY, folder_of

HEARTBEAT_S, LIMIT_S, BETWEEN = 10, 180.0, 15
CHECKPOINTS, EVALUATIONS = 40, 25  # steps
FIELDS = goodput.SYNCHRONOUS | {
    "cluster.heartbeat_s": HEARTBEAT_S,
    "checkpoint.every": CHECKPOINTS,
    "eval.every": EVALUATIONS,
    "eval.batches": 5,  # a second
}


class Run:
    """A supervised run, and what becomes of it.

    Args:
      folder: for its files; has ``config.py``.
      name: of its folder there.
      changes: fields of its config.
    """

    def __init__(self, folder: Path, name: str, **changes: Any):
        self.workdir, self.words = folder / name, folder / f"{name}.txt"
        flags = ["--config", str(folder / "config.py"), "--workdir", str(self.workdir)]
        fields = goodput.ARMS["one_peer_exp"] | FIELDS | changes
        flags += [f"--config.{field}={value}" for field, value in fields.items()]
        self._command = goodput.command("one_peer_exp", flags)
        self.start()

    def start(self) -> None:
        """Start the supervisor, for the first time or again."""
        with self.words.open("a") as file:
            self.supervisor = subprocess.Popen(
                self._command, env=goodput.environment(), stdout=file, stderr=file
            )

    def stop(self) -> None:
        self.supervisor.terminate()
        self.supervisor.wait()

    @property
    def step(self) -> int:
        """Of the last row; 0: there is none."""
        return (goodput.rows_of(self.workdir) or [0])[-1]

    @property
    def starts(self) -> int:
        return self.words.read_text().count("processes start")

    def processes(self) -> list[psutil.Process]:
        """Those that train, in the order of their hosts."""
        found = goodput.trainers("one_peer_exp", self.workdir)
        return [psutil.Process(pid) for pid in sorted(found, key=found.__getitem__)]

    def until(self, happened: Callable[[], Any], look_s: float = 0.02) -> Any:
        """Wait for something, and return it."""
        end = time.monotonic() + LIMIT_S
        while not (found := happened()):
            if time.monotonic() > end or self.supervisor.poll() is not None:
                sys.exit(f"it did not happen:\n{self.words.read_text()[-3000:]}")
            time.sleep(look_s)
        return found


# --- The ways -------------------------------------------------------------------------------------

_draw = random.Random(0)


def a_process(run: Run) -> None:
    _draw.choice(run.processes()[1:]).kill()


def process_0(run: Run) -> None:
    run.processes()[0].kill()


def two_at_once(run: Run) -> None:
    for process in _draw.sample(run.processes(), 2):
        process.kill()


def an_agent(run: Run) -> None:
    """And with it its process."""
    _draw.choice(run.processes()).parent().kill()


def during_a_copy(run: Run) -> None:
    process = run.processes()[2]
    name = goodput.trainers("one_peer_exp", run.workdir)[process.pid]
    folder = MEMORY / f"decent_jax-{os.getuid()}" / folder_of(run.workdir).parent.name / name
    run.until(lambda: list(folder.glob(".*.draft")), look_s=0.001)
    process.kill()


def during_a_recovery(run: Run) -> None:
    starts = run.starts
    run.processes()[1].kill()
    run.until(lambda: run.starts > starts and len(run.processes()) == goodput.HOSTS)
    run.processes()[3].kill()


def during_a_checkpoint(run: Run) -> None:
    folder = run.workdir / "checkpoints"
    before = set(folder.iterdir()) if folder.exists() else set()
    run.until(lambda: folder.exists() and set(folder.iterdir()) - before)
    _draw.choice(run.processes()).kill()


def during_an_evaluation(run: Run) -> None:
    run.until(lambda: run.step > 0 and run.step % EVALUATIONS == 0)
    time.sleep(COMPUTE_S)
    _draw.choice(run.processes()).kill()
    if "eval/loss" in read_metrics(run.workdir)[-1]:
        sys.exit("the evaluation was over when the process was killed")


def silent_for_20_s(run: Run) -> None:
    process = _draw.choice(run.processes())
    process.suspend()
    end = time.monotonic() + 20
    while process.is_running() and time.monotonic() < end:
        time.sleep(0.05)
    if process.is_running():
        process.resume()


def the_supervisor(run: Run) -> None:
    """Its processes save a checkpoint; then it is started again."""
    processes = run.processes()
    run.supervisor.kill()
    run.supervisor.wait()
    psutil.wait_procs(processes, timeout=LIMIT_S)
    run.start()


WAYS: dict[str, Callable[[Run], None]] = {
    way.__name__: way
    for way in (
        a_process,
        process_0,
        two_at_once,
        an_agent,
        during_a_copy,
        during_a_recovery,
        during_a_checkpoint,
        during_an_evaluation,
        silent_for_20_s,
        the_supervisor,
    )
}


def lose(run: Run, way: str) -> dict[str, Any]:
    """Lose something; the seconds from there to the first new step, and the steps made again."""
    before = len(resumed(run))
    began = time.monotonic()
    WAYS[way](run)
    reached = run.step
    after = run.until(lambda: resumed(run)[before:])[-1]
    run.until(lambda: run.step != reached or reached == after)  # rows made again are gone
    run.until(lambda: run.step > after)
    seconds = round(time.monotonic() - began, 1)
    return {"way": way, "seconds": seconds, "reached": reached, "lost": max(0, reached - after)}


def resumed(run: Run) -> list[int]:
    """The steps after which it went on."""
    found = re.findall(r"^resuming after step (\d+)", run.words.read_text(), re.MULTILINE)
    return list(map(int, found))


# --- All of them ----------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """Seconds to the next step, and steps lost, of each way."""
    lines = ["| what is lost | seconds to the next step | steps lost |", "|---|---|---|"]
    for row in rows:
        lines.append(f"| {row['way'].replace('_', ' ')} | {row['seconds']} | {row['lost']} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = commands.parser(__doc__)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)}; all")
    parser.add_argument("--out", type=Path, default=Path("losses_out"), metavar="FOLDER")
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.ways) - set(WAYS)
    if unknown:
        parser.error(f"there is no way {', '.join(sorted(unknown))}; choose of {', '.join(WAYS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parsed.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with goodput.made_hosts("one_peer_exp"), tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.py"
        config.write_text(CONFIG.format(hosts=goodput.HOSTS, compute_s=COMPUTE_S))
        run = Run(Path(folder), "losses")
        try:
            for way in parsed.ways or WAYS:
                begin = run.step + BETWEEN
                run.until(lambda begin=begin: run.step >= begin)
                rows.append(lose(run, way))
                print(json.dumps(rows[-1]), file=sys.stderr)
        finally:
            run.stop()
        fields = goodput.ARMS["one_peer_exp"] | FIELDS
        differing = goodput.differing_rows("one_peer_exp", run.workdir, config, fields)
    commands.write_rows(parsed.out / "losses.jsonl", rows)
    print(table(rows))
    print(f"rows that differ from those of a run without losses: {differing or 'none'}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
