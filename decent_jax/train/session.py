"""A run's surroundings: its folder and lock, signals, and what it tells the user."""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from decent_jax import json_files
from decent_jax.errors import ConfigError
from decent_jax.progress import announce
from decent_jax.text import format_duration
from decent_jax.train import config as config_lib
from decent_jax.train import metrics

_PACKAGES = ("decent_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@contextlib.contextmanager
def open_workdir(workdir: str | Path, config: ConfigDict) -> Iterator["Workdir"]:
    """The run's folder, locked by process 0 for as long as the context lasts.

    Raises:
      ConfigError: the folder belongs to a run that is going on, or to one with another config, or
        cannot be written.
    """
    path = Path(workdir).absolute()
    work = Workdir(path, config)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / ".lock", "a+")  # noqa: SIM115 (held until the end)
    except OSError as error:
        raise ConfigError(f"--workdir {path} cannot be written: {error.strerror}") from None
    with lock:
        if not work.quiet:
            try:
                _lock(lock, path)
            except OSError as error:
                raise ConfigError(f"--workdir {path} cannot be written: {error.strerror}") from None
        work.check_config()
        yield work


class Workdir:
    """The folder ``workdir`` and the words that go to the terminal (from process 0 only)."""

    def __init__(self, path: Path, config: ConfigDict):
        self.path, self.config = path, config
        self.quiet = jax.process_index() != 0
        self.progress = None
        self._began = time.time()
        self._announced = set()

    def say(self, message: str) -> None:
        """Print a line, beside the progress bar if there is one."""
        if self.quiet:
            return
        if self.progress is not None:
            self.progress.note(message)
        else:
            print(message, file=sys.stderr, flush=True)

    def announce(self, message: str, once: bool = False):
        """A context for a wait; with ``once``, only the first wait of that name is told."""
        if once and message in self._announced:
            return contextlib.nullcontext()
        self._announced.add(message)
        if self.progress is not None:
            return self.progress.announce(message)
        return announce(message, quiet=self.quiet)

    def check_config(self) -> None:
        """Refuse to resume under a config that makes it another experiment."""
        saved = self.path / "config.json"
        if not saved.exists():
            return
        try:
            old = json_files.flat(json.loads(saved.read_text()))
        except ValueError:
            raise ConfigError(f"{saved} is damaged; repair it or take another --workdir") from None
        changes = config_lib.refused_changes(old, json_files.flat(self.config))
        if changes:
            raise ConfigError(
                f"{self.path} holds a run with another config ({'; '.join(changes)}); take another "
                f"--workdir, or change only "
                f"{config_lib.changeable(self.config.task)}"
            )

    def write_config(self) -> None:
        """``config.json``, before the first step."""
        if not self.quiet:
            json_files.write_json_atomic(self.path / "config.json", self.config.to_dict())

    def open_metrics(self, start_step: int):
        """The writer of ``metrics.jsonl``; rows past ``start_step`` are dropped."""
        if self.quiet:
            return metrics.NullWriter()
        try:
            return metrics.MetricWriter(
                self.path,
                tensorboard=self.config.log.tensorboard,
                wandb=self.config.log.wandb,
                start_step=start_step,
            )
        except (ImportError, ValueError) as error:  # not installed; a damaged metrics file
            raise ConfigError(str(error)) from None

    def summary(self, **entries: Any) -> dict[str, Any]:
        """Write ``summary.json``: what the run came to, and on what."""
        summary = entries | {
            "task": self.config.task,
            "algorithm": self.config.algorithm,
            "num_replicas": self.config.num_replicas,
            "session_seconds": round(time.time() - self._began, 3),
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "processes": jax.process_count(),
            "python": platform.python_version(),
            "versions": {name: _version(name) for name in _PACKAGES},
        }
        if not self.quiet:
            json_files.write_json_atomic(self.path / "summary.json", summary)
        return summary

    def say_where(self, summary: dict[str, Any]) -> None:
        """The last words of a run."""
        loss = summary["final"].get("eval/loss", float("nan"))
        self.say(
            f"validation loss {loss:.4f} after {summary['steps']} steps, "
            f"{format_duration(summary['training_seconds'])} of training\n"
            f"curves       {self.path / 'curves.png'}\n"
            f"metrics      {self.path / 'metrics.jsonl'}\n"
            f"checkpoints  {self.path / 'checkpoints'}\n"
            f"summary      {self.path / 'summary.json'}"
        )


class Mark:
    """Time since the last row, without the pauses for evaluation, saving and compiling."""

    def __init__(self, step: int):
        self._step, self._time, self._paused = step, time.monotonic(), 0.0
        self.data_wait = 0.0

    def pause(self):
        """A context whose time does not count."""
        return timed(self._add_pause)

    def _add_pause(self, seconds: float) -> None:
        self._paused += seconds

    def interval(self, step: int) -> tuple[float, int, float]:
        """(seconds, steps, seconds waited for data) since the last call."""
        now = time.monotonic()
        seconds = max(now - self._time - self._paused, 1e-9)
        result = seconds, step - self._step, self.data_wait
        self._step, self._time, self._paused, self.data_wait = step, now, 0.0, 0.0
        return result


class Signals:
    """Remembers SIGTERM and Ctrl-C instead of dying of them; a second one is obeyed at once."""

    def __init__(self):
        self.received: int | None = None
        self._before = {}

    def __enter__(self):
        with contextlib.suppress(ValueError):  # not in the main thread: leave signals alone
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number, frame):
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = number


@contextlib.contextmanager
def timed(add: Callable[[float], None]) -> Iterator[None]:
    """Reports the seconds spent inside to ``add``."""
    began = time.monotonic()
    try:
        yield
    finally:
        add(time.monotonic() - began)


def _lock(lock, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        raise ConfigError(
            f"another run ({owner}) is writing to {path}; wait for it or take another --workdir"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
