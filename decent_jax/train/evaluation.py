"""Evaluation of the consensus model; the replicas do not change."""

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from decent_jax import optim, replicas
from decent_jax.data import loader
from decent_jax.ground.pytree import PyTree
from decent_jax.replicas import Code, Placement, TrainState
from decent_jax.tasks import RecomputesState, Task
from decent_jax.train.settings import Config


class Model(NamedTuple):
    """One model; no leaf has a replica dimension."""

    params: PyTree
    model_state: PyTree


class Evaluator:
    """Evaluates models on the validation source, each record once, spread over the devices.

    Args:
      config: the run's config, for its ``eval`` section and batch size.
      task: model, loss and data.
      placement: the replicas and their devices.

    Attributes:
      pause: callback between two batches, called equally often in every process; it may raise.
    """

    def __init__(self, config: Config, task: Task, placement: Placement):
        self.pause: Callable[[], None] = lambda: None
        self.task, self.placement = task, placement
        self._config = config
        self.mean = jax.jit(replicas.consensus_mean, out_shardings=placement.replicated)
        self.distance = jax.jit(replicas.consensus_distance, out_shardings=placement.replicated)

        def run(on_device: Code, *specs: P):
            """Jitted; each device returns its part of a stacked array."""
            body = placement.on_devices(on_device, specs, P("replica"))
            return jax.jit(body, out_shardings=placement.stacked)

        def total(f: Callable[[PyTree], PyTree], rows: PyTree) -> PyTree:
            # Row by row, so that evaluation never needs more memory than one replica's batch does.
            return jax.tree.map(lambda x: x.sum(axis=0)[None], jax.lax.map(f, rows))

        def consensus_on_device(
            params: PyTree, model_state: PyTree, batch: PyTree, weights: PyTree
        ):
            return total(lambda row: task.evaluate(params, model_state, *row), (batch, weights))

        def replicas_on_device(params: PyTree, model_state: PyTree, batch: PyTree, weights: PyTree):
            everyone = jnp.arange(placement.num_replicas)

            def of_replica(own: PyTree):
                replica, *model = own
                sums = total(lambda row: task.evaluate(*model, *row), (batch, weights))
                # Each replica fills its own entry of (n,), so the sum over replicas has them all.
                return jax.tree.map(lambda x: jnp.where(everyone == replica, x, 0), sums)

            return jax.lax.map(of_replica, (placement.replica_ids(), params, model_state))

        def moments_on_device(params: PyTree, batch: PyTree):
            return total(lambda row: cast(RecomputesState, task).moments(params, row), batch)

        stacked, everywhere = P("replica"), P()
        self._consensus = run(consensus_on_device, everywhere, everywhere, stacked, stacked)
        self._replicas = run(replicas_on_device, stacked, stacked, everywhere, everywhere)
        self._moments = run(moments_on_device, everywhere, stacked)
        self._add = jax.jit(
            lambda total, sums: jax.tree.map(lambda a, b: a + b.sum(axis=0), total, sums),
            out_shardings=placement.replicated,
        )
        self._from_moments = jax.jit(
            lambda total, rows: cast(RecomputesState, task).from_moments(
                jax.tree.map(lambda x: x / rows, total)
            ),
            out_shardings=placement.replicated,
        )

    def model(self, state: TrainState) -> Model:
        """The consensus model."""
        weights = optim.consensus_weights(state.opt_state)
        return Model(*self.mean((state.params, state.model_state), weights))

    def row(self, state: TrainState) -> tuple[dict[str, float], Model]:
        """The ``eval/`` metrics of a step, and the consensus model to which they belong."""
        model = self.model(state)
        result = self.consensus(*model)
        if self._config.eval.replicas:
            result |= self.of_replicas(state)
        row = {f"eval/{name}": value for name, value in result.items()}
        score = getattr(self.task, "score", None)
        if score is not None:
            scores = score(local(model.params), self.pause)
            row |= {f"eval/{name}": value for name, value in scores.items()}
        distance = jax.device_get(self.distance(state.params))
        row["eval/consensus_distance"] = float(distance.distance)
        row["eval/consensus_distance_relative"] = float(distance.relative)
        return row, model

    def of_replicas(self, state: TrainState) -> dict[str, float]:
        """Metrics of individual replicas, such as ``top1_worst``, the lowest, and ``top1_mean``.

        The worst loss is the highest. Each replica is evaluated with its own model state.
        """
        with eval_batches(self._config, self.task, self.placement) as batches:
            sums = self._total(
                self._replicas(state.params, state.model_state, *self.placement.put(rows))
                for rows in batches
            )
        averages = _averages(jax.device_get(sums))
        worst = {name: x.max() if name == "loss" else x.min() for name, x in averages.items()}
        means = {f"{name}_mean": float(x.mean()) for name, x in averages.items()}
        return {f"{name}_worst": float(x) for name, x in worst.items()} | means

    def consensus(self, params: PyTree, model_state: PyTree) -> dict[str, float]:
        """Metrics of one model, without replica dimension, such as ``{"loss": 2.1}``."""
        model_state = self.consensus_state(params, model_state)
        with eval_batches(self._config, self.task, self.placement) as batches:
            total = self._total(
                self._consensus(params, model_state, *self.placement.put(rows)) for rows in batches
            )
        return {name: float(value) for name, value in _averages(jax.device_get(total)).items()}

    def consensus_state(self, params: PyTree, model_state: PyTree) -> PyTree:
        """The model state with which to evaluate ``params``: ``model_state``, or a recomputed one.

        The task recomputes it on the same training batches at every evaluation.
        """
        count = getattr(self.task, "recompute_batches", 0)
        if not count:
            return model_state
        train_batches = loader.train_batches(
            self.task.train_source,
            seed=0,
            num_replicas=self.placement.num_replicas,
            batch_size=self._config.eval.batch_size or self._config.batch_size,
            replicas=self.placement.local_replicas,
            workers=self._config.data.workers,
        )
        with train_batches as batches:
            total = self._total(
                self._moments(params, self.placement.put(batch))
                for batch in itertools.islice(batches, count)
            )
        rows = count * self.placement.num_replicas
        return self._from_moments(total, float(rows))

    def _total(self, parts: Iterable[PyTree]):
        """The sum of all parts, each summed over its leading dimension."""
        total: PyTree = None
        for sums in parts:
            if total is None:
                total = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), sums)
            else:
                jax.block_until_ready(total)  # this process is at most two batches ahead
            total = self._add(total, sums)
            self.pause()
        return total


def eval_batches(config: Config, task: Task, placement: Placement) -> loader.Batches:
    """The validation batches of this process's replicas."""
    return loader.eval_batches(
        task.eval_source,
        num_replicas=placement.num_replicas,
        batch_size=config.eval.batch_size or config.batch_size,
        max_batches=config.eval.batches,
        replicas=placement.local_replicas,
        workers=config.data.workers,
    )


def _averages(sums: dict[str, PyTree]) -> dict[str, PyTree]:
    return {name: value / sums["count"] for name, value in sums.items() if name != "count"}


def local(tree: PyTree) -> PyTree:
    """Replicated arrays as host arrays; random keys, which NumPy lacks, unchanged."""

    def on_host(x: jax.Array):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x.addressable_data(0) if is_key else np.asarray(x.addressable_data(0))

    return jax.tree.map(on_host, tree)
