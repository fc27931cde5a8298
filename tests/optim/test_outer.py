"""Outer steps over graphs, late ones, and sparse messages of movements, against the recursions."""

import functools
import sys

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import oracles_seldom
import pytest
from oracles_seldom import largest_of_chunks
from refusals import refuses

from decent_jax import gossip, optim, topology
from decent_jax.gossip.codecs import bytes_sent
from decent_jax.gossip.sparse import ChunkedTopK, TopK

pytestmark = pytest.mark.usefixtures("x64")
N, D, LR, STEPS = 4, 6, 0.1, 24
SGD = optax.sgd(LR)
CHUNKS = largest_of_chunks(4, 2)


def problem(n=N, equal=True):
    """A start, and for every step each replica's (a, b): the gradient is a (x - b)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, D))
    return (
        np.tile(x[:1], (n, 1)) if equal else x,
        rng.uniform(0.2, 1, (n, 1)),
        rng.normal(size=(STEPS, n, D)),
    )


def trajectories(txs, schedule, mix_every=1, equal=True, in_steps=harness.in_steps):
    """{key: (steps, n, D)}: every method from the same start, in one program per round."""
    x0, a, b = problem(schedule.num_replicas, equal)

    def gradient(xs, given):
        a, b = given
        return jax.tree.map(lambda x: a * (x - b), xs)

    x, data = dict.fromkeys(txs, jnp.asarray(x0)), [(a[:, 0], rows) for rows in b]
    tx = harness.together({key: in_steps(tx, mix_every) for key, tx in txs.items()})
    history = harness.trajectory(tx, gradient, schedule, x, data, mix_every)
    return {key: np.stack([x[key] for x, _ in history]) for key in txs}


def wanted(method, schedule, mix_every=1, equal=True, **numbers):
    n = schedule.num_replicas
    x0, a, b = problem(n, equal)

    def matrices(t):
        r = schedule.round_at(t, mix_every)
        return None if r is None else schedule.matrix(r)

    return oracles.run(method, matrices, lambda x, t: a * (x - b[t]), x0, STEPS, LR, **numbers)


# --- DiLoCo and NoLoCo ----------------------------------------------------------------------------


LATE = [(delay, carry) for delay in (1, 2) for carry in (False, True)]


def test_late_messages_are_the_recursions():
    """Also with LOSCAR's merge of late averages."""
    complete = topology.make("complete", N)
    nesterov = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True, "sync_every": 3}
    txs = {
        (delay, carry): optim.diloco(SGD, complete, delay=delay, carry=carry)
        for delay, carry in LATE
    }
    got = trajectories(txs, complete, 3)
    for delay, carry in LATE:
        right = wanted("diloco", complete, 3, delay=delay, carry=carry, **nesterov)
        oracles.assert_same(got[delay, carry], right)
    assert np.abs(got[2, True] - got[2, False]).max() > 0.05


def test_update_itself_does_all_of_a_message_beside_one_step():
    schedule = topology.make("one_peer_exp", N)
    txs = {"noloco": optim.noloco(SGD, schedule, delay=1, carry=True)}
    by_parts = trajectories(txs, schedule, 2)["noloco"]
    whole = trajectories(txs, schedule, 2, in_steps=lambda tx, _: tx)["noloco"]
    oracles.assert_same(whole, by_parts)


# --- sparse messages ------------------------------------------------------------------------------


def largest_of_all(x):
    """The half of largest magnitude."""
    return np.where(np.argsort(np.argsort(-np.abs(x))) < x.size // 2, x, 0.0)


@pytest.mark.parametrize("exact", [False, True])
def test_sparseloco_is_the_recursion(exact, monkeypatch):
    """With its codec, and to the last digits with one that sends the numbers as they are."""
    if exact:
        whole = lambda density, _: TopK(density)  # noqa: E731
        monkeypatch.setattr(sys.modules["decent_jax.optim.sparseloco"], "ChunkedTopK", whole)
    schedule, compress = topology.make("complete", N), largest_of_all if exact else CHUNKS
    tx = optim.sparseloco(SGD, schedule, density=0.5, chunk=4, decay=0.8)
    right = wanted(oracles_seldom.sparseloco, schedule, 2, compress=compress, decay=0.8)
    # A mean just between two bfloat16 may be rounded either way.
    (path,) = trajectories({"sparseloco": tx}, schedule, 2).values()
    np.testing.assert_allclose(path, right, rtol=0, atol=1e-12 if exact else 1e-3)


def test_sparseloco_needs_an_identical_start():
    with refuses("sparseloco", "same_init=True"):
        optim.sparseloco(SGD, topology.make("complete", N), same_init=False)


@pytest.mark.parametrize(
    ("size", "chunk", "density"), [(1, 4, 0.5), (23, 5, 0.6), (40, 64, 0.1), (12, 3, 1.0)]
)
def test_chunks_are_what_numpy_keeps(size, chunk, density):
    """No error is enlarged."""
    codec = ChunkedTopK(density, chunk)
    x = np.random.default_rng(size).normal(size=size) * np.geomspace(1, 1e-3, size)
    x[1::4] = 0  # as of rows of an embedding that no token names

    @jax.jit
    def there_and_back(x):
        return codec.decode(codec.encode(x), x)

    got = there_and_back(jnp.asarray(x, jnp.float32))
    width = min(chunk, size)
    kept = max(1, round(density * width))
    np.testing.assert_allclose(got, largest_of_chunks(width, kept)(x), rtol=8e-3, atol=1e-7)
    assert np.square(x - got).sum() <= np.square(x).sum() * (1 + 1e-6)


def test_published_bytes_of_a_chunk():
    assert bytes_sent(ChunkedTopK(), (4096,)) == 96 + 16 + 4  # places, codes, two magnitudes


def test_top_k_of_parameters_is_refused():
    """What is small would never be sent."""
    ring = topology.make("bidirectional_ring", N)
    for codec in (TopK(0.5), ChunkedTopK(0.5)):
        mix = functools.partial(gossip.mix, schedule=ring, round=0, codec=codec)
        with refuses(type(codec).__name__, "choco"):
            jax.vmap(mix, axis_name="replica")(jnp.ones((N, 3)))


def test_more_rounds_than_the_machine_holds_are_refused():
    """Periods whose least common multiple is astronomic, before the rounds are made."""
    with refuses("complete", "1000000000000"):
        topology.repeat(topology.make("complete", N), 10**12)
