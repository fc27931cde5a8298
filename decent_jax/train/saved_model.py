"""The model of a finished or interrupted run.

>>> from decent_jax.train import saved_model
>>> model = saved_model.load("runs/quickstart")  # doctest: +SKIP
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from decent_jax import replicas, tasks
from decent_jax.checkpoints import arrays
from decent_jax.checkpoints.on_disk import BEST, FOLDER, first_whole, log
from decent_jax.ground.errors import CheckpointError, ConfigError, DataError
from decent_jax.ground.json_files import Json
from decent_jax.ground.pytree import PyTree
from decent_jax.train import config as config_lib
from decent_jax.train.evaluation import Evaluator


def load(workdir: str | Path, which: str = "last") -> Any:
    """The consensus model of a run, as its task's ``load`` returns it (a NamedTuple).

    Args:
      workdir: the run directory.
      which: ``"last"``, the consensus model of the newest checkpoint, or ``"best"``, the consensus
        model with the lowest validation loss.

    Raises:
      ConfigError: ``workdir`` holds no run, or its checkpoints or data cannot be read.
    """
    return TrainedRun(workdir, which).call("load", "be loaded")


class Saved(NamedTuple):
    """Arrays of a checkpoint, on the host."""

    params: PyTree
    model_state: PyTree  # such as the statistics of batch norm
    meta: Json

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.meta["step"]


class TrainedRun:
    """A run's config, and its checkpoint, read on demand; see `decent_jax.tasks.TrainedRun`.

    Args:
      workdir: the run directory.
      which: ``"last"`` or ``"best"``, see `load`.

    Raises:
      ConfigError: ``workdir`` holds no run.
    """

    def __init__(self, workdir: str | Path, which: str = "last"):
        self.workdir, self.which = Path(workdir), which
        self.config = config_lib.load_saved(workdir)

    def call(self, name: str, purpose: str, *args: object, **options: object) -> Any:
        """Call the function ``name`` of the run's task with this run and the arguments.

        Raises:
          ConfigError: the task has no such function ("cannot ``purpose``"), or the run's
            checkpoints or data cannot be read.
        """
        function = self.function(name, purpose)
        try:
            return function(self, *args, **options)
        except (DataError, CheckpointError) as error:
            raise ConfigError(str(error)) from None

    def function(self, name: str, purpose: str) -> Callable[..., Any]:
        """The function ``name`` of the run's task; raises ConfigError if there is none."""
        function = getattr(tasks.find(self.config.task), name, None)
        if function is None:
            raise ConfigError(
                f"{self.workdir} is a run of the task {self.config.task!r}, which cannot {purpose}"
            )
        return function

    @property
    def step(self) -> int:
        """See `decent_jax.tasks.TrainedRun`."""
        return self._restored.step

    @property
    def params(self) -> PyTree:
        """See `decent_jax.tasks.TrainedRun`."""
        return self._restored.params

    @property
    def model_state(self) -> PyTree:
        """See `decent_jax.tasks.TrainedRun`."""
        return self._restored.model_state

    @functools.cached_property
    def _restored(self) -> Saved:
        return restore_model(self.workdir, self.which)

    def evaluated_state(self, task: tasks.Task) -> PyTree:
        """See `decent_jax.tasks.TrainedRun`."""
        placement = replicas.place(self.config.num_replicas, jax.local_devices()[:1])
        evaluator = Evaluator(self.config, task, placement)
        return jax.device_get(evaluator.consensus_state(self.params, self.model_state))


def restore_model(workdir: str | Path, which: str) -> Saved:
    """One model of a run, without the replica dimension.

    Args:
      workdir: the run directory.
      which: ``"best"``, the consensus model with the lowest validation loss, or ``"last"``, the
        consensus model of the newest intact checkpoint.

    Raises:
      CheckpointError: there is no checkpoint, or none can be read.
    """

    def consensus(folder: Path, meta: Json):
        *stacked, weights = arrays.read(folder, meta, "params", "model_state", "weights")
        return jax.device_get(jax.jit(replicas.consensus_mean)(stacked, weights))

    best = which == "best"
    return _read(workdir, BEST, _models) if best else _read(workdir, FOLDER, consensus)


def load_replicas(workdir: str | Path, step: int | None = None) -> Saved:
    """All replicas' models (n, ...), from the checkpoint of ``step`` or else the newest intact one.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be read.
    """
    return _read(workdir, FOLDER, _models, step)


def _models(folder: Path, meta: Json) -> list[PyTree]:
    return arrays.read(folder, meta, "params", "model_state")


def _read(
    workdir: str | Path, name: str, read: Callable[[Path, Json], PyTree], step: int | None = None
) -> Saved:
    folder = Path(workdir).absolute() / name
    restored = first_whole(folder, read, log.warning, None if step is None else [step])
    if restored is None:
        of = "" if step is None else f" of step {step}"
        raise CheckpointError(
            f"{folder} holds no checkpoint{of}; train first, or name another --workdir"
        )
    (params, model_state), meta = restored
    return Saved(params, model_state, meta)
