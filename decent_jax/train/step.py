"""The training step: written once for one replica, compiled once a round."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from decent_jax import gossip, optim, replicas
from decent_jax.cpu import overlap
from decent_jax.replicas import Placement
from decent_jax.tasks import Task
from decent_jax.topology import Schedule
from decent_jax.train import compiler_options
from decent_jax.train.split import split


class TrainState(NamedTuple):
    """Everything a step changes; every leaf has the leading replica dimension (n, ...)."""

    params: Any
    model_state: Any
    opt_state: Any
    ema: Any  # moving average of the replica's own params, or None


def learning_rate(config: ConfigDict, steps: int, warmup: int, drops: list[int]) -> optax.Schedule:
    """The learning rate of a 0-based step; durations are in steps."""
    peak, name = config.learning_rate, config.lr_schedule.name
    if name == "cosine":
        return optim.linear_warmup_cosine_schedule(
            peak,
            min(warmup, steps),
            steps,
            start_factor=1 / max(warmup, 1),
            end=peak * config.lr_schedule.end_factor,
        )
    if name == "inverse_sqrt":
        return optim.inverse_sqrt_schedule(peak, max(warmup, 1))
    if name == "constant":
        drops = []
    return optim.linear_warmup_step_schedule(peak, warmup, drops, config.lr_schedule.drop_factor)


def init_state(
    config: ConfigDict, task: Task, tx: optax.GradientTransformation, placement: Placement
) -> TrainState:
    """The state before step 0, sharded over the mesh."""
    n, key = config.num_replicas, jax.random.key(config.seed)
    loaded = task.load_params()

    def rest_of(params, model_state):
        ema = params if config.eval.ema_decay else None
        return TrainState(params, model_state, jax.vmap(tx.init)(params), ema)

    @jax.jit
    def drawn():
        drawn = replicas.create(task.init, n, key, identical=config.identical_start)
        return placement.place_all(rest_of(*drawn))

    @jax.jit
    def given(params):
        _, model_state = replicas.create(task.init, n, key)
        return placement.place_all(rest_of(replicas.broadcast(params, n), model_state))

    return drawn() if loaded is None else given(jax.device_put(loaded, placement.replicated))


def make_step(
    config: ConfigDict,
    task: Task,
    tx: optax.GradientTransformationExtraArgs,
    rate: optax.Schedule,
    schedule: Schedule,
    placement: Placement,
):
    """``step(state, batch, t, round=r) -> (state, metrics)``, jitted, with a static round.

    ``batch`` leaves are (n, B, ...), ``t`` the 0-based step (int32 scalar); the state is donated.
    Metrics are per replica, (n,): ``loss``, ``grad_norm``, ``skipped``, ``failing``; and
    ``learning_rate``. Where `overlap.needed` it is an `overlap.Step`.
    """
    key = jax.random.key(config.seed + 1)
    value_and_grad = jax.value_and_grad(task.loss, has_aux=True)

    def in_parts(x):
        """(B, ...) to (m, B / m, ...), part k the examples k, k + m, ...: where the devices of a
        replica share its examples they also share those of each part."""
        return x.reshape(-1, config.micro_batches, *x.shape[1:]).swapaxes(0, 1)

    def gradient(params, model_state, batch, replica, t):
        """Mean loss and gradient over the micro-batches of one replica."""
        rng = jax.random.fold_in(jax.random.fold_in(key, t), replica)
        if config.micro_batches == 1:
            (loss, model_state), grads = value_and_grad(params, model_state, batch, rng)
            return loss, model_state, grads
        parts = jax.tree.map(in_parts, batch)

        def one(carry, part):
            model_state, total, k = carry
            (loss, model_state), grads = value_and_grad(
                params, model_state, part, jax.random.fold_in(rng, k)
            )
            total = jax.tree.map(lambda a, g: a + g / config.micro_batches, total, (loss, grads))
            return (model_state, total, k + 1), None

        # Zeros made of the arguments vary over the replicas as the gradients do.
        zero = jax.tree.map(lambda x: x * 0, params)
        loss = jax.tree.leaves(zero)[0].sum().astype(jnp.float32)
        carry, _ = jax.lax.scan(one, (model_state, (loss, zero), 0), parts)
        model_state, (loss, grads), _ = carry
        return loss, model_state, grads

    def update(early, late, round):
        """One replica's params, opt_state, ema and metrics.

        ``early`` is known when the gradient is, ``late`` when the messages have arrived too.
        """
        loss, grads, opt_state = early
        params, ema, mixed = late
        given = {} if mixed is None else {"mixed": mixed}
        updates, opt_state = tx.update(grads, opt_state, params, round=round, value=loss, **given)
        params = optim.apply_updates(params, updates)
        if ema is not None:
            decay = config.eval.ema_decay
            ema = jax.tree.map(
                lambda e, p: jnp.where(jnp.isfinite(p), decay * e + (1 - decay) * p, e), ema, params
            )
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "skipped": opt_state.skipped,
            "failing": opt_state.failing,
        }
        return params, opt_state, ema, metrics

    def parts_of_update(params):
        """`update` as what comes before the messages have arrived, and after; see `split`."""
        like_params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        early = jnp.float32(0), like_params, jax.eval_shape(tx.init, params)
        late = like_params, like_params if config.eval.ema_decay else None, like_params
        return split(functools.partial(update, round=0), early, late)

    def new_state(model_state, updated, round):
        """One replica's `TrainState` and metrics."""
        params, opt_state, ema, metrics = updated
        if task.mixes_state and config.algorithm == "all_reduce":
            model_state = gossip.mean(model_state, placement.axis_name)
        elif task.mixes_state:
            model_state = gossip.mix(model_state, schedule, round, placement.axis_name)
        return TrainState(params, model_state, opt_state, ema), metrics

    def gradient_on_device(state, batch, t):
        ids = placement.replica_ids()
        with jax.named_scope("forward_backward"):
            one = placement.per_replica_alone(
                lambda *args: gradient(*args, t), loop=config.mesh.loop
            )
            return one(state.params, state.model_state, batch, ids)

    def on_device(state, batch, t, *, round):
        def whole(state, loss, model_state, grads):
            early = loss, grads, state.opt_state
            updated = update(early, (state.params, state.ema, None), round)
            return new_state(model_state, updated, round)

        results = gradient_on_device(state, batch, t)
        with jax.named_scope("update"):
            return placement.per_replica(whole)(state, *results)

    def mix_on_device(params, count, *, round):
        return placement.per_replica(lambda *args: tx.mix(*args, round))(params, count)

    def begin_on_device(inner, state, batch, t):
        def first(inner, state, loss, model_state, grads):
            before, _ = parts_of_update(state.params)
            return model_state, before((loss, grads, state.opt_state._replace(inner=inner)))

        results = gradient_on_device(state, batch, t)
        with jax.named_scope("update"):
            return placement.per_replica(first)(inner, state, *results)

    def finish_on_device(state, results, ema, mixed, *, round):
        def second(state, model_state, kept, ema, mixed):
            _, after = parts_of_update(state.params)
            updated = after(kept, (state.params, ema, mixed))
            return new_state(model_state, updated, round)

        with jax.named_scope("update"):
            return placement.per_replica(second)(state, *results, ema, mixed)

    stacked = P("replica")
    check_vma = gossip.allows_check_vma(schedule) or config.algorithm == "all_reduce"

    def on_devices(body, *in_specs, check_vma=check_vma, **static):
        body = functools.partial(body, **static)
        return placement.on_devices(body, in_specs, stacked, check_vma)

    def finished(state, metrics, t):
        state = placement.place_all(state)
        return state, {**metrics, "learning_rate": jnp.asarray(rate(t), jnp.float32)}

    options = compiler_options.of_step(placement, schedule, tx)

    @functools.partial(jax.jit, static_argnames="round", donate_argnums=0, compiler_options=options)
    def step(state, batch, t, *, round):
        run = on_devices(on_device, stacked, stacked, P(), round=round)
        return finished(*run(state, batch, t), t)

    if not overlap.needed(tx, placement):
        return step

    @functools.partial(jax.jit, static_argnames="round")
    def mix(params, count, *, round):
        return on_devices(mix_on_device, stacked, stacked, round=round)(params, count)

    # An update that is evaluated equation by equation has no types to be checked.
    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options)
    def begin(inner, state, batch, t):
        run = on_devices(begin_on_device, stacked, stacked, stacked, P(), check_vma=False)
        return run(inner, state, batch, t)

    @functools.partial(
        jax.jit, static_argnames="round", donate_argnums=(0, 1, 2, 3), compiler_options=options
    )
    def finish(state, results, ema, mixed, t, *, round):
        run = on_devices(finish_on_device, *[stacked] * 4, round=round, check_vma=False)
        return finished(*run(state, results, ema, mixed), t)

    return overlap.Step(step, mix, begin, finish, placement.stacked)
