"""The directory of a run: its lock, the reasons to refuse it, and the record of the run."""

import contextlib
import dataclasses
import fcntl
import os
import platform
import re
import socket
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import jax

from decent_jax.cluster import start, watch
from decent_jax.cluster.supervise import PLACE
from decent_jax.ground import extras, json_files
from decent_jax.ground.errors import ConfigError, DataError
from decent_jax.ground.format import name_all, shorten
from decent_jax.ground.json_files import Json
from decent_jax.ground.run_folder import LOCK, METRICS, START, read_metrics
from decent_jax.monitor import goodput_file, trackers
from decent_jax.monitor.metrics_file import MetricWriter
from decent_jax.monitor.trackers import Trackers
from decent_jax.train import config as config_lib
from decent_jax.train.console import Console
from decent_jax.train.settings import Config

_SHARED_S = 10.0  # for a file of process 0 to become visible to all, if they share the folder
_LOOK_S = 0.1  # between two attempts at a lock
_LONGEST_LIST = 60  # characters for the changes of a config in one sentence
_PACKAGES = ("decent_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class Record:
    """Writes config, facts, metrics, incidents and summary of a run to ``path``, in process 0.

    Attributes:
      config: the run's config.
      trackers: the trackers, which receive the rows once `open_metrics` has opened them.
    """

    def __init__(self, path: Path, config: Config, console: Console):
        self.config, self._path, self._console = config, path, console
        self.trackers = Trackers({}, path, 0, self.incident)
        self._began = time.monotonic()

    def write_config(self) -> None:
        """Write ``config.json``, before the first step."""
        if not self._console.quiet:
            json_files.write_json_atomic(
                self._path / "config.json", dataclasses.asdict(self.config)
            )

    def write_start(
        self, steps: int, unit: str, hosts: Sequence[str], messages: dict[str, float]
    ) -> None:
        """Write ``run.json``: facts about this session that apply to all rows.

        Args:
          steps: total number of steps.
          unit: unit of the throughput.
          hosts: host name of each replica; empty for peers, which come and go.
          messages: bytes per step, by name.
        """
        if not self._console.quiet:
            entries = {"steps": steps, "unit": unit, "hosts": hosts, **messages}
            entries |= {"processes": jax.process_count(), "began": time.time()}
            json_files.write_json_atomic(self._path / START, entries)

    def incident(self, sentence: str) -> None:
        """Report a failure or a lost process, and record it for `decent-jax status`."""
        self._console.say(sentence)
        if not self._console.quiet:
            goodput_file.add_incident(self._path, sentence)

    def open_metrics(self, start_step: int) -> MetricWriter:
        """The writer of ``metrics.jsonl``; it drops the rows past ``start_step``."""
        if not self._console.quiet:
            makes = trackers.named(self.config.log.trackers)
            self.trackers = Trackers(makes, self._path, start_step, self.incident)
            self.trackers.log_hyperparameters(self.config.by_name)
        return MetricWriter(
            self._path, trackers=self.trackers, start_step=start_step, quiet=self._console.quiet
        )

    def summary(self, **entries: object) -> Json:
        """Write ``summary.json``: ``entries``, and the hardware and versions of the run."""
        summary = entries | {
            "task": self.config.task,
            "algorithm": self.config.algorithm,
            "num_replicas": self.config.num_replicas,
            "session_seconds": round(time.monotonic() - self._began, 3),
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "processes": jax.process_count(),
            "python": platform.python_version(),
            "versions": {name: extras.version(name) for name in _PACKAGES},
        }
        if not self._console.quiet:
            json_files.write_json_atomic(self._path / "summary.json", summary)
            self.trackers.log_summary(summary)
        return summary


class Workdir(NamedTuple):
    """A run directory in use: its absolute path, its console and its record."""

    path: Path
    console: Console
    record: Record


@contextlib.contextmanager
def open_workdir(workdir: str | Path, config: Config) -> Generator[Workdir]:
    """The run's directory, locked by process 0 until the context ends.

    Raises:
      ConfigError: another run writes to the directory, its run has another config, it cannot be
        written, or checkpoints would fail because of its name.
    """
    path = Path(workdir).absolute()
    if re.match(r"[A-Za-z][\w+.-]*:/", str(workdir)):
        raise _refusal(path, "is a URL, and a run needs a folder; mount it and give its path")
    if not {"[", "\\"}.isdisjoint(str(path)):  # tensorstore takes them for a pattern
        raise _refusal(path, "has a [ or a \\ in its name, so checkpoints would fail; rename it")
    console, is_new = Console(), False
    with contextlib.ExitStack() as held:
        try:
            is_new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            json_files.check_regular(path / LOCK)
            lock = held.enter_context(open(path / LOCK, "a+", errors="replace"))
            if not console.quiet:
                # The holder may be a lost process of this run, which ends soon.
                patience_s = 2 * config.cluster.heartbeat_s if PLACE in os.environ else 0.0
                _lock(lock, path, patience_s)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:  # ValueError: not a path
            why = getattr(error, "strerror", None) or error
            raise _refusal(path, f"cannot be written: {why}") from None
        try:
            check_config(path, config)
            if not console.quiet:
                check_metrics(path)
            record = Record(path, config, console)
            try:
                yield Workdir(path, console, record)
            finally:
                record.trackers.finish()
        except ConfigError:  # refused: a folder with only the lock was created for it
            if is_new:
                with contextlib.suppress(OSError):
                    (path / LOCK).unlink()
                    path.rmdir()
            raise


def _lock(lock: IO[str], path: Path, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(_LOOK_S)
                continue
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        why = f"is in use by another run ({owner}); wait for it or take another"
        raise _refusal(path, why)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()


def _refusal(path: Path, why: str) -> ConfigError:
    shown = shorten(str(path), 80)
    return ConfigError(f"--workdir {shown} {why}", field="--workdir", value=path)


# --- What is refused ------------------------------------------------------------------------------


def check_config(path: Path, config: Config) -> None:
    """Refuse to resume a run under a config that would make it another experiment."""
    saved = path / "config.json"
    if not saved.exists():
        return
    try:
        old = json_files.read_entries(saved)
    except (OSError, DataError):
        raise ConfigError(f"{saved} is damaged; repair it or take another --workdir") from None
    changes = config_lib.refused_changes(old, config.by_name)
    if changes:
        listed = "; ".join(changes)
        if len(changes) > 1 and len(listed) > _LONGEST_LIST:
            listed = f"{changes[0]}; and {len(changes) - 1} more"
        allowed = shorten(config_lib.changeable(config.task), 60)
        why = f"holds a run with another config ({listed}); take another --workdir, or change"
        raise _refusal(path, f"{why} only {allowed}")


def check_metrics(path: Path) -> None:
    """Refuse a run whose metrics file is damaged, before anything is compiled."""
    try:
        if (path / METRICS).exists():
            read_metrics(path / METRICS)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None


def check_shared(path: Path) -> None:
    """Refuse to train if the processes do not share the same directory."""
    mark = None
    if jax.process_index() == 0:
        file, mark = tempfile.mkstemp(prefix=".shared-", dir=path)
        os.close(file)
    there = path / watch.gather(Path(mark or "").name)[0]
    end = time.monotonic() + _SHARED_S
    while not there.exists() and time.monotonic() < end:
        time.sleep(_LOOK_S)
    seen = watch.gather(there.exists())
    if mark is not None:
        os.unlink(mark)
    if not all(seen):
        names, other = start.hosts(), seen.index(False)
        here, elsewhere = name_all([0], names), name_all([other], names)
        raise ConfigError(
            f"--workdir is another folder on {elsewhere} than on {here}; name one that all "
            "hosts share",
            field="--workdir",
            value=path,
        )
