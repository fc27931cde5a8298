"""The compiled programs of a stage: forward, backward with recomputation, and update.

Arrays are stacked over the replicas of this process, (L, ...). The state is stacked over all
replicas, (n, ...); one device holds the L rows of this process.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P

from decent_jax import gossip, replicas
from decent_jax.checkpoints import arrays
from decent_jax.gossip import codecs
from decent_jax.ground.json_files import Json
from decent_jax.ground.pytree import PyTree
from decent_jax.models import decoders
from decent_jax.models.pieces import cross_entropy
from decent_jax.optim import Method
from decent_jax.pipelines import Config
from decent_jax.pipelines.part import Part
from decent_jax.replicas import Placement, TrainState
from decent_jax.topology import Schedule
from decent_jax.train import step as step_lib
from decent_jax.train import xla

_MESSAGES = 2**30  # offset of the keys for rounding messages, which differ from those for dropout


class Stage:
    """One stage of the replicas of this process.

    One thread starts all programs in which replicas communicate, in the same order in all
    processes of a stage. On a CPU, these programs block the thread, while another thread computes.

    Attributes:
      state: a `TrainState` of this stage's parameters, (n, ...) over all replicas.
      forward: (params, borrowed, x, tokens, t, k) -> the message to the next stage, for
        micro-batch k of step t, with this process's rows, see `rows`. ``borrowed`` is {"wte": ...}
        if the stage borrows a table, else {}; ``x`` comes from the previous stage, None in the
        first; ``tokens`` (L, b, T + 1) are read in the first and the last stage.
      backward: (params, borrowed, x, tokens, total, dy, t, k) -> ``total``, which is donated, with
        micro-batch k added, and the message to the previous stage; ``dy`` comes from the next
        stage, None in the last.
      zeros: (params, borrowed) -> the initial ``total``: (L,) losses, and gradients of both trees.
      squares: gradients (L, ...) -> their sums of squares, (L,).
      evaluate: (params, borrowed, x, tokens, weights) of a single model, not stacked -> the message
        to the next stage; from the last stage, sums over a batch.

    Args:
      config: the run's config.
      schedule: the communication schedule.
      placement: all replicas and the devices of their processes.
      tx: the method, from `decent_jax.pipelines.part.method`.
      part: the stage's part of the model.
    """

    def __init__(
        self, config: Config, schedule: Schedule, placement: Placement, tx: Method, part: Part
    ):
        self.config, self.schedule, self.placement = config, schedule, placement
        self.part, self._tx, self._model = part, tx, part.task.config
        self._together = ThreadPoolExecutor(1, thread_name_prefix="replicas")
        self._codec = codecs.NAMED[config.pipeline.codec]
        self._micro_batches = config.pipeline.micro_batches
        self._key = jax.random.key(config.seed + 1)
        ids = np.array(placement.local_replicas, np.int32)
        rows = placement.per_replica_alone
        self.forward = partial(jax.jit(self._over_rows(self._forward_one)), ids)
        options = xla.options_of_step(placement, schedule, tx)
        backward = jax.jit(
            self._over_rows(self._backward_one), donate_argnums=5, compiler_options=options
        )
        self.backward = partial(backward, ids)
        self.zeros = jax.jit(
            lambda *trees: (jnp.zeros(len(ids), jnp.float32), jax.tree.map(jnp.zeros_like, trees))
        )
        self.squares = jax.jit(rows(lambda x: sum(jnp.vdot(g, g) for g in jax.tree.leaves(x))))
        self.evaluate = jax.jit(self._evaluate_one)
        self._start_programs()
        task: Any = part  # has all members of a task that are needed here
        self.state: TrainState = self._run(step_lib.init_state, config, task, tx, placement)

    # --- One step of the replicas -----------------------------------------------------------------

    def rows(self, tree: PyTree) -> PyTree:
        """This process's rows (L, ...) of stacked arrays (n, ...), on its device."""
        return jax.tree.map(lambda x: x.addressable_data(0), tree)

    def put(self, tree: PyTree) -> PyTree:
        """Host arrays (L, ...) of this process's rows as stacked arrays (n, ...)."""
        return self._all(jax.tree.map(jnp.array, tree))

    def begin_mix(self, rnd: int | None) -> "Future | None":
        """Start the messages of a round; None if there are none, or they need the gradient."""
        state, mix = self.state, self._mix
        if rnd is None or mix is None:
            return None
        return self._together.submit(mix, state.params, state.opt_state, rnd=rnd)

    def mean(self, loss: jax.Array, grads: PyTree) -> tuple[PyTree, PyTree]:
        """Loss and gradients (L, ...) averaged over all replicas, for ``all_reduce``."""
        return self.rows(self._run(self._mean, self._all((loss, grads))))

    def update(
        self,
        loss: np.ndarray,
        norm: np.ndarray,
        grads: PyTree,
        rnd: int | None,
        mixed: "Future | None",
    ) -> None:
        """Update all replicas.

        Args:
          loss: (L,) loss of each replica, over its batch.
          norm: (L,) norm of each replica's gradient, over all stages.
          grads: (L, ...) gradients of this stage.
          rnd: the schedule's round; None: a step without communication.
          mixed: the result of `begin_mix`.
        """
        inputs = (*self.put((loss, norm)), self._all(grads))
        message = None if mixed is None else mixed.result()
        rnd = rnd if message is None else 0  # one program for all rounds
        self.state = self._run(self._update, self.state, message, *inputs, rnd=rnd)

    def skipped(self) -> tuple[np.ndarray, np.ndarray]:
        """(L,) updates that each replica has rejected: in total, and consecutively up to now."""
        state = self.state.opt_state
        skipped, failing = self.rows((state.skipped, state.failing))
        return np.asarray(skipped), np.asarray(failing)

    def consensus(self) -> np.ndarray:
        """(2,) squares of this stage: mean_i ||x_i - mean||^2, ||mean||^2."""
        consensus = self._run(self._distance, self.state.params)
        distance, relative = (np.asarray(x.addressable_data(0), float) for x in consensus)
        norm = distance / relative if relative else 0.0
        return np.square(np.array([distance, norm]))

    def consensus_model(self) -> PyTree:
        """The mean of all replicas' parameters, without replica dimension."""
        return self.rows(self._consensus_model())

    # --- Its part of a checkpoint -----------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the stage's part of a checkpoint."""
        return f"{arrays.STAGE}{self.part.stage}"

    def save(self, writer: ocp.StandardCheckpointer, draft: Path) -> dict[str, int]:
        """Start to write the state; see `decent_jax.checkpoints.arrays.begin`."""
        return self._run(arrays.begin, writer, draft, self.name, arrays.tree_of(self.state))

    def save_model(self, writer: ocp.StandardCheckpointer, draft: Path) -> dict[str, int]:
        """Start to write the mean of all replicas."""
        model = {"params": self._consensus_model(), "model_state": {}}
        return self._run(arrays.begin, writer, draft, self.name, model)

    def restore(self, checkpoint: Path, meta: Json) -> None:
        """Restore the stage's arrays from a checkpoint of any number of stages and replicas."""
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.state)
        source = checkpoint, meta, like, self.placement, self.config.optimizer.accum_steps
        self.state = self._run(arrays.restore, *source)

    def _consensus_model(self) -> PyTree:
        return self._run(self._consensus, self.state.params)

    # --- Code of one replica ----------------------------------------------------------------------

    def _over_rows(self, fn):
        """Map the code ``fn`` of one replica over the rows; t and k are the same for all rows."""

        def run(ids, *args):
            *stacked, t, k = args

            def of_replica(replica, *own):
                return fn(self._rng(t, k, replica), replica, *own)

            return self.placement.per_replica_alone(of_replica)(ids, *stacked)

        return run

    def _rng(self, t, k, replica):
        """The random key, as in a run without stages, where `step.gradient` splits the batch."""
        key = jax.random.fold_in(jax.random.fold_in(self._key, t), replica)
        return key if self._micro_batches == 1 else jax.random.fold_in(key, k)

    def _output(self, params, borrowed, x, tokens, rng=None):
        """Hidden vectors for the next stage, or in the last stage the losses (b, T)."""
        part = self.part
        model = decoders.merge(self._model, {**params, **borrowed}, part.start, part.stop)
        x = model.begin(tokens[:, :-1], rng) if part.is_first else x
        x = model.blocks(x, rng)
        if not part.is_last:
            return x
        return cross_entropy(model.logits(model.ln_f(x)), tokens[:, 1:])

    def _forward_one(self, rng, replica, params, borrowed, x, tokens):
        y = self._output(params, borrowed, self._decoded(x), tokens, rng)
        return self._encoded(y, rng, 0, replica)

    def _backward_one(self, rng, replica, params, borrowed, x, tokens, total, dy):
        is_last = self.part.is_last

        def output(params, borrowed, x):
            y = self._output(params, borrowed, x, tokens, rng)
            return y.mean() if is_last else y

        y, pull_back = jax.vjp(output, params, borrowed, self._decoded(x))
        *grads, dx = pull_back(jnp.ones_like(y) if is_last else self._decoded(dy))
        new = (y if is_last else jnp.zeros((), jnp.float32)), tuple(grads)
        total = jax.tree.map(lambda sums, g: sums + g / self._micro_batches, total, new)
        if self.part.is_first:
            return total, None
        return total, self._encoded(dx, rng, 1, replica)

    def _encoded(self, x, rng, way, replica):
        if self._codec is None:
            return (x,)
        key = jax.random.fold_in(rng, _MESSAGES + 2 * self.part.stage + way)
        noise = self._codec.noise(jax.random.fold_in(key, replica), x.shape)
        return self._codec.encode(x.astype(jnp.float32), noise)

    def _decoded(self, message):
        if message is None:
            return None
        if self._codec is None:
            return message[0]
        like = jax.ShapeDtypeStruct(message[0].shape, self._model.dtype)
        return self._codec.decode(message, like)

    def _evaluate_one(self, params, borrowed, x, tokens, weights):
        y = self._output(params, borrowed, x, tokens)
        if not self.part.is_last:
            return y
        return (y.mean(axis=1) * weights).sum(), weights.sum()

    # --- Programs of all replicas -----------------------------------------------------------------

    def _run(self, program, *args, **static) -> PyTree:
        """Run a program of all replicas in their common thread; returns its result."""
        return self._together.submit(program, *args, **static).result()

    def _start_programs(self) -> None:
        placement, rows = self.placement, P("replica")
        tx, axis, clip = self._tx, placement.axis_name, self.config.optimizer.clip_norm

        def program(fn, count, **options):
            """A jitted program of one replica's code ``fn`` with ``count`` arguments."""

            @partial(jax.jit, static_argnames="rnd", **options)
            def run(*args, rnd=None):
                body = placement.per_replica(partial(fn, rnd=rnd))
                return placement.on_devices(body, (rows,) * count, rows)(*args)

            return run

        def update(state, mixed, loss, norm, grads, *, rnd):
            if clip:  # as optax.clip_by_global_norm
                grads = jax.tree.map(lambda g: jnp.where(norm < clip, g, g / norm * clip), grads)
            value = jnp.where(jnp.isfinite(norm), loss, jnp.nan)  # rejected by all stages
            inputs = tx, state.params, state.opt_state, value, grads, rnd
            params, opt_state, _ = step_lib.update(*inputs, mixed)
            return state._replace(params=params, opt_state=opt_state)

        early = tx.early
        self._mix = program(lambda x, state, rnd: early(x, state, rnd), 2) if early else None
        self._mean = program(lambda x, rnd: gossip.mean(x, axis), 1)
        self._update = program(update, 5, donate_argnums=0)
        everywhere = placement.replicated
        self._distance = jax.jit(replicas.consensus_distance, out_shardings=everywhere)
        self._consensus = jax.jit(replicas.consensus_mean, out_shardings=everywhere)

    def _all(self, tree: PyTree) -> PyTree:
        """Rows (L, ...) of this process as stacked arrays (n, ...)."""
        placement = self.placement

        def put(x):
            shape = (placement.num_replicas, *x.shape[1:])
            return jax.make_array_from_single_device_arrays(shape, placement.stacked, [x])

        return jax.tree.map(put, tree)
