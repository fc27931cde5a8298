"""The training step: written once for one replica, compiled once per round.

`gradient` and `update` are one replica's step. `make_step` runs them on the replicas' devices.
"""

from collections.abc import Callable
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
from decent_jax.replicas import Placement, TrainState
from decent_jax.tasks import Task
from decent_jax.topology import Schedule
from decent_jax.train import xla
from decent_jax.train.delayed_step import Blocks, DelayedStep, loop_of
from decent_jax.train.settings import Config


class Resident(NamedTuple):
    """The batches of several steps, of records that stay on the devices.

    records: (N, ...) arrays, all of them on every device.
    numbers: (n, B) int32 for each step: which of them the replicas take.
    """

    records: Any
    numbers: tuple[jax.Array, ...]


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
    """The state before step 0, sharded over the mesh: drawn from the seed, or from the task."""
    n, key = config.num_replicas, jax.random.key(config.seed)
    loaded = task.load_params()

    def rest_of(params, model_state):
        return TrainState(params, model_state, jax.vmap(tx.init)(params))

    @jax.jit
    def drawn():
        drawn = replicas.create(task.init, n, key, identical=config.same_init)
        return placement.place_all(rest_of(*drawn))

    @jax.jit
    def given(params):
        _, model_state = replicas.create(task.init, n, key)
        return placement.place_all(rest_of(replicas.broadcast(params, n), model_state))

    return drawn() if loaded is None else given(jax.device_put(loaded, placement.replicated))


def gradient(
    loss_of: Callable, micro_batches: int, params: Any, model_state: Any, batch: Any, key: jax.Array
) -> tuple[jax.Array, Any, Any]:
    """Loss, model state and gradient of one replica, averaged over its micro-batches.

    Args:
      loss_of: ``(params, model_state, batch, key) -> (loss, model_state)``.
      micro_batches: m, sequential parts of the batch.
      params: of the replica.
      model_state: of the replica; each micro-batch gets that of the previous one.
      batch: leaves of shape (B, ...), B a multiple of m.
      key: of this step and replica.
    """

    def checked(params, model_state, batch, key):
        loss, after = loss_of(params, model_state, batch, key)
        _check_kept(model_state, after)
        return loss, after

    value_and_grad = jax.value_and_grad(checked, has_aux=True)
    if micro_batches == 1:
        (loss, model_state), grads = value_and_grad(params, model_state, batch, key)
        return loss, model_state, grads

    def in_parts(x):
        """(B, ...) to (m, B / m, ...), part k the examples k, k + m, ...: devices that share the
        examples of a replica also share those of each part."""
        return x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1)

    def add_part(carry, part):
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


def _check_kept(before: Any, after: Any) -> None:
    """Refuse a loss that returns another model state than it was given, by shapes and dtypes."""

    def kinds(tree):
        leaves = jax.tree_util.tree_leaves_with_path({"model_state": tree})
        found = (
            (jax.tree_util.keystr(path), jnp.shape(x), jnp.result_type(x)) for path, x in leaves
        )
        return {name: f"{dtype} of shape {shape}" for name, shape, dtype in found}

    given, returned = kinds(before), kinds(after)
    for name in given | returned:
        was, is_now = given.get(name, "missing"), returned.get(name, "missing")
        if was != is_now:
            raise ConfigError(
                f"the task's loss returns {name} as {is_now}, and was given {was}; a model state "
                "keeps its arrays"
            )


