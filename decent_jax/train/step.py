"""The training step: written once for one replica, compiled once per round.

`gradient` and `update` are one replica's step. `make_step` runs them on the replicas' devices.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from decent_jax import gossip, optim, replicas
from decent_jax.checkpoints.executables import NO_CACHE, ExecutableCache
from decent_jax.cpu.overlap import Parts, overlapped
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.pytree import PyTree
from decent_jax.replicas import Code, Placement, TrainState
from decent_jax.tasks import Task
from decent_jax.topology import Schedule
from decent_jax.train import xla
from decent_jax.train.delayed_step import Blocks, DelayedStep, loop_of
from decent_jax.train.settings import Config


class Resident(NamedTuple):
    """The batches of several steps, as indices into records that stay on the devices.

    records: (N, ...) arrays with all training records, replicated on every device.
    numbers: per step, (n, B) int32 indices of the records in each replica's batch.
    """

    records: PyTree
    numbers: PyTree


def learning_rate(config: Config, steps: int, warmup: int, drops: list[int]) -> optax.Schedule:
    """The learning rate as a function of the 0-based step; durations are in steps."""
    peak, name = config.learning_rate, config.lr_schedule.name
    if name == "cosine":
        return optim.linear_warmup_cosine_schedule(
            peak,
            min(warmup, steps),
            steps,
            start_factor=1 / max(warmup, 1),
            end=peak * config.lr_schedule.end_factor,
        )
    if name == "linear":
        return optim.linear_warmup_linear_schedule(
            peak, warmup, steps, end=peak * config.lr_schedule.end_factor
        )
    if name == "inverse_sqrt":
        return optim.inverse_sqrt_schedule(peak, max(warmup, 1))
    if name == "constant":
        drops = []
    return optim.linear_warmup_step_schedule(peak, warmup, drops, 0.1)


def init_state(
    config: Config, task: Task, tx: optax.GradientTransformation, placement: Placement
) -> TrainState:
    """The state before step 0, sharded over the mesh, with drawn or loaded parameters."""
    n, key = config.num_replicas, jax.random.key(config.seed)
    loaded = task.load_params()

    def rest_of(params: PyTree, model_state: PyTree):
        return TrainState(params, model_state, jax.vmap(tx.init)(params))

    @jax.jit
    def drawn():
        drawn = replicas.create(task.init, n, key, identical=config.same_init)
        return placement.place_all(rest_of(*drawn))

    @jax.jit
    def from_loaded(params: PyTree):
        _, model_state = replicas.create(task.init, n, key)
        return placement.place_all(rest_of(replicas.broadcast(params, n), model_state))

    return drawn() if loaded is None else from_loaded(jax.device_put(loaded, placement.replicated))


def gradient(
    loss_of: Code,
    micro_batches: int,
    params: PyTree,
    model_state: PyTree,
    batch: PyTree,
    key: jax.Array,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Loss, new model state and gradient of one replica, from micro-batches in sequence.

    Args:
      loss_of: ``(params, model_state, batch, key) -> (loss, model_state)``.
      micro_batches: m, the number of micro-batches; loss and gradient are the means over them.
      params: one replica's parameters.
      model_state: one replica's model state, which passes from each micro-batch to the next.
      batch: leaves of shape (B, ...), B a multiple of m.
      key: random key of this step and replica.
    """

    def checked(params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array):
        loss, after = loss_of(params, model_state, batch, key)
        _check_kept(model_state, after)
        return loss, after

    value_and_grad = jax.value_and_grad(checked, has_aux=True)
    if micro_batches == 1:
        (loss, model_state), grads = value_and_grad(params, model_state, batch, key)
        return loss, model_state, grads

    def in_parts(x: PyTree):
        """(B, ...) as (m, B / m, ...). Part k has the examples k, k + m, ..., so devices that share
        a replica's batch also share each part."""
        return x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1)

    def add_part(carry: PyTree, part: PyTree):
        model_state, total, k = carry
        (loss, model_state), grads = value_and_grad(
            params, model_state, part, jax.random.fold_in(key, k)
        )
        total = jax.tree.map(lambda a, g: a + g / micro_batches, total, (loss, grads))
        return (model_state, total, k + 1), None

    # Zeros computed from the arguments vary over the replicas like the gradients.
    zero = jax.tree.map(lambda x: x * 0, params)
    loss = jax.tree.leaves(zero)[0].sum().astype(jnp.float32)
    carry, _ = jax.lax.scan(add_part, (model_state, (loss, zero), 0), jax.tree.map(in_parts, batch))
    model_state, (loss, grads), _ = carry
    return loss, model_state, grads


