"""Tasks: a model, its loss, its data and what a user sees of it, behind one interface.

A task module ``decent_jax.tasks.NAME`` has ``default_model()``, ``default_data()`` (ConfigDicts
for those sections of the config), ``validate(config)`` and ``make(config, workdir, announce)``,
which returns an object with the members of `Task`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax


class Task(Protocol):
    """What the trainer asks of a task. Everything is about one replica and knows no axis."""

    unit: str  # what throughput is counted in: "tokens" or "examples"
    units_per_example: int
    flops_per_example: float  # model FLOPs, forward and backward
    train_source: Any  # records by index, see decent_jax.data.loader
    eval_source: Any
    mixes_state: bool  # whether model_state is mixed in every round, like parameters
    init: Callable[[jax.Array], tuple[Any, Any]]  # key -> (params, model_state); jittable

    def load_params(self) -> Any | None:
        """Parameters to begin from (host arrays), or None to draw them with ``init``."""

    def loss(self, params, model_state, batch, key) -> tuple[jax.Array, Any]:
        """Mean loss of a batch (leading dimension B) and the new ``model_state``."""

    def evaluate(self, params, model_state, batch, weights) -> dict[str, jax.Array]:
        """Weighted sums over a batch: ``count``, and for each metric the sum it is averaged of."""

    def decay_mask(self, params) -> Any:
        """True for parameters that weight decay applies to."""

    def summary(self) -> dict:
        """What belongs in summary.json about the data and the model."""

    def demonstrate(self, params, model_state) -> str:
        """Something to look at when training has ended."""


class RecomputesState(Protocol):
    """A task may also have these: the consensus model's state is then made of training batches.

    Otherwise, or where ``recompute_batches`` is 0, it is the mean of the replicas' states.
    """

    recompute_batches: int

    def moments(self, params, batch) -> Any:
        """Of one batch; averaged over all rows of ``recompute_batches`` training batches."""

    def from_moments(self, moments) -> Any:
        """The ``model_state`` of such averages."""


class Measures(Protocol):
    """A task may also have some of these."""

    def measure(self, block) -> dict[str, float]:
        """Of a batch (n, ...) on the host; rows of metrics.jsonl have means of those just read."""

    def score(self, params) -> dict[str, float]:
        """Of the consensus model (host arrays), at every evaluation, on every process."""

    def test(self, params) -> dict:
        """Of the last consensus model (host arrays), ``test`` in summary.json; may take minutes."""
