"""The state of a run, read from its directory, even while it runs; does not import jax."""

import dataclasses
import json
import os
import re
import socket
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from decent_jax.ground.errors import DataError, RunError
from decent_jax.ground.json_files import Json, is_real, is_whole, plain, read_json, read_text
from decent_jax.ground.run_folder import LOCK, METRICS, SCORES, START, entries, read_metrics
from decent_jax.monitor import goodput_file
from decent_jax.monitor.goodput_file import CAUSES

PROCESSES = "processes"  # folder of a run of several processes: K.json is written by process K
PEERS = "peers"  # folder of a run of peers: peers/RANK/ is the run of a peer
_RECENT_ROWS = 10  # rows for the step time
_SILENT_S = 60.0  # seconds without a heartbeat after which a run on another host is silent


@dataclasses.dataclass(frozen=True)
class RunState:
    """A run, as recorded in its directory.

    path: the run directory.
    config: ``config.json`` by dotted names; empty if it is missing or damaged.
    start: ``run.json``, see `decent_jax.train.workdir.Record.write_start`; empty if it is missing
        or damaged.
    summary: ``summary.json`` by dotted names.
    rows: the rows of ``metrics.jsonl``.
    spent: seconds per category, "steps" and `decent_jax.monitor.goodput_file.CAUSES`; None: not
        recorded.
    incidents: (seconds since the epoch, sentence), the oldest first.
    owner: the current or last owner: ``"process 7 on myhost"``; "" if unknown.
    runs: whether it runs; None: unknown, for example because it is on another host.
    seen: the last sign of life, in seconds since the epoch.
    saved: the step of the newest checkpoint; None: there is none.
    peers: the facts about each peer by rank, see `_peers`.
    processes: the latest numbers of each process by its name, see
        `decent_jax.monitor.comm_metrics.CommMetrics`.
    """

    path: Path
    config: Json
    start: Json
    summary: Json
    rows: list[Json]
    spent: Mapping[str, float] | None
    incidents: list[tuple[float, str]]
    owner: str
    runs: bool | None
    seen: float
    saved: int | None
    peers: dict[int, Json]
    processes: dict[str, Json]

    def last(self, name: str) -> tuple[int, float] | None:
        """The newest (step, value) of a metric; None if no row has it."""
        points = ((row["step"], row[name]) for row in reversed(self.rows) if has(row, name))
        return next(points, None)

    @property
    def step(self) -> int:
        """Steps done, as of the last row or checkpoint."""
        return max(self.rows[-1]["step"] if self.rows else 0, self.saved or 0)

    @property
    def steps(self) -> int | None:
        """Total steps of the run; None if unknown, as for older runs that count epochs."""
        steps = self.start.get("steps")
        if not is_whole(steps):
            steps = None if self.config.get("epochs") else self.config.get("steps")
        return steps if is_whole(steps) else None

    def recent(self, name: str) -> float | None:
        """The median of a metric in the last rows; None if none of them has it."""
        return _median(self.rows, name)

    @property
    def left_s(self) -> float | None:
        """Seconds for the remaining steps, without evaluations and checkpoints; None if unknown."""
        step_s = self.recent("perf/step_time_s")
        if self.steps is None or step_s is None:
            return None
        return max(0, self.steps - self.step) * step_s

    @property
    def word(self) -> str:
        """The state in one word: starting, running, ended, interrupted, stopped or silent."""
        if self.runs or (self.runs is None and time.time() - self.seen < _SILENT_S):
            return "running" if self.rows else "starting"
        if self.summary.get("steps", -1) >= self.step:  # otherwise it is from an earlier session
            return "interrupted" if self.summary.get("interrupted") else "ended"
        return "silent" if self.runs is None else "stopped"

    def best(self, name: str = "eval/loss") -> float | None:
        """The best value so far of a metric: the highest if it is in `SCORES`, else the lowest."""
        values = [row[name] for row in self.rows if has(row, name)]
        return (max if name in SCORES else min)(values, default=None)


