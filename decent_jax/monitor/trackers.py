"""Trackers of a run's metrics: TensorBoard, Weights & Biases, or your own class.

``config.log.trackers`` names them, comma-separated: ``"tensorboard,wandb"``. A tracker is a class
with the methods of `Tracker`. You name your own class by its path, such as
``"mypackage.logs.MyTracker"``, or ``"my_logs.MyTracker"`` for a ``my_logs.py`` next to the config
file, or by the name under which you `register` it.
"""

import importlib.util
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from decent_jax.ground.errors import ConfigError
from decent_jax.ground.extras import module_named
from decent_jax.ground.format import shorten
from decent_jax.ground.json_files import flat, plain, write_atomic


class Tracker(Protocol):
    """Receives the metrics of a run, in process 0.

    Training waits for each call. A tracker that raises is dropped with a message, and the run
    continues without it.
    """

    def __init__(self, workdir: Path, start_step: int):
        """Start, or resume after ``start_step``; steps after it will be logged again."""

    def log_hyperparameters(self, config: Mapping[str, object]) -> None:
        """Receive the config, ``{"model.layers": 12}``, once per session and before any row."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Receive numbers of a ``metrics.jsonl`` row; a step may recur with other names."""

    def log_summary(self, summary: Mapping[str, object]) -> None:
        """Receive ``summary.json``, nested, when a session ends, even if it was interrupted."""

    def finish(self) -> None:
        """End the session, for whatever reason."""


# Trackers by name; each is called with (workdir, start_step).
TRACKERS: dict[str, Callable[..., Tracker]] = {}


def register(name: str, tracker: Callable[..., Tracker]) -> None:
    """Register a tracker in this process.

    Args:
      name: its name in ``config.log.trackers``.
      tracker: a class with the methods of `Tracker`.
    """
    TRACKERS[name] = tracker


def named(names: str) -> dict[str, Callable[..., Tracker]]:
    """The tracker classes that ``config.log.trackers`` names, by name.

    Raises:
      ConfigError: there is no such class, it lacks a method, or its package is not installed.
    """
    stripped = map(str.strip, names.split(","))
    return {name: _find(name) for name in stripped if name}


def _find(name: str) -> Callable[..., Tracker]:
    tracker = TRACKERS.get(name)
    if tracker is None:
        path, _, last = name.rpartition(".")
        if not path:
            why = f"must be {', '.join(TRACKERS)}, or the dotted name of a class of your own"
            raise ConfigError.about("log.trackers", name, why)
        tracker = getattr(module_named(path, "log.trackers"), last, None)
    if not callable(tracker):
        raise ConfigError.about("log.trackers", name, "must name a class")
    for method in ("log_hyperparameters", "log", "log_summary", "finish"):
        if not callable(getattr(tracker, method, None)):
            raise ConfigError.about("log.trackers", name, f"must have a method {method!r}")
    package = getattr(tracker, "package", None)
    if package is not None and importlib.util.find_spec(package) is None:
        needs = f"needs {package} (pip install 'decent_jax[{name}]') or must be left out"
        raise ConfigError.about("log.trackers", name, needs)
    return cast(Callable[..., Tracker], tracker)


class Trackers:
    """All trackers of a run, combined into one that never raises.

    Args:
      makes: tracker classes by name.
      workdir, start_step: their arguments.
      say: callback for a message about each tracker that fails, which is then dropped.
    """

    def __init__(
        self,
        makes: Mapping[str, Callable[..., Tracker]],
        workdir: Path,
        start_step: int,
        say: Callable[[str], None],
    ):
        self._say, self._all = say, dict.fromkeys(makes)
        self._each(lambda name, _: self._all.update({name: makes[name](workdir, start_step)}))

    def log_hyperparameters(self, config: Mapping[str, object]) -> None:
        """See `Tracker`."""
        self._each(lambda _, tracker: tracker.log_hyperparameters(config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._each(lambda _, tracker: tracker.log(metrics, step))

    def log_summary(self, summary: Mapping[str, object]) -> None:
        """See `Tracker`."""
        self._each(lambda _, tracker: tracker.log_summary(summary))

    def finish(self) -> None:
        """See `Tracker`; a second call does nothing."""
        self._each(lambda _, tracker: tracker.finish())
        self._all.clear()

    def _each(self, call: Callable[[str, Any], None]) -> None:
        for name, tracker in list(self._all.items()):
            try:
                call(name, tracker)
            except Exception as error:  # the user's code may raise anything
                del self._all[name]
                what = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 200)
                self._say(f"log.trackers: {name} failed and gets no more rows ({what})")


# --- Included trackers ----------------------------------------------------------------------------


class TensorBoard:
    """Event files in ``workdir/tensorboard``."""

    package = "tensorboardX"

    def __init__(self, workdir: Path, start_step: int):
        from tensorboardX import SummaryWriter

        # purge_step hides points that an earlier session wrote past the resumed step.
        self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step + 1)

    def log_hyperparameters(self, config: Mapping[str, object]) -> None:
        """Write the config as text, next to the curves."""
        self._write("config", config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a point to each curve."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_summary(self, summary: Mapping[str, object]) -> None:
        """Write the summary as text."""
        self._write("summary", flat(summary))

    def finish(self) -> None:
        """Write pending events."""
        self._writer.close()

    def _write(self, name: str, entries: Mapping[str, object]) -> None:
        rows = "\n".join(f"| {key} | {value} |" for key, value in entries.items())
        self._writer.add_text(name, f"| | |\n|---|---|\n{rows}")


class WandB:
    """A run of Weights & Biases; a resumed run continues it."""

    package = "wandb"

    def __init__(self, workdir: Path, start_step: int):
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = workdir / "wandb_run_id.txt"
        if not id_file.exists():
            write_atomic(id_file, uuid.uuid4().hex.encode())
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "decent_jax"),
            name=workdir.resolve().name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(workdir),
        )

    def log_hyperparameters(self, config: Mapping[str, object]) -> None:
        """Set the run's config; a resumed run may have changed some of it."""
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a point to each curve."""
        self._run.log(dict(metrics), step=step)

    def log_summary(self, summary: Mapping[str, object]) -> None:
        """Set the run's summary."""
        self._run.summary.update(plain(summary))

    def finish(self) -> None:
        """Upload pending rows."""
        self._run.finish()


TRACKERS |= {"tensorboard": TensorBoard, "wandb": WandB}
