"""The directory of a run and its lock, messages to the terminal, and signals."""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import platform
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from decent_jax.cluster import start, watch
from decent_jax.cluster.supervise import PLACE
from decent_jax.ground import extras, json_files
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import format_duration, name_all, shorten
from decent_jax.ground.progress import Progress, announce
from decent_jax.ground.run_folder import LOCK, METRICS, START, read_metrics
from decent_jax.monitor import goodput_file, trackers
from decent_jax.monitor.metrics_file import MetricWriter
from decent_jax.monitor.trackers import Trackers
from decent_jax.train import config as config_lib
from decent_jax.train.settings import Config

PATIENCE_S = 2.0  # after Ctrl-C, until another one means "exit at once"
_SHARED_S = 10.0  # until a file of process 0 is visible to all, if they share the folder
_LOOK_S = 0.1  # between two attempts at a lock
_LONGEST_LIST = 60  # characters for the changes of a config in one sentence
_PACKAGES = ("decent_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@contextlib.contextmanager
def open_workdir(workdir: str | Path, config: Config) -> Iterator["Workdir"]:
    """The run's directory, locked by process 0 until the context ends.

    Raises:
      ConfigError: another run writes to the directory, it belongs to a run with another config, it
        cannot be written, or checkpoints could not be read from a directory of this name.
    """
    path = Path(workdir).absolute()
    if re.match(r"[A-Za-z][\w+.-]*:/", str(workdir)):
        raise _refusal(path, "is a URL, and a run needs a folder; mount it and name its place")
    if not {"[", "\\"}.isdisjoint(str(path)):  # tensorstore takes them for a pattern
        raise _refusal(path, "has a [ or a \\ in its name, and no checkpoint could be read there")
    work, made = Workdir(path, config), False
    with contextlib.ExitStack() as held:
        try:
            made = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            json_files.check_regular(path / LOCK)
            lock = held.enter_context(open(path / LOCK, "a+", errors="replace"))
            if not work.quiet:
                # Held by a process of this run that the supervisor considers lost: it ends soon.
                patience_s = 2 * config.cluster.heartbeat_s if PLACE in os.environ else 0.0
                _lock(lock, path, patience_s)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:  # ValueError: not a path
            why = getattr(error, "strerror", None) or error
            raise _refusal(path, f"cannot be written: {why}") from None
        try:
            work.check_config()
            work.check_metrics()
            try:
                yield work
            finally:
                work.trackers.finish()
        except ConfigError:  # refused: a folder with only the lock was created for it
            if made:
                with contextlib.suppress(OSError):
                    (path / LOCK).unlink()
                    path.rmdir()
            raise


class Workdir:
    """The run directory ``path``, and the run's messages; only process 0 writes and prints.

    Attributes:
      path: absolute.
      config: of the run.
      quiet: True on all processes but the first.
      trackers: of the run; none before `open_metrics`.
      progress: the current progress bar, if any, which `say` and `announce` must not break.
    """

    def __init__(self, path: Path, config: Config):
        self.path, self.config = path, config
        self.quiet = jax.process_index() != 0
        self.progress: Progress | None = None
        self.trackers = Trackers({}, path, 0, self.incident)
        self._began = time.monotonic()
        self._announced = set()
        self._accepted = False

    def say(self, message: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.quiet:
            return
        if self.progress is not None:
            self.progress.note(message)
        else:
            print(message, file=sys.stderr, flush=True)

    def announce(self, message: str, once: bool = False) -> AbstractContextManager:
        """A context that prints what the user waits for; ``once``: only the first time."""
        if once and message in self._announced:
            return contextlib.nullcontext()
        self._announced.add(message)
        if self.progress is not None:
            return self.progress.announce(message)
        return announce(message, quiet=self.quiet, brief=self._accepted)

    def accept(self) -> None:
        """From now on, also announce brief waits; a run refused earlier prints only the reason."""
        self._accepted = True

    @contextlib.contextmanager
    def show_progress(self, steps: int | None, start: int) -> Iterator[Progress]:
        """A context with a `Progress` bar from ``start`` to ``steps``; None: unknown."""
        with Progress(steps, start, quiet=self.quiet) as self.progress:
            try:
                yield self.progress
            finally:
                self.progress = None

    def check_config(self) -> None:
        """Refuse to resume under a config that makes it another experiment."""
        saved = self.path / "config.json"
        if not saved.exists():
            return
        try:
            old = json_files.flat(json.loads(json_files.read_text(saved)))
        except (OSError, ValueError, AttributeError, RecursionError):
            raise ConfigError(f"{saved} is damaged; repair it or take another --workdir") from None
        changes = config_lib.refused_changes(old, json_files.flat(self.config))
        if changes:
            listed = "; ".join(changes)
            if len(changes) > 1 and len(listed) > _LONGEST_LIST:
                listed = f"{changes[0]}; and {len(changes) - 1} more"
            allowed = shorten(config_lib.changeable(self.config.task), 60)
            why = f"holds a run with another config ({listed}); take another --workdir, or change"
            raise _refusal(self.path, f"{why} only {allowed}")

    def check_shared(self) -> None:
        """Refuse to train if the processes do not share the same directory."""
        mark = None
        if not self.quiet:
            file, mark = tempfile.mkstemp(prefix=".shared-", dir=self.path)
            os.close(file)
        there = self.path / watch.gather(mark and Path(mark).name)[0]
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
                value=self.path,
            )

    def check_metrics(self) -> None:
        """Refuse to continue a metrics file that is damaged, before anything is compiled."""
        try:
            if not self.quiet and (self.path / METRICS).exists():
                read_metrics(self.path / METRICS)
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from None

    def write_config(self) -> None:
        """Write ``config.json``, before the first step."""
        if not self.quiet:
            json_files.write_json_atomic(self.path / "config.json", dataclasses.asdict(self.config))

    def write_start(
        self, steps: int, unit: str, hosts: Sequence[str], messages: dict[str, float]
    ) -> None:
        """Write ``run.json``: facts about a session that no row repeats.

        Args:
          steps: of the run.
          unit: of its throughput.
          hosts: of each replica; empty for peers, which come and go.
          messages: by name, bytes per step.
        """
        if not self.quiet:
            entries = {"steps": steps, "unit": unit, "hosts": hosts, **messages}
            entries |= {"processes": jax.process_count(), "began": time.time()}
            json_files.write_json_atomic(self.path / START, entries)

    def incident(self, sentence: str) -> None:
        """Report a failure or a loss, and record it for `decent-jax status`."""
        self.say(sentence)
        if not self.quiet:
            goodput_file.add_incident(self.path, sentence)

    def open_metrics(self, start_step: int) -> MetricWriter:
        """The writer of ``metrics.jsonl``; it drops the rows past ``start_step``."""
        if not self.quiet:
            makes = trackers.named(self.config.log.trackers)
            self.trackers = Trackers(makes, self.path, start_step, self.incident)
            self.trackers.log_hyperparameters(json_files.flat(self.config))
        return MetricWriter(
            self.path, trackers=self.trackers, start_step=start_step, quiet=self.quiet
        )

    def summary(self, **entries: Any) -> dict[str, Any]:
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
        if not self.quiet:
            json_files.write_json_atomic(self.path / "summary.json", summary)
            self.trackers.log_summary(summary)
        return summary

    def say_where(self, summary: dict[str, Any]) -> None:
        """Print the result and the files of a finished run."""
        loss = summary["final"].get("eval/loss", float("nan"))
        self.say(
            f"validation loss {loss:.4f} after {summary['steps']} steps, "
            f"{format_duration(summary['training_seconds'])} of training"
        )
        if "goodput" in summary:
            self.say(goodput_file.describe(summary["goodput"]["seconds"], summary.get("mfu")))
        self.say(
            f"curves       {self.path / 'curves.png'}\n"
            f"metrics      {self.path / 'metrics.jsonl'}\n"
            f"checkpoints  {self.path / 'checkpoints'}\n"
            f"summary      {self.path / 'summary.json'}"
        )


class Halted(Exception):
    """A signal ended an evaluation, in all processes between the same two batches."""


class Signals:
    """Remembers SIGTERM and Ctrl-C for the loop to act on.

    Launchers send both, or one of them twice. Only a second Ctrl-C after `PATIENCE_S` means that
    the process should exit at once: without a checkpoint, and therefore with code 1.

    Attributes:
      received: the number of the first signal, or None.
    """

    def __init__(self):
        self.received: int | None = None
        self._pressed = math.inf  # when Ctrl-C came first
        self._before = {}

    def __enter__(self) -> "Signals":
        with contextlib.suppress(ValueError):  # not in the main thread: leave signals alone
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number, frame):
        if self.received is None:
            self.received = number
        if number == signal.SIGINT:
            now = time.monotonic()
            if now >= self._pressed + PATIENCE_S:
                os.write(2, b"\nended at once, without a checkpoint\n")
                os._exit(1)
            self._pressed = min(self._pressed, now)


def _lock(lock, path: Path, patience_s: float) -> None:
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
        why = f"is written by another run ({owner}); wait for it or take another"
        raise _refusal(path, why)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()


def _refusal(path: Path, why: str) -> ConfigError:
    shown = shorten(str(path), 80)
    return ConfigError(f"--workdir {shown} {why}", field="--workdir", value=path)
