"""``combine="delayed"``: its recursion, its mean, and where it reaches consensus."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decent_jax import optim, topology
from decent_jax.gossip import wire
from decent_jax.optim import require

N = 8
SGD = optax.sgd(0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def delayed(schedule, inner=SGD, gamma=0.5, **options):
    return optim.decentralized(inner, schedule, "delayed", gamma=gamma, **options)


def problem(steps, n=N, seed=0):
    """Start (n, 3), and the gradients' noise (steps, n, 3)."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)), rng.normal(size=(steps, n, 3))


def stepper(tx, schedule, mix_every=1):
    """step(t, params, states, noise), gradient 0.5 x - noise, all replicas on one device."""

    @functools.cache
    def compiled(round):
        def step(x, state, noise):
            updates, state = tx.update(0.5 * x - noise, state, x, round=round)
            return optim.apply_updates(x, updates), state

        return jax.jit(jax.vmap(step, axis_name="replica"))

    return lambda t, *args: compiled(schedule.round_at(t, mix_every))(*args)


def run(tx, schedule, x, noise, mix_every=1):
    """Parameters after every step, (steps, n, 3)."""
    step, params = stepper(tx, schedule, mix_every), jnp.asarray(x)
    state, out = jax.vmap(tx.init)(params), []
    for t, now in enumerate(noise):
        params, state = step(t, params, state, now)
        out.append(np.asarray(params))
    return np.stack(out)


def matrices(schedule, steps, mix_every):
    rounds = [schedule.round_at(t, mix_every) for t in range(steps)]
    return [None if r is None else schedule.matrix(r) for r in rounds]


@pytest.mark.parametrize("mix_every", [1, 2, 3])
@pytest.mark.parametrize("name", ["one_peer_exp", "ring", "alternating_exp_ring", "static_exp"])
def test_is_the_recursion(name, mix_every):
    """z = x - lr m; x <- z + gamma (W z- - z-), in NumPy."""
    schedule = topology.make(name, N, local_size=4)
    x, noise = problem(8)
    got = run(delayed(schedule, gamma=0.4, mix_every=mix_every), schedule, x, noise, mix_every)
    before, momentum = x, np.zeros_like(x)
    for t, matrix in enumerate(matrices(schedule, 8, mix_every)):
        momentum = 0.9 * momentum + 0.5 * x - noise[t]
        z = x - 0.1 * momentum
        x = z if matrix is None else z + 0.4 * (matrix @ before - before)
        before = z
        np.testing.assert_allclose(got[t], x, atol=1e-13)


@pytest.mark.parametrize("name", ["one_peer_exp", "bidirectional_ring", "hierarchical"])
@pytest.mark.parametrize("comm_dtype", ["float32", "bfloat16"])
def test_mean_is_that_without_the_delay(name, comm_dtype):
    """The gradients here are linear, so the mean of them is that at the mean."""
    if name == "hierarchical" and comm_dtype != "float32":
        return  # means of groups travel as they are
    schedule = topology.make(name, N, local_size=2)
    x, noise = problem(12)
    late = run(delayed(schedule, wire=wire.of_dtype(comm_dtype)), schedule, x, noise)
    then = run(optim.decentralized(SGD, schedule, "then"), schedule, x, noise)
    assert np.abs(late - then).max() > 0.01
    np.testing.assert_allclose(late.mean(1), then.mean(1), atol=1e-13)


def test_with_steps_between_rounds_it_is_with_mixing_by_gamma():
    schedule = topology.make("one_peer_exp", N)
    x, noise = problem(8)
    got = run(delayed(schedule, gamma=0.7, mix_every=2), schedule, x, noise, mix_every=2)
    other = optim.decentralized(SGD, schedule, "with", gamma=0.7)
    np.testing.assert_allclose(got, run(other, schedule, x, noise, mix_every=2), atol=1e-13)


# --- stability ------------------------------------------------------------------------------------


def disagreement(schedule, gamma, steps):
    """||x_t - mean|| over its start, for x+ = x + gamma (W - I) x-, without the library."""
    x = before = problem(0, schedule.num_replicas)[0]
    out = []
    for t in range(steps):
        matrix = schedule.matrix(t % schedule.period)
        x, before = x + gamma * (matrix @ before - before), x
        out.append(np.linalg.norm(x - x.mean(0)))
    return np.array(out) / np.linalg.norm(problem(0, schedule.num_replicas)[0])


@pytest.mark.parametrize("n", [4, 6, 8, 16])
@pytest.mark.parametrize("name", [name for name in topology.NAMES if name != "star"])
def test_half_reaches_consensus_on_every_schedule(name, n):
    try:
        schedule = topology.make(name, n, local_size=2)
    except ValueError:
        return
    require.stable_delay(schedule, 0.5)
    left = disagreement(schedule, 0.5, 3000)
    assert left[-1] < 1e-3 and left.max() < 2


@pytest.mark.parametrize(
    ("name", "n", "growth"),
    [("bidirectional_ring", 8, 1.1547), ("static_exp", 8, 1.1093), ("one_peer_exp", 16, 1.0118)],
)
def test_all_of_it_at_once_diverges_and_is_refused(name, n, growth):
    schedule = topology.make(name, n)
    left = disagreement(schedule, 1.0, 2000)
    assert left[-1] > 1e6
    assert (left[-1] / left[999]) ** (1 / 1000) == pytest.approx(growth, rel=1e-2)
    message = rf"gamma=1 never reaches consensus on {name}: .* by {growth} a step; use gamma=0.5"
    with pytest.raises(ValueError, match=message):
        delayed(schedule, gamma=1.0)


