"""SwarmSGD on devices against the exact simulation of its events, and its quantised messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from decent_jax import optim, simulate, topology
from decent_jax.topology import rounds as topology_rounds

N, D, RATE = 8, 5, 0.1


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


ORDER = {True: "then", False: "with"}  # by whether it is blocking


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


def on_devices(fn, mesh):
    def body(*args):
        own = fn(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], own)

    spec = P("replica")
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))


def in_bulk(groups, given, mesh=None, *, blocking):
    """All replicas at once: as many sub-steps as the busiest one has, and then the round."""
    x0, a, b = given
    schedule = schedule_of(groups)
    tx = optim.swarm(optax.sgd(RATE), schedule, ORDER[blocking])

    def step(x, state, a, b, active, round):
        updates, state = tx.update(a * (x - b), state, x, round=round, active=active)
        return optim.apply_updates(x, updates), state

    @functools.cache
    def executable(round):
        one = functools.partial(step, round=round)
        return jax.vmap(one, axis_name="replica") if mesh is None else on_devices(one, mesh)

    x = jnp.asarray(x0)
    state = jax.vmap(tx.init)(x)
    done = np.zeros(N, int)
    for r, group in enumerate(groups):
        counts = np.zeros(N, int)
        for one in group:
            counts[one.i], counts[one.j] = one.steps_i, one.steps_j
        for k in range(counts.max()):
            active = k < counts
            last = k == counts.max() - 1
            x, state = executable(r if last else None)(
                x, state, jnp.asarray(a), jnp.asarray(b[done, np.arange(N)]), jnp.asarray(active)
            )
            done += active
    return np.asarray(x), state, done


def in_order(interactions, given, **options):
    x0, a, b = given
    return simulate.swarm(
        x0, interactions, lambda i, x, k, rng: a[i] * (x - b[k, i]), RATE, **options
    )


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("degree", [None, 3])
def test_bulk_is_the_list_of_interactions(blocking, degree):
    """Geometric local steps: replicas take different numbers, on a graph of degree 3 too."""
    listed = simulate.interactions(
        N, 24, degree=degree, local_steps=3, geometric=True, seed=int(blocking)
    )
    given = problem()
    wanted = in_order(listed, given, blocking=blocking)
    x, _, done = in_bulk(simulate.rounds(listed), given, blocking=blocking)
    assert len(set(done.tolist())) > 3
    np.testing.assert_array_equal(done, wanted.local_steps)
    np.testing.assert_allclose(x, wanted.models, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("blocking", [True, False])
def test_devices_are_the_list_of_interactions(blocking, mesh8):
    listed = simulate.interactions(N, 6, local_steps=2, geometric=True, seed=5)
    given = problem(1)
    x, _, _ = in_bulk(simulate.rounds(listed), given, mesh8, blocking=blocking)
    wanted = in_order(listed, given, blocking=blocking).models
    np.testing.assert_allclose(x, wanted, rtol=1e-12, atol=1e-12)


def test_meetings_of_a_schedule_are_geometric():
    """random_matching(meet=1/4): steps between two meetings of a replica have mean 4."""
    schedule = topology.make("random_matching(rounds=4000, meet=0.25)", 8)
    meets = np.stack([one.sends[0].sources >= 0 for one in schedule.rounds])
    gaps = np.concatenate([np.diff(np.flatnonzero(column)) for column in meets.T])
    assert gaps.mean() == pytest.approx(4, rel=0.03)
    for k in (1, 2, 5):
        assert (gaps == k).mean() == pytest.approx(0.25 * 0.75 ** (k - 1), abs=0.01)


def test_pairs_are_neighbours_of_one_regular_graph():
    schedule = topology.make("random_matching(rounds=300, degree=3)", 10)
    graph = sum(one.matrix for one in schedule.rounds) > 0
    np.fill_diagonal(graph, False)
    assert (graph.sum(1) == 3).all()


@pytest.mark.parametrize("blocking", [True, False])
def test_stationary_spread(blocking):
    """../shared/ALGORITHMS.md 6.3, matchings of K_n: v (n-1)(n-2)/n, or 2 v (n-1)^2/n."""
    d, sigma, rounds = 4000, 0.1, 60
    schedule = topology.make("random_matching", N, rounds=rounds, seed=7)
    tx = optim.swarm(optax.sgd(1.0), schedule, ORDER[blocking])
    x = jnp.zeros((N, d), jnp.float32)
    state = jax.vmap(tx.init)(x)
    rng, spreads = np.random.default_rng(0), []
    for t in range(2 * rounds):

        def step(x, state, noise, r=t % rounds):
            updates, state = tx.update(noise, state, x, round=r)
            return optim.apply_updates(x, updates), state

        noise = jnp.asarray(sigma * rng.normal(size=(N, d)), jnp.float32)
        x, state = jax.vmap(step, axis_name="replica")(x, state, noise)
        spreads.append(float(jnp.square(x - x.mean(0, keepdims=True)).sum()))
    v = sigma**2 * d
    wanted = v * (N - 1) * (N - 2) / N if blocking else 2 * v * (N - 1) ** 2 / N
    assert np.mean(spreads[rounds:]) == pytest.approx(wanted, rel=0.03)


# --- quantised messages -------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 16])
def test_lattice_reads_what_was_rounded(bits):
    lattice = optim.Lattice(bits)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(50,)) * 30, jnp.float32)
    side = lattice.side(x, 0.02)
    reach = float(side) * (2**bits - 1) / 2
    y = x + jnp.asarray(rng.uniform(-0.99, 0.99, 50) * reach, jnp.float32)
    points = lattice.points({"w": x}, side)
    message = lattice.encode(points, side)
    assert message[0]["w"].dtype == (jnp.uint8 if bits == 8 else jnp.uint16)
    read, fine = lattice.decode(message, {"w": y})
    assert bool(fine)
    np.testing.assert_array_equal(read["w"], points["w"])
    assert np.abs(read["w"] * side - x).max() <= 0.51 * float(side)


def test_lattice_agrees_with_the_simulators():
    rng = np.random.default_rng(1)
    x = rng.normal(size=40)
    y = x + rng.uniform(-1, 1, 40) * 0.05
    lattice, other = optim.Lattice(8), simulate.LatticeQuantizer(2.0**-10)
    side = jnp.float32(2.0**-10)
    message = lattice.encode(lattice.points(jnp.asarray(x), side), side)
    theirs, _ = other.encode(x.astype(np.float32).astype(float))
    np.testing.assert_array_equal(message[0], theirs.colours)
    got, fine = lattice.decode(message, jnp.asarray(y))
    assert bool(fine) and other.decode(theirs, y).ok
    np.testing.assert_allclose(got * 2.0**-10, other.decode(theirs, y).value, atol=1e-12)


def test_a_message_from_too_far_is_noticed():
    lattice = optim.Lattice(8)
    rng = np.random.default_rng(2)
    for _ in range(20):
        x = jnp.asarray(rng.normal(size=30), jnp.float32)
        side = lattice.side(x, 0.01)
        far = int(rng.integers(30))
        y = x.at[far].add(float(side) * 200)
        points = lattice.points(x, side)
        read, fine = lattice.decode(lattice.encode(points, side), y)
        assert not bool(fine) and abs(int(read[far] - points[far])) == 256


@pytest.mark.parametrize("blocking", [True, False])
def test_quantised_meetings_keep_the_mean_and_agree(blocking):
    """No gradients, from far apart: failed meetings widen the lattice until messages are read."""
    schedule = topology.make("hypercube", N)
    tx = optim.swarm(optax.sgd(0.0), schedule, ORDER[blocking], lattice=optim.Lattice(8))
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(N, D)) + 5, jnp.float32)
    start, state, spread = x, jax.vmap(tx.init)(x), []

    def step(x, state, round):
        updates, state = tx.update(0 * x, state, x, round=round)
        return optim.apply_updates(x, updates), state

    for t in range(120):
        one = functools.partial(step, round=schedule.round_at(t))
        x, state = jax.vmap(one, axis_name="replica")(x, state)
        np.testing.assert_allclose(x.mean(0), start.mean(0), atol=5e-6)
        spread.append(float(jnp.square(x - x.mean(0, keepdims=True)).sum()))
    assert spread[0] == pytest.approx(
        float(jnp.square(start - start.mean(0, keepdims=True)).sum())
    )  # unread
    assert spread[-1] < 1e-4


def test_failed_meetings_change_nobody():
    schedule = topology.make("hypercube", N)
    tx = optim.swarm(optax.sgd(0.0), schedule, ORDER[True], lattice=optim.Lattice(8, distance=1e-6))
    x = jnp.asarray(np.random.default_rng(4).normal(size=(N, D)))
    state = jax.vmap(tx.init)(x)
    updates, state = jax.vmap(
        lambda x, state: tx.update(0 * x, state, x, round=0), axis_name="replica"
    )(x, state)
    np.testing.assert_array_equal(optim.apply_updates(x, updates), x)
    np.testing.assert_allclose(state.own.y, 4e-6)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_lattice_follows_replicas_that_differ(blocking):
    """Each is drawn to a place of its own: as near the middle as without quantisation, for good.

    It ran away where replicas spoke coarser after a message that *they* could not read.
    """
    schedule = topology.make("random_matching", N)
    a, b = jnp.arange(1.0, N + 1)[:, None] / N, jnp.arange(float(N))[:, None]
    far = {}
    for bits in (8, 32):
        lattice = optim.Lattice(8) if bits == 8 else None
        tx = optim.swarm(optax.sgd(0.1), schedule, ORDER[blocking], lattice=lattice)
        x = jnp.tile(jnp.arange(10.0), (N, 1))
        state, errors = jax.vmap(tx.init)(x), []
        runs = [
            jax.jit(
                jax.vmap(
                    lambda x, state, a, b, tx=tx, r=r: tx.update(a * (x - b), state, x, round=r),
                    axis_name="replica",
                )
            )
            for r in range(schedule.period)
        ]
        for t in range(400):
            updates, state = runs[t % schedule.period](x, state, a, b)
            x = optim.apply_updates(x, updates)
            errors.append(float(jnp.abs(x - 14 / 3).max()))
        far[bits] = np.max(errors[200:])
    assert far[8] < 1.6 * far[32]


def test_lattice_refuses_other_bits():
    with pytest.raises(ValueError, match="bits must be 8 or 16, got 4"):
        optim.Lattice(4)
