"""What tests of methods share: how one is built, a step of it, and a whole run in one program.

Tests of all methods build them here, and look at what they keep here, so that another way to
declare methods changes one file of tests.
"""

import contextlib
from collections.abc import Mapping

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from decent_jax import gossip, optim
from decent_jax.cpu import gloo
from decent_jax.optim import METHODS, Parts

NAMES = tuple(METHODS)

# --- methods ------------------------------------------------------------------------------------


def parts_of(schedule, inner=None, learning_rate=0.1, **given):
    """What a method is built from; numbers of its own go into ``numbers``."""
    inner = optax.sgd(learning_rate) if inner is None else inner
    return Parts(schedule, learning_rate, inner, **given)


def build(name, schedule, inner=None, learning_rate=0.1, **given):
    """The method as a transformation; raises ValueError where it refuses the schedule."""
    return METHODS[name].build(parts_of(schedule, inner, learning_rate, **given))


def optimizers_of(name):
    """Local optimizers that a method works with, its default first."""
    return METHODS[name].optimizers


def message_bytes(name, params, *args, **given):
    """Bytes to one neighbour in a round; arguments as for `build`."""
    return METHODS[name].message_bytes(params, parts_of(*args, **given))


def bytes_sent(name, params, *args, **given):
    """Bytes per step; arguments as for `build`."""
    return METHODS[name].bytes_sent(params, parts_of(*args, **given))


def phases(name, numbers=None):
    """Rounds that a method treats differently."""
    return METHODS[name].phases({**METHODS[name].numbers, **(numbers or {})})


def own(state, name=None):
    """What the method itself keeps, or one entry of it."""
    state = state if hasattr(state, "own") else state[0]  # of `in_steps`
    return state.own if name is None else getattr(state.own, name)


def together(txs: Mapping) -> optax.GradientTransformationExtraArgs:
    """Several methods in one program, each with parameters of its own: {key: parameters}."""

    def init(params):
        return {key: tx.init(params[key]) for key, tx in txs.items()}

    def update(grads, state, params, **extra):
        both = {k: tx.update(grads[k], state[k], params[k], **extra) for k, tx in txs.items()}
        return {k: u for k, (u, _) in both.items()}, {k: s for k, (_, s) in both.items()}

    return optax.GradientTransformationExtraArgs(init, update)


def in_steps(tx, mix_every):
    """A method whose ``update`` takes every round; with a delay it keeps the outgoing arrays."""
    delayed = optim.as_method(tx).delayed
    if delayed is None:
        return tx

    def init(params):
        state = tx.init(params)
        return state, (params, state.own, state.count)

    def update(grads, state, params, *, round, **extra):
        state, outgoing = state
        departs = (state.count + delayed.delay) % mix_every == 0
        outgoing = optax.tree.where(departs, (params, state.own, state.count), outgoing)
        updates, state = tx.update(grads, state, params, round=None, **extra)
        if round is not None:
            x, late = optim.apply_updates(params, updates), outgoing[0]
            message = delayed.depart(*outgoing, round)
            x, own = delayed.arrive(x, state.own, late, message, round)
            updates = jax.tree.map(lambda new, old: new - old, x, params)
            state = state._replace(own=own)
        return updates, (state, outgoing)

    return optax.GradientTransformationExtraArgs(init, update)


# --- steps and layouts --------------------------------------------------------------------------


def step_of(tx, gradient, round, apply=optim.apply_updates, has_value=False):
    """``step(params, state, *data, **extra)`` of one replica; extra arguments are ``update``'s.

    ``gradient(params, *data)`` is a tree, or (loss, tree) with ``has_value``.
    """

    def step(params, state, *data, **extra):
        value, grads = gradient(params, *data) if has_value else (None, gradient(params, *data))
        updates, state = tx.update(grads, state, params, round=round, value=value, **extra)
        return apply(params, updates), state

    return step


def mesh_of(devices):
    return jax.make_mesh(
        (devices,), ("replica",), (AxisType.Auto,), devices=jax.devices()[:devices]
    )


def axis_of(form):
    """What counts replicas in a layout of `on_stack`."""
    return ("replica", "block") if form == "block" else "replica"


def on_stack(fn, form, n, devices=1, check_vma=None):
    """``fn`` of one replica's own trees as a jitted function of stacked trees.

    form: "vmap", all replicas on one device; "devices", one on each; "block", several on each.
    """
    if form == "vmap":
        return jax.jit(jax.vmap(fn, axis_name="replica"))
    if form == "devices":
        assert n == devices

        def body(*args):
            mine = jax.tree.map(lambda x: x[0], args)
            return jax.tree.map(lambda x: x[None], fn(*mine))

    else:
        body = jax.vmap(fn, axis_name="block")
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh_of(devices),
            in_specs=P("replica"),
            out_specs=P("replica"),
            check_vma=form == "devices" if check_vma is None else check_vma,
        )
    )


def matrices_of(schedule, steps, mix_every=1):
    """(steps, n, n) float64, the identity where a step does not mix."""
    rounds = (schedule.round_at(t, mix_every) for t in range(steps))
    eye = np.eye(schedule.num_replicas)
    return np.stack([eye if r is None else schedule.matrix(r) for r in rounds])


def simulated(tx, gradient, x, data, matrices):
    """Parameters after every step of several runs in one program: a tree of (runs, steps, n, ...).

    Matrices are data here; `test_gossip` proves that a round on devices is its matrix.

    Args:
      tx: a method on any schedule of n replicas.
      gradient: of one replica, from its parameters and its data in this step.
      x: (runs, n, ...) tree of the start.
      data: (steps, n, ...) tree, the same for all runs.
      matrices: (runs, steps, n, n).
    """

    def one_run(x, matrices):
        def step(carry, given):
            matrix, now = given
            one = step_of(tx, gradient, gossip.Simulated(0, matrix))
            carry = jax.vmap(one, axis_name="replica")(*carry, now)
            return carry, carry[0]

        return jax.lax.scan(step, (x, jax.vmap(tx.init)(x)), (matrices, data))[1]

    # One after the other: another `vmap` would take longer to trace than this takes to run.
    run = jax.jit(lambda *runs: jax.lax.map(lambda run: one_run(*run), runs))
    return jax.tree.map(np.asarray, run(x, matrices))


def stepper(tx, gradient, **options):
    """``step(matrix, params, state, *data)`` of stacked replicas, in one program for all rounds.

    The matrix is (n, n), or None where the step does not mix; the options are `step_of`'s.
    """

    @jax.jit
    def step(matrix, *args):
        r = None if matrix is None else gossip.Simulated(0, matrix)
        return jax.vmap(step_of(tx, gradient, r, **options), axis_name="replica")(*args)

    return step


def trajectory(tx, gradient, schedule, x, data, mix_every=1):
    """(parameters, state) after every step on one device, with static rounds as in training.

    ``data`` is a list of trees, one for each step.
    """
    runs, history, tx = {}, [], in_steps(tx, mix_every)
    state = jax.vmap(tx.init)(x)
    for t, now in enumerate(data):
        r = schedule.round_at(t, mix_every)
        if r not in runs:
            runs[r] = on_stack(step_of(tx, gradient, r), "vmap", schedule.num_replicas)
        x, state = runs[r](x, state, now)
        history.append((x, state))
    return history


@contextlib.contextmanager
def as_if(over_gloo):
    """Whether messages travel over gloo, whatever the devices are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "used", lambda: over_gloo)
        yield
