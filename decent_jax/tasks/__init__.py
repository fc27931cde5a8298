"""Tasks: a model, its loss, its data and its commands, behind one interface.

A task is a module with the members of `TaskModule`, whose ``make`` returns a `Task`. A module in
this package needs an entry in `TASKS`. Your own module needs none: ``config.task`` may be its path,
such as ``"mypackage.chess"`` or ``"chess"`` for a ``chess.py`` next to the config file, or a name
from `register`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from decent_jax.ground import extras
from decent_jax.ground.pytree import PyTree

extras.need("train", "ml_collections")

from decent_jax.ground.errors import ConfigError
from decent_jax.ground.extras import module_named
from decent_jax.ground.fields import changeable, section, setting

if TYPE_CHECKING:
    import jax

Announce = Callable[[str], AbstractContextManager[None]]

TASKS: dict[str, Any] = {
    "language_modeling": "decent_jax.tasks.language_modeling",
    "image_classification": "decent_jax.tasks.image_classification",
    "translation": "decent_jax.tasks.translation",
}


@dataclass(frozen=True)
class TaskData:
    """The data settings of every task. A task's ``Data`` is a subclass that may add settings."""

    workers: int = changeable(0, "processes that read ahead; 0: threads", at_least=0)
    prefetch: int = changeable(4, "batches read ahead", at_least=0)
    on_device: bool = changeable(
        False, "read all training records once, onto the devices; several steps are one program"
    )
    partition: str = setting(
        "iid", "dirichlet: each replica has records drawn by label", choices=("iid", "dirichlet")
    )
    alpha: float = setting(1.0, "in dirichlet; small: few classes per replica", above=0)


@dataclass(frozen=True)
class NoModel:
    """The section ``model`` of a task without model settings."""


@dataclass(frozen=True)
class TaskConfig:
    """The part of a run's config that a task sees.

    A task's functions may annotate a subclass with the types of the task's ``model`` and ``data``.
    """

    task: str = setting("language_modeling", "the task: a module of decent_jax.tasks")
    seed: int = setting(0, "for initialization, dropout, data order", at_least=0, at_most=2**63 - 1)
    num_replicas: int = changeable(8, "number of models with their own parameters", at_least=1)
    batch_size: int = setting(
        64, "examples per step over all replicas; translation: tokens", at_least=1
    )
    micro_batches: int = setting(1, "sequential parts of a replica's batch", at_least=1)
    model: Any = section(NoModel)
    data: Any = section(TaskData)


def register(name: str, module: object) -> None:
    """Registers ``module`` for ``config.task = name``, in this process.

    Args:
      name: the name in configs.
      module: a module, its dotted path, or any object with the members of a `TaskModule`.
    """
    TASKS[name] = module


def find(name: str) -> TaskModule:
    """Returns the module of the task that a config names.

    Raises:
      ConfigError: there is no such module, or it lacks a member of `TaskModule`.
    """
    path = TASKS.get(name, name)
    if not isinstance(path, str):
        return _checked(path, name)
    if "." not in path and not (path.isidentifier() and importlib.util.find_spec(path)):
        why = (
            f"must be one of {', '.join(TASKS)}, or a module of your own, such as 'mytask' or "
            "'mypackage.mytask'"
        )
        raise ConfigError.about("task", name, why)
    return _checked(module_named(path, "task"), name)


def _checked(module: object, name: str) -> TaskModule:
    for member in ("validate", "make"):
        if not callable(getattr(module, member, None)):
            raise ConfigError.about("task", name, f"must have a function {member!r}")
    for part, kind in sections(module).items():
        base = TaskData if part == "data" else object
        settings = is_dataclass(kind) and all("field" in item.metadata for item in fields(kind))
        if not (settings and issubclass(kind, base)):
            derived = ", a subclass of decent_jax.tasks.TaskData" if base is TaskData else ""
            why = f"must have a {part.title()} that is a frozen dataclass of settings{derived}"
            raise ConfigError.about("task", name, why)
    return cast(TaskModule, module)


def sections(module: object) -> dict[str, type]:
    """The classes of the sections ``model`` and ``data`` in a task's configs."""
    return {"model": getattr(module, "Model", NoModel), "data": getattr(module, "Data", TaskData)}


def check_iid(config: TaskConfig) -> None:
    """Refuses a partition of data without labels."""
    if config.data.partition != "iid":
        why = f"must be 'iid' for {config.task}, whose records have no labels"
        raise ConfigError.about("data.partition", config.data.partition, why)