def update(
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    opt_state: Any,
    loss: jax.Array,
    grads: Any,
    rnd: int | None,
    mixed: Any = None,
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Parameters, optimizer state and metrics of one replica after its update.

    Args:
      tx: the method.
      params: of the replica.
      opt_state: a `decent_jax.optim.GuardedState`.
      loss: () float32.
      grads: like ``params``.
      rnd: of the schedule; None: a step without communication.
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
    tx: optax.GradientTransformationExtraArgs,
    rate: optax.Schedule,
    schedule: Schedule,
    placement: Placement,
    cache: ExecutableCache = NO_CACHE,
) -> Any:
    """``step(state, batch, t, round=r) -> (state, metrics)``, jitted, with a static round.

    ``batch`` leaves are (n, B, ...), ``t`` the 0-based step (int32 scalar); the state is donated.
    A peer, which is one of several replicas, passes (2,): the step, and its replica number, which
    then selects its random numbers.
    Metrics are per replica, (n,): ``loss``, ``grad_norm``, ``skipped``, ``failing``; and
    ``learning_rate``, (). On CPU hosts, messages overlap the computation
    (`decent_jax.cpu.overlap`), in programs that come from ``cache``.

    A `Resident` batch is several steps, each with the round of its step, and a list of metrics.

    With `decent_jax.optim.Delayed`, a round takes ``delay`` steps from t on with a tuple of
    their batches, and returns a list of their metrics (`decent_jax.train.delayed_step`).
    """
    key = jax.random.key(config.seed + 1)
    rows = P("replica")
    options = xla.options_of_step(placement, schedule, tx)
    method = optim.as_method(tx)
    delayed_step = None
    if method.delayed:
        delayed_step = DelayedStep(method.delayed, schedule, placement, task.mixes_state)

    def gradients(params, model_state, batch, t):
        """The step of the replicas on one device."""

        step, first = (t, None) if t.ndim == 0 else t

        def of_replica(params, model_state, batch, replica):
            replica = replica if first is None else first + replica
            rng = jax.random.fold_in(jax.random.fold_in(key, step), replica)
            return gradient(task.loss, config.micro_batches, params, model_state, batch, rng)

        with jax.named_scope("forward_backward"):
            run = placement.per_replica_alone(of_replica, loop=config.mesh.sequential_replicas)
            return run(params, model_state, batch, placement.replica_ids())

    @jax.named_scope("update")
    def finish(state, found, mixed=None, *, rnd):
        """State and metrics of one replica, from its loss, model state and gradient."""
        loss, model_state, grads = found
        params, opt_state, metrics = update(
            tx, state.params, state.opt_state, loss, grads, rnd, mixed
        )
        if task.mixes_state and config.algorithm == "all_reduce":
            model_state = gossip.mean(model_state, placement.axis_name)
        elif task.mixes_state:
            model_state = gossip.mix(model_state, schedule, rnd, placement.axis_name)
        return TrainState(params, model_state, opt_state), metrics

    def early_parts(early):
        def split(state):
            return (state.params, state.model_state), (state.params, state.opt_state)

        def compute(own, batch, t):
            params, model_state = own
            return gradients(params, model_state, batch, t), None

        def send(outgoing, rnd):
            return placement.per_replica(partial(early, round=rnd))(*outgoing)

        def apply(outgoing, found, mixed, _, rnd):
            params, opt_state = outgoing
            state = TrainState(params, None, opt_state)
            return placement.per_replica(partial(finish, rnd=rnd))(state, found, mixed)

        return Parts(split, compute, send, apply, with_rate)

    def several(state, batch, t):
        """Steps of resident records on one device."""
        cycle = [rnd for rnd, _ in Blocks.of(config, schedule, tx).cycle()]
        rounds = list(dict.fromkeys(cycle))
        at = jnp.array([rounds.index(rnd) for rnd in cycle])

        def one(state, numbers, t):
            taken = jax.tree.map(lambda x: jnp.take(x, numbers, axis=0, mode="clip"), batch.records)
            found = gradients(state.params, state.model_state, taken, t)
            each = [placement.per_replica(partial(finish, rnd=rnd)) for rnd in rounds]
            return jax.lax.switch(at[t % len(cycle)], each, state, found)

        return loop_of(one, state, batch.numbers, t)

    def on_device(state, batch, t, *, rnd):
        if isinstance(batch, Resident):
            return several(state, batch, t)
        if rnd is not None and delayed_step:
            local_step = partial(on_device, rnd=None)
            return delayed_step.in_one_program(state, batch, t, rnd, local_step)
        found = gradients(state.params, state.model_state, batch, t)
        return placement.per_replica(partial(finish, rnd=rnd))(state, found)

    def with_rate(result, t):
        state, metrics = result
        first = t if t.ndim == 0 else t[0]

        def added(metrics, t):
            return metrics | {"learning_rate": jnp.asarray(rate(t), jnp.float32)}

        if isinstance(metrics, list):
            metrics = [added(of_step, first + k) for k, of_step in enumerate(metrics)]
        else:
            metrics = added(metrics, first)
        return placement.place_all(state), metrics

    @partial(jax.jit, static_argnames="round", donate_argnums=0, compiler_options=options)
    def step(state, batch, t, *, round):
        of_batch: Any = rows
        if isinstance(batch, Resident):
            of_batch = batch._replace(records=P(), numbers=rows)
        run = placement.on_devices(partial(on_device, rnd=round), (rows, of_batch, P()), rows)
        return with_rate(run(state, batch, t), t)

    parts = early_parts(method.early) if method.early else None
    if delayed_step:
        parts = delayed_step.parts(partial(on_device, rnd=None), with_rate)
    return overlapped(step, parts, placement, options, cache.get)