@pytest.mark.parametrize("name", ["hypercube", "ring", "complete"])
def test_pairs_swing_for_ever_and_are_refused(name):
    """An eigenvalue 0 of W becomes a pair of modulus 1."""
    schedule = topology.make(name, N)
    left = disagreement(schedule, 1.0, 3000)
    assert 0.1 < left[-300:].max() < 10
    with pytest.raises(ValueError, match=r"is multiplied by 1\.0000 a step"):
        delayed(schedule, gamma=1.0)
    delayed(schedule, gamma=1.0, mix_every=2)  # mixes what is there, so this is "with"


@pytest.mark.parametrize("gamma", [0.1, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("name", ["bidirectional_ring", "static_exp", "star", "torus"])
def test_eigenvalues_of_a_static_graph_are_the_formula(name, gamma):
    schedule = topology.make(name, N)
    values = np.linalg.eigvals(schedule.matrix(0))
    values = values[np.abs(values - 1) > 1e-9]
    roots = np.concatenate([np.roots([1, -1, gamma * (1 - m)]) for m in values])
    left = disagreement(schedule, gamma, 120)
    rate = (left[100:120].max() / left[40:60].max()) ** (1 / 60)  # roots that turn: the largest
    assert rate == pytest.approx(np.abs(roots).max(), abs=0.01)


def test_refusals():
    schedule = topology.make("one_peer_exp", N)
    with pytest.raises(ValueError, match="needs a gamma that stays, got a schedule"):
        delayed(schedule, gamma=lambda step: 0.5)
    directed = topology.make("random_out", N)
    with pytest.raises(ValueError, match="do not sum to 1"):
        delayed(directed)
    with pytest.raises(ValueError, match="gamma=0 never reaches consensus"):
        delayed(schedule, gamma=0.0)


# --- faults and resuming --------------------------------------------------------------------------


def test_a_replica_that_is_not_finite_comes_back():
    schedule = topology.make("one_peer_exp", N)
    tx = delayed(schedule)
    x, noise = problem(6)
    step, params = stepper(tx, schedule), jnp.asarray(x).at[3].set(jnp.nan)
    state = jax.vmap(tx.init)(params)
    for t in range(6):
        params, state = step(t, params, state, noise[t])
        assert np.isfinite(np.asarray(params)).all() and np.isfinite(state.own["sent"]).all()
    # Nobody heard it: the first step of those who would have is their own.
    first, _ = step(0, jnp.asarray(x).at[3].set(jnp.nan), jax.vmap(tx.init)(x), noise[0])
    assert np.isfinite(np.asarray(first)).all()


def test_a_rejected_update_leaves_mixing_alone():
    schedule = topology.make("one_peer_exp", N)
    tx = delayed(schedule)
    x, noise = problem(1)
    state = jax.vmap(tx.init)(jnp.asarray(x))
    bad = jnp.asarray(noise[0]).at[2].set(jnp.inf)
    got, state = stepper(tx, schedule)(0, jnp.asarray(x), state, bad)
    assert state.skipped.tolist() == [int(i == 2) for i in range(N)]
    wanted = x + 0.5 * (schedule.matrix(0) @ x - x)
    np.testing.assert_allclose(got[2], wanted[2], atol=1e-14)
    np.testing.assert_array_equal(state.own["sent"][2], x[2])


def test_resumes_bit_for_bit():
    """All that it needs is in the state: host copies after any step give the same numbers."""
    schedule = topology.make("ring", N)
    tx = delayed(schedule, optim.accum_adamw(0.1, weight_decay=0.1, accum_steps=3))
    x, noise = problem(8)
    step = stepper(tx, schedule)

    def go(params, state, steps):
        for t in steps:
            params, state = step(t, params, state, noise[t])
        return params, state

    begin = jnp.asarray(x), jax.vmap(tx.init)(jnp.asarray(x))
    whole = go(*begin, range(8))
    saved = jax.tree.map(np.array, go(*begin, range(5)))
    jax.tree.map(np.testing.assert_array_equal, go(*saved, range(5, 8)), whole)


# --- beside "with" and "then" ---------------------------------------------------------------------


def long_run(schedule, combine, steps=6000, rate=0.1):
    """(distance from consensus, of the mean from the optimum), root mean squares of the end."""
    rng, n = np.random.default_rng(0), schedule.num_replicas
    target, curvature = rng.normal(size=(n, 50)), np.linspace(0.2, 1, 50)
    x = before = np.zeros((n, 50))
    apart, away = [], []
    for t in range(steps):
        matrix = schedule.matrix(t % schedule.period)
        change = -rate * (curvature * (x - target) + rng.normal(size=x.shape))
        if combine == "with":
            x = matrix @ x + change
        elif combine == "then":
            x = matrix @ (x + change)
        else:
            x, before = x + change + 0.5 * (matrix @ before - before), x + change
        if t > steps // 2:
            mean = x.mean(0)
            apart.append(np.square(x - mean).sum(1).mean())
            away.append(np.square(mean - target.mean(0)).sum())
    return np.sqrt(np.mean(apart)), np.sqrt(np.mean(away))


@pytest.mark.parametrize("name", ["one_peer_exp", "ring", "bidirectional_ring", "complete"])
def test_table_of_the_docs(name):
    text = (Path(__file__).resolve().parents[1] / "docs" / "algorithms.md").read_text()
    (row,) = re.findall(rf"^\| `{name}` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    schedule = topology.make(name, N)
    for wanted, combine in zip(row, ("then", "with", "delayed"), strict=True):
        apart, away = long_run(schedule, combine)
        assert float(wanted) == pytest.approx(apart, abs=0.006)
        assert away == pytest.approx(0.81, abs=0.005)