def _check_kept(before: PyTree, after: PyTree) -> None:
    """Refuse a loss that changes the names, shapes or dtypes of the model state's arrays."""

    def kinds(tree: PyTree) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path({"model_state": tree})
        arrays = (
            (jax.tree_util.keystr(path), jnp.shape(x), jnp.result_type(x)) for path, x in leaves
        )
        return {name: f"{dtype} of shape {shape}" for name, shape, dtype in arrays}

    passed, returned = kinds(before), kinds(after)
    for name in passed | returned:
        was, is_now = passed.get(name, "missing"), returned.get(name, "missing")
        if was != is_now:
            raise ConfigError(
                f"the task's loss returns {name} as {is_now}, and was given {was}; it must keep "
                "the shape and dtype of every array"
            )


def update(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    opt_state: PyTree,
    loss: jax.Array,
    grads: PyTree,
    rnd: int | None,
    mixed: PyTree = None,
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """Parameters, optimizer state and metrics of one replica after its update.

    Args:
      tx: the method.
      params: one replica's parameters.
      opt_state: its `decent_jax.optim.GuardedState`.
      loss: () float32.
      grads: the gradient, with the structure of ``params``.
      rnd: the schedule's round; None: a step without communication.
      mixed: the result of the round if it has already run; see `decent_jax.optim.Method`.
    """
    early = {} if mixed is None else {"mixed": mixed}
    change, opt_state = tx.update(grads, opt_state, params, round=rnd, value=loss, **early)
    params = optim.apply_updates(params, change)
    metrics = {
        "loss": loss,
        "grad_norm": optax.tree.norm(grads),
        "skipped": opt_state.skipped,
        "failing": opt_state.failing,
    }
    return params, opt_state, metrics


def make_step(
    config: Config,
    task: Task,
    tx: optim.Method,
    rate: optax.Schedule,
    schedule: Schedule,
    placement: Placement,
    cache: ExecutableCache = NO_CACHE,
) -> Any:
    """``step(state, batch, t, round=r) -> (state, metrics)``, jitted, with a static round.

    ``batch`` leaves are (n, B, ...), ``t`` the 0-based step (int32 scalar); the state is donated. A
    peer passes ``t`` as (2,): the step, and the peer's replica index, which selects its random
    numbers.

    Metrics are per replica, (n,): ``loss``, ``grad_norm``, ``skipped``, ``failing``; and
    ``learning_rate``, (). On CPU hosts, messages overlap the computation
    (`decent_jax.cpu.overlap`), in programs that come from ``cache``.

    With a `Resident` batch, one call makes several steps and returns a list of their metrics. So
    does a call with a round of `decent_jax.optim.Delayed`, which takes a tuple of ``delay`` batches
    and makes as many steps from t on (`decent_jax.train.delayed_step`).
    """
    key = jax.random.key(config.seed + 1)
    on_device = DeviceStep(config, task, tx, rate, schedule, placement, key)
    rows, options = P("replica"), xla.options_of_step(placement, schedule, tx)

    @partial(jax.jit, static_argnames="round", donate_argnums=0, compiler_options=options)
    def step(state: PyTree, batch: PyTree, t: jax.Array, *, round: int | None):
        of_batch = Resident(P(), rows) if isinstance(batch, Resident) else rows
        run = partial(on_device.run, rnd=round)
        run = placement.on_devices(run, (rows, of_batch, P()), rows)
        return on_device.with_rate(run(state, batch, t), t)

    return overlapped(step, on_device.parts(), placement, options, cache.get)


class DeviceStep(NamedTuple):
    """The step of the replicas on one device, and the parts of it that a message can overlap.

    key: base of the random keys of all steps and replicas. Other fields: see `make_step`.
    """

    config: Config
    task: Task
    tx: optim.Method
    rate: optax.Schedule
    schedule: Schedule
    placement: Placement
    key: jax.Array

    def run(self, state: TrainState, batch: PyTree, t: jax.Array, *, rnd: int | None) -> PyTree:
        """State and metrics after a step, or after all steps of a `Resident` or delayed message."""
        if isinstance(batch, Resident):
            return self.resident(state, batch, t)
        if rnd is not None and self.delayed is not None:
            local_step = partial(self.run, rnd=None)
            return self.delayed.in_one_program(state, batch, t, rnd, local_step)
        return self.finish_all(state, self.gradients(*state[:2], batch, t), rnd=rnd)

    @property
    def delayed(self) -> DelayedStep | None:
        """The method's delayed messages; None if a message belongs to a single step."""
        if self.tx.delayed is None:
            return None
        return DelayedStep(self.tx.delayed, self.schedule, self.placement, self.task.mixes_state)

    def gradients(self, params: PyTree, model_state: PyTree, batch: PyTree, t: jax.Array) -> PyTree:
        """Losses, model states and gradients of this device's replicas, (block, ...)."""
        step, first = (t, None) if t.ndim == 0 else t

        def of_replica(params: PyTree, model_state: PyTree, batch: PyTree, replica: jax.Array):
            replica = replica if first is None else first + replica
            rng = jax.random.fold_in(jax.random.fold_in(self.key, step), replica)
            cuts = self.config.micro_batches
            return gradient(self.task.loss, cuts, params, model_state, batch, rng)

        with jax.named_scope("forward_backward"):
            loop = self.config.mesh.sequential_replicas
            run = self.placement.per_replica_alone(of_replica, loop=loop)
            return run(params, model_state, batch, self.placement.replica_ids())

    def finish_all(self, state: TrainState, *results: PyTree, rnd: int | None) -> PyTree:
        """State and metrics of all replicas of the device, see `finish`."""
        return self.placement.per_replica(partial(self.finish, rnd=rnd))(state, *results)

    @jax.named_scope("update")
    def finish(
        self, state: TrainState, results: PyTree, mixed: PyTree = None, *, rnd: int | None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """State and metrics of one replica, from its loss, model state and gradient."""
        loss, model_state, grads = results
        params, opt_state, metrics = update(
            self.tx, state.params, state.opt_state, loss, grads, rnd, mixed
        )
        if self.task.mixes_state and self.config.algorithm == "all_reduce":
            model_state = gossip.mean(model_state, self.placement.axis_name)
        elif self.task.mixes_state:
            model_state = gossip.mix(model_state, self.schedule, rnd, self.placement.axis_name)
        return TrainState(params, model_state, opt_state), metrics

    def resident(self, state: TrainState, batch: Resident, t: jax.Array) -> PyTree:
        """The state after the steps of a `Resident`, and a list of their metrics."""
        cycle = [rnd for rnd, _ in Blocks.of(self.config, self.schedule, self.tx).cycle()]
        rounds = list(dict.fromkeys(cycle))
        at = jnp.array([rounds.index(rnd) for rnd in cycle])

        def step(state: TrainState, numbers: PyTree, t: jax.Array):
            taken = jax.tree.map(lambda x: jnp.take(x, numbers, axis=0, mode="clip"), batch.records)
            results = self.gradients(*state[:2], taken, t)
            each = [partial(self.finish_all, rnd=rnd) for rnd in rounds]
            return jax.lax.switch(at[t % len(cycle)], each, state, results)

        return loop_of(step, state, batch.numbers, t)

    def parts(self) -> Parts | None:
        """The step for `decent_jax.cpu.overlap`; None if its messages depend on the gradient."""
        if self.delayed is not None:
            return self.delayed.parts(partial(self.run, rnd=None), self.with_rate)
        early = self.tx.early
        if early is None:
            return None

        def split(state: PyTree):
            return (state.params, state.model_state), (state.params, state.opt_state)

        def compute(own: PyTree, batch: PyTree, t: jax.Array):
            params, model_state = own
            return self.gradients(params, model_state, batch, t), None

        def send(outgoing: PyTree, rnd: int | None):
            def mixed(params: PyTree, opt_state: PyTree) -> PyTree:
                return early(params, opt_state, rnd)

            return self.placement.per_replica(mixed)(*outgoing)

        def apply(outgoing: PyTree, results: PyTree, mixed: PyTree, _: PyTree, rnd: int | None):
            params, opt_state = outgoing
            return self.finish_all(TrainState(params, None, opt_state), results, mixed, rnd=rnd)

        return Parts(split, compute, send, apply, self.with_rate)

    def with_rate(self, result: PyTree, t: jax.Array) -> PyTree:
        """The result of `run` on all devices, with the learning rate in its metrics."""
        state, metrics = result
        first = t if t.ndim == 0 else t[0]

        def added(metrics: PyTree, t: jax.Array):
            return metrics | {"learning_rate": jnp.asarray(self.rate(t), jnp.float32)}

        if isinstance(metrics, list):
            of_steps = enumerate(list[PyTree](metrics))  # pyright: ignore
            metrics = [added(of_step, first + k) for k, of_step in of_steps]
        else:
            metrics = added(metrics, first)
        return self.placement.place_all(state), metrics