def impossible_model(config: TaskConfig, error: ValueError) -> ConfigError:
    """The ConfigError for a model's shape; the message of ``error`` starts with a field's name."""
    name = str(error).partition(" ")[0].rstrip(",")
    return ConfigError(
        f"model.{error}", field=f"model.{name}", value=getattr(config.model, name, None)
    )


class TaskModule(Protocol):
    """A module that defines a task.

    It may also define functions that the commands call with a `TrainedRun`:

    * ``load(run)`` returns the trained model with everything needed to use it.
    * ``export(run, out)`` writes the model to the file ``out`` and returns the text of its
      ``config.json``.
    * ``sample(run, ...)`` returns the output of `decent-jax sample`.
    * ``translator(run, beam)`` returns a function that translates a list of sentences.

    The planner calls ``count_parameters(config)``.
    """

    Model: type  # the section "model" of its configs, a frozen dataclass of settings
    Data: type  # the section "data", a subclass of `decent_jax.tasks.TaskData`

    def validate(self, config: TaskConfig) -> None:
        """Checks a config before anything compiles; raises ConfigError with field and value."""

    def make(self, config: TaskConfig, workdir: Path, announce: Announce) -> Task:
        """Returns the task; raises DataError for data that cannot be used."""
        ...


class Task(Protocol):
    """The trainer's interface to a task, written for one replica, without a replica axis.

    Subclasses inherit the defaults. A task may also have these functions:

    * ``measure(block)`` returns measurements of a host batch ``(L, B, ...)``, the rows of this
      process's L replicas. metrics.jsonl records the means from process 0, as a sample.
    * ``score(params, pause)`` returns scores of the consensus model ``params`` (host arrays). Every
      process calls it at every evaluation. Between batches, equally often in every process, it
      calls ``pause()``, in which a signal may end the run.
    * ``test(params)`` returns the scores of the final model, which summary.json records as
      ``test``. The call may take minutes.
    """

    unit: str  # unit of throughput: "tokens" or "examples"
    units_per_example: float
    flops_per_example: float  # model FLOPs, forward and backward
    train_source: Any  # records by index, see decent_jax.data.loader
    eval_source: Any
    mixes_state: bool = False  # whether every round mixes model_state, like the parameters

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Draws (params, model_state); jittable."""
        ...

    def load_params(self) -> PyTree | None:
        """Parameters to start from (host arrays), or None to draw them with ``init``."""
        return None

    def loss(
        self, params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Mean loss of a batch (leading dimension B) and the new ``model_state``."""
        ...

    def evaluate(
        self, params: PyTree, model_state: PyTree, batch: PyTree, weights: jax.Array
    ) -> dict[str, jax.Array]:
        """Weighted sums over a batch: ``count``, and for each metric the sum to divide by it."""
        ...

    def decay_mask(self, params: PyTree) -> PyTree:
        """The weight-decay mask: by default, True for matrices."""
        from decent_jax.models import pieces  # flax, which not every command needs

        return pieces.decay_mask(params)

    def summary(self) -> dict[str, object]:
        """Entries of summary.json about the data and the model."""
        ...

    def demonstrate(self, params: PyTree, model_state: PyTree) -> str:
        """Text to show after training, such as a sample; "" shows nothing."""
        return ""


class RecomputesState(Protocol):
    """Optional members that compute the consensus model's state from training batches.

    Without them, or if ``recompute_batches`` is 0, that state is the mean of the replicas' states.
    """

    recompute_batches: int

    def moments(self, params: PyTree, batch: PyTree) -> PyTree:
        """Moments of one batch, to be averaged over ``recompute_batches`` training batches."""

    def from_moments(self, moments: PyTree) -> PyTree:
        """The ``model_state`` that follows from averages of moments."""


class TrainedRun(Protocol):
    """A trained run, as `decent_jax.train.saved_model.TrainedRun` passes it to a task.

    Reading ``step``, ``params`` or ``model_state`` reads a checkpoint, and raises ConfigError if
    none is readable.
    """

    workdir: Path
    config: Any  # the run's config, with the task's sections
    which: str  # "last" or "best"

    @property
    def step(self) -> int:
        """The checkpoint's step."""
        ...

    @property
    def params(self) -> PyTree:
        """The consensus model: float32 host arrays without a replica dimension."""

    @property
    def model_state(self) -> PyTree:
        """The mean of the replicas' states, as host arrays."""

    def evaluated_state(self, task: Task) -> PyTree:
        """The state with which training evaluated the model; see `RecomputesState`."""
