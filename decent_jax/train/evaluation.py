"""Evaluation of the consensus model, and of replicas on their own; it changes no replica."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from decent_jax import replicas
from decent_jax.data import loader
from decent_jax.replicas import Placement
from decent_jax.tasks import Task


class Evaluator:
    """Evaluates on the task's validation source, every record once, shared over the devices."""

    def __init__(
        self, task: Task, placement: Placement, batch_size: int, max_batches: int, workers: int
    ):
        self.task, self.placement = task, placement
        self.batch_size, self.max_batches, self.workers = batch_size, max_batches, workers
        self.mean = jax.jit(replicas.consensus_mean, out_shardings=placement.replicated)
        stacked, everywhere = P("replica"), P()

        def consensus_on_device(params, model_state, batch, weights):
            # One row after the other: evaluation never needs more memory than one replica's batch.
            def one(row):
                return task.evaluate(params, model_state, *row)

            sums = jax.lax.map(one, (batch, weights))
            return jax.tree.map(lambda x: x.sum(axis=0)[None], sums)

        def moments_on_device(params, batch):
            sums = jax.lax.map(lambda row: task.moments(params, row), batch)
            return jax.tree.map(lambda x: x.sum(axis=0)[None], sums)

        def replicas_on_device(params, model_state, batch, weights):
            def one(own):
                return task.evaluate(*own, batch, weights)

            return jax.lax.map(one, (params, model_state))

        self._consensus = jax.jit(
            placement.on_devices(
                consensus_on_device,
                (everywhere, everywhere, stacked, stacked),
                stacked,
                check_vma=False,
            ),
            out_shardings=placement.stacked,
        )
        self._moments = jax.jit(
            placement.on_devices(
                moments_on_device, (everywhere, stacked), stacked, check_vma=False
            ),
            out_shardings=placement.stacked,
        )
        self._replicas = jax.jit(
            placement.on_devices(
                replicas_on_device,
                (stacked, stacked, everywhere, everywhere),
                stacked,
                check_vma=False,
            )
        )
        self._add = jax.jit(
            lambda total, sums: jax.tree.map(lambda a, b: a + b.sum(axis=0), total, sums),
            out_shardings=placement.replicated,
        )
        self._from_moments = jax.jit(
            lambda total, rows: task.from_moments(jax.tree.map(lambda x: x / rows, total)),
            out_shardings=placement.replicated,
        )
        self._add_stacked = jax.jit(lambda total, sums: jax.tree.map(jnp.add, total, sums))
        self._gather = jax.jit(lambda x: x, out_shardings=placement.replicated)

    def consensus(self, params, model_state) -> dict[str, float]:
        """Metrics of one model (params without the replica dimension), e.g. ``{"loss": 2.1}``."""
        model_state = self.consensus_state(params, model_state)
        with self._batches(self.placement.local_replicas) as batches:
            total = self._total(
                self._consensus(params, model_state, *self.placement.put(rows)) for rows in batches
            )
        return {name: float(value) for name, value in _averages(jax.device_get(total)).items()}

    def consensus_state(self, params, model_state):
        """The state to evaluate ``params`` with: ``model_state``, or what the task recomputes.

        It is recomputed on the same training batches at every evaluation.
        """
        count = getattr(self.task, "recompute_batches", 0)
        if not count:
            return model_state
        with self._train_batches() as batches:
            total = self._total(
                self._moments(params, self.placement.put(batch))
                for batch in itertools.islice(batches, count)
            )
        rows = count * self.placement.num_replicas
        return self._from_moments(total, float(rows))

    def each_replica(self, params, model_state) -> np.ndarray:
        """(n,) float: the loss of every replica's own model on the same records."""
        total = None
        with self._batches(None) as batches:
            for rows in batches:
                merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
                sums = self._replicas(params, model_state, *self._put_everywhere(merged))
                total = sums if total is None else self._add_stacked(total, sums)
        return np.asarray(_averages(jax.device_get(self._gather(total)))["loss"])

    def _total(self, parts):
        """The sum over the leading dimension of every part and over the parts."""
        total = None
        for sums in parts:
            if total is None:
                total = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), sums)
            total = self._add(total, sums)
        return total

    def _train_batches(self):
        return loader.train_batches(
            self.task.train_source,
            seed=0,
            num_replicas=self.placement.num_replicas,
            batch_size=self.batch_size,
            replicas=self.placement.local_replicas,
            workers=self.workers,
        )

    def _batches(self, local_replicas: list[int] | None):
        return loader.eval_batches(
            self.task.eval_source,
            num_replicas=self.placement.num_replicas,
            batch_size=self.batch_size,
            max_batches=self.max_batches,
            replicas=local_replicas,
            workers=self.workers,
        )

    def _put_everywhere(self, tree):
        replicated = self.placement.replicated
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(replicated, x), tree)


def _averages(sums: dict) -> dict:
    return {name: value / sums["count"] for name, value in sums.items() if name != "count"}
