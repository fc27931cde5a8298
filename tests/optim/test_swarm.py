"""SwarmSGD on devices against the exact simulation of its events, and its quantized messages."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from interactions import interactions, swarm
from mixing import in_rounds

from decent_jax import gossip, optim, topology
from decent_jax.gossip.codecs import Lattice
from decent_jax.topology import rounds as topology_rounds

N, D, RATE = 8, 5, 0.1


pytestmark = pytest.mark.usefixtures("x64")


def problem(seed=0):
    """Start (n, D), and each replica's gradient in its k-th local step: a (x - b[k])."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(N, D)), rng.uniform(0.2, 1, N), rng.normal(size=(60, N, D))


def schedule_of(groups):
    """A round of pairs for every round of interactions."""
    found = []
    for group in groups:
        partner = np.full(N, -1)
        for one in group:
            partner[one.i], partner[one.j] = one.j, one.i
        found.append(topology_rounds.pairwise(partner))
    return topology.Schedule("list", N, tuple(found))


def side_by_side(group):
    """An order of the replicas in which partners are neighbours, and the matrix then."""
    pairs = [k for one in group for k in one[:2]]
    matrix = np.eye(N)
    for k in range(0, len(pairs), 2):
        matrix[k : k + 2, k : k + 2] = 1 / 2
    return np.array(pairs + [k for k in range(N) if k not in pairs]), matrix


def in_bulk(groups, given, form="vmap", **options):
    """All replicas at once: as many sub-steps as the busiest one has, and then the round.

    On devices rounds are static; on one device they are the hypercube's first, with replicas in
    another order each time, in one program.
    """
    x, a, b = given
    schedule = schedule_of(groups) if form == "devices" else topology.make("hypercube", N)
    tx = optim.swarm(optax.sgd(RATE), schedule, **options)

    def step_in(round):
        def step(x, state, a, b, active):
            updates, state = tx.update(a * (x - b), state, x, round=round, active=active)
            return optim.apply_updates(x, updates), state

        return step

    @functools.cache
    def on_devices(r):
        return harness.on_stack(step_in(r), form, N, N)

    @jax.jit
    def on_one(matrix, *args):
        round = None if matrix is None else gossip.Simulated(0, matrix)
        return jax.vmap(step_in(round), axis_name="replica")(*args)

    state = jax.vmap(tx.init)(jnp.asarray(x))
    done = np.zeros(N, int)
    for r, group in enumerate(groups):
        order, matrix = side_by_side(group) if form == "vmap" else (np.arange(N), None)
        counts = np.zeros(N, int)
        for one in group:
            counts[one.i], counts[one.j] = one.steps_i, one.steps_j
        for k in range(counts.max()):
            active, last = k < counts, k == counts.max() - 1
            args = jax.tree.map(
                lambda rows, order=order: rows[order],
                (x, state, a, b[done, np.arange(N)], active),
            )
            if form == "devices":
                out = on_devices(r if last else None)(*args)
            else:
                out = on_one(matrix if last else None, *args)
            x, state = jax.tree.map(lambda rows, order=order: rows[np.argsort(order)], out)
            done += active
    return np.asarray(x), done


def in_order(listed, given, combine):
    x0, a, b = given
    return swarm(x0, listed, lambda i, x, k: a[i] * (x - b[k, i]), RATE, blocking=combine == "atc")


@pytest.mark.parametrize(("combine", "degree"), [("atc", None), ("awc", 3)])
def test_bulk_is_the_list_of_interactions(combine, degree):
    """Geometric local steps: replicas take different numbers, on a graph of degree 3 too."""
    listed = interactions(N, 24, degree=degree, local_steps=3, geometric=True, seed=1)
    given = problem()
    wanted, steps = in_order(listed, given, combine=combine)
    x, done = in_bulk(in_rounds(listed), given, combine=combine)
    assert len(set(done.tolist())) > 3
    np.testing.assert_array_equal(done, steps)
    np.testing.assert_allclose(x, wanted, rtol=1e-12, atol=1e-12)


def test_devices_are_the_list_of_interactions():
    """Among them rounds in which replicas are idle."""
    listed = interactions(N, 4, local_steps=2, geometric=True, seed=5)
    given = problem(1)
    x, _ = in_bulk(in_rounds(listed), given, "devices", combine="awc")
    wanted, _ = in_order(listed, given, combine="awc")
    np.testing.assert_allclose(x, wanted, rtol=1e-12, atol=1e-12)