def read(folder: str | Path) -> RunState:
    """The state of the run in a directory.

    Raises:
      RunError: the directory holds no run, or its metrics are damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise RunError(f"{path} is not a folder; give the --workdir of a run")
    if not any((path / name).is_file() for name in ("config.json", METRICS, LOCK)):
        below = sorted(p.parent.name for p in path.glob("*/config.json"))
        why = f"give those inside it, such as {path / below[0]}" if below else "give its --workdir"
        raise RunError(f"{path} holds no run, neither config.json nor {METRICS}; {why}")
    try:
        rows = read_metrics(path)
    except FileNotFoundError:
        rows = []
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from None
    owner, runs = _owner(path)
    record = goodput_file.read(path / goodput_file.FILE)
    summary = entries(path / "summary.json")
    config, start = entries(path / "config.json"), _start(path / START)
    processes = {
        name: entries(path / PROCESSES / f"{name}.json") for name in _processes(start, config)
    }
    return RunState(
        path,
        config,
        start,
        summary,
        rows,
        _spent(summary) if record is None or record["ended"] else record["seconds"],
        goodput_file.incidents(path),
        owner,
        runs,
        max(_changed(path / name) for name in (METRICS, goodput_file.FILE, "config.json", LOCK)),
        _newest_checkpoint(path),
        _peers(path, rows),
        {
            name: entries_of
            for name, entries_of in processes.items()
            if is_real(entries_of.get("date"), 0)
        },
    )


def has(row: Json, name: str) -> bool:
    """Whether a row has a finite value of a metric."""
    return is_real(row.get(name))


def _median(rows: list[Json], name: str) -> float | None:
    """The median of a metric in the last rows; None if none of them has it.

    >>> rows = 5 * [{"x": 100.0}] + [{"x": 2.0 * k} for k in range(10)]
    >>> _median(rows, "x"), _median(rows, "y")
    (9.0, None)
    """
    values = [row[name] for row in rows[-_RECENT_ROWS:] if has(row, name)]
    return statistics.median(values) if values else None


def _start(path: Path) -> Json:
    try:
        facts = read_json(path)
    except (OSError, DataError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _processes(start: Json, config: Json) -> list[str]:
    """The names of the processes, or of the workers of pipelines, replica by replica."""
    count, stages = start.get("processes", 0), start.get("stages", 0)
    replicas = config.get("num_replicas", 0)
    if is_whole(stages, 1, 1024) and is_whole(replicas, 1, 1024):
        return [f"{i}-{s}" for i in range(replicas) for s in range(stages)]
    return [str(k) for k in range(count if is_whole(count, 0, 1024) else 0)]


def _spent(summary: Json) -> dict[str, float] | None:
    """Seconds per category of a run that has ended; None if it recorded none."""
    recorded = {cause: summary.get(f"goodput.seconds.{cause}") for cause in ("steps", *CAUSES)}
    spent = {cause: float(x) for cause, x in recorded.items() if x is not None and is_real(x)}
    return spent if len(spent) == len(recorded) else None


def _owner(path: Path) -> tuple[str, bool | None]:
    """The last owner of the lock, and whether that process still holds it; None: unknown."""
    try:
        owner, inode = read_text(path / LOCK).strip(), (path / LOCK).stat().st_ino
    except (OSError, ValueError):
        return "", None
    match = re.fullmatch(r"process (\d+) on (.*)", owner)
    if match is None:
        return "", None
    if match[2] != socket.gethostname():
        return owner, None
    try:  # 2: FLOCK  ADVISORY  WRITE 3179 fe:00:1234 0 EOF
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:  # no Linux
        return owner, os.path.exists(f"/proc/{match[1]}") or None
    return owner, any(
        words[-4] == match[1] and words[-3].endswith(f":{inode}")
        for words in held
        if len(words) >= 8
    )


def _changed(path: Path) -> float:
    """The modification time of a file; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _newest_checkpoint(path: Path) -> int | None:
    names = [p.name for p in (path / "checkpoints").glob("*") if p.name.isdecimal()]
    return max(map(int, names), default=None)


def _peers(path: Path, rows: list[Json]) -> dict[int, Json]:
    """``alive``, ``steps``, ``starts``, ``loss``, ``step_s`` and ``stale`` of each peer, by rank.

    They come from the peer's own rows, and from the last row of the run that has its ``steps``.
    """
    ranks = [p for p in (path / PEERS).glob("*") if p.name.isdecimal()]
    alive = entries(path / "peers.json")
    peers = {}
    for folder in sorted(ranks, key=lambda p: int(p.name)):
        name = f"{PEERS}/{folder.name}"
        ours = next((row for row in reversed(rows) if f"{name}/steps" in row), {})
        try:
            own = read_metrics(folder)
        except (OSError, ValueError):
            own = []
        peers[int(folder.name)] = {
            "alive": alive.get(f"peers.{folder.name}.alive"),
            "steps": int(max(ours.get(f"{name}/steps", 0), own[-1]["step"] if own else 0)),
            "starts": len(list(folder.glob("events-*.jsonl"))),
            "loss": own[-1].get("train/loss") if own else None,
            "step_s": _median(own, "perf/step_time_s"),
            "stale": ours.get(f"{name}/stale"),
        }
    return peers


def as_json(state: RunState) -> str:
    """The state as one line of JSON, for scripts."""
    words = {
        "path": str(state.path),
        "state": state.word,
        "step": state.step,
        "steps": state.steps,
        "seconds_left": state.left_s,
        "row": state.rows[-1] if state.rows else None,
        "best_eval_loss": state.best(),
        "seconds": state.spent,
        "checkpoint": state.saved,
        "start": state.start,
        "incidents": [{"date": date, "what": what} for date, what in state.incidents],
        "peers": state.peers,
        "processes": state.processes,
    }
    return json.dumps(plain(words))