def test_averages_of_a_schedule_are_geometric():
    """random_matching(probability=1/4): steps between two averages of a replica have mean 4."""
    schedule = topology.make("random_matching(rounds=4000, probability=0.25)", 8)
    averages = np.stack([one.sends[0].sources >= 0 for one in schedule.rounds])
    gaps = np.concatenate([np.diff(np.flatnonzero(column)) for column in averages.T])
    assert gaps.mean() == pytest.approx(4, rel=0.03)
    for k in (1, 2, 5):
        assert (gaps == k).mean() == pytest.approx(0.25 * 0.75 ** (k - 1), abs=0.01)


def test_pairs_are_neighbours_of_one_regular_graph():
    schedule = topology.make("random_matching(rounds=300, degree=3)", 10)
    graph = sum(one.matrix for one in schedule.rounds) > 0
    np.fill_diagonal(graph, False)
    assert (graph.sum(1) == 3).all()


def matched_at_random(tx, gradient, x, data, seed):
    """Parameters after every step (steps, n, ...): fixed pairs, of replicas in a random order."""
    one = jax.vmap(harness.step_of(tx, gradient, 0), axis_name="replica")
    rng, steps = np.random.default_rng(seed), len(jax.tree.leaves(data)[0])
    orders = jnp.asarray(np.stack([rng.permutation(N) for _ in range(steps)]))

    def step(carry, given):
        order, now = given
        moved = one(*jax.tree.map(lambda rows: rows[order], (*carry, now)))
        carry = jax.tree.map(lambda rows: rows[jnp.argsort(order)], moved)
        return carry, carry[0]

    run = jax.jit(lambda *carry: jax.lax.scan(step, carry, (orders, data))[1])
    return run(x, jax.vmap(tx.init)(x))


# --- quantized messages -------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["atc", "awc"])
def test_quantized_averages_keep_the_mean_and_agree(combine):
    """No gradients, from far apart: failed averages widen the lattice until messages are read."""
    schedule = topology.make("hypercube", N)
    tx = optim.swarm(optax.sgd(0.0), schedule, combine=combine, codec=Lattice(8))
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(N, D)) + 5, jnp.float32)
    history = harness.trajectory(
        tx, lambda x, _: jnp.zeros_like(x), schedule, x, [jnp.zeros(N)] * 120
    )
    spread = [np.square(y - y.mean(0, keepdims=True)).sum() for y, _ in history]
    for y, _ in history:
        np.testing.assert_allclose(y.mean(0), x.mean(0), atol=5e-6)
    assert spread[0] == pytest.approx(np.square(x - x.mean(0, keepdims=True)).sum())  # unread
    assert spread[-1] < 1e-4


def test_failed_averages_change_nobody():
    schedule = topology.make("hypercube", N)
    tx = optim.swarm(optax.sgd(0.0), schedule, combine="atc", distance=1e-6, codec=Lattice(8))
    x = jnp.asarray(np.random.default_rng(4).normal(size=(N, D)))
    state = jax.vmap(tx.init)(x)
    step = harness.on_stack(harness.step_of(tx, lambda x: 0 * x, 0), "vmap", N)
    same, state = step(x, state)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_allclose(harness.own(state, "y"), 4e-6)


def test_the_lattice_follows_replicas_that_differ():
    """Each is drawn to a place of its own: as near the middle as without quantization, for good.

    It ran away where replicas spoke coarser after a message that *they* could not read.
    """
    schedule, steps = topology.make("hypercube", N), 400
    a, b = jnp.arange(1.0, N + 1)[:, None] / N, jnp.arange(float(N))[:, None]
    data = jax.tree.map(lambda rows: jnp.tile(rows, (steps, 1, 1)), (a, b))
    txs = {
        (combine, bits): optim.swarm(optax.sgd(0.1), schedule, combine=combine, codec=codec)
        for combine in ("atc", "awc")
        for bits, codec in ((8, Lattice(8)), (32, None))
    }

    def gradient(xs, now):
        return {key: now[0] * (x - now[1]) for key, x in xs.items()}

    x = dict.fromkeys(txs, jnp.tile(jnp.arange(10.0), (N, 1)))
    history = matched_at_random(harness.together(txs), gradient, x, data, seed=0)
    far = {key: np.max(np.abs(x[200:] - 14 / 3)) for key, x in history.items()}
    for combine in ("atc", "awc"):
        assert far[combine, 8] < 1.6 * far[combine, 32]
