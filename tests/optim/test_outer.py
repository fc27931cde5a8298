"""Outer steps over graphs, and sparse messages of movements and momentum: against
`oracles_seldom`, and in the special cases that are other methods."""

import functools

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
from decent_jax.gossip.sparse import ChunkedTopK, RandomK, TopK

pytestmark = pytest.mark.usefixtures("x64")
N, D, LR, STEPS = 4, 6, 0.1, 24
SGD = optax.sgd(LR)


def problem(n=N, equal=True):
    """A start, and for every step each replica's (a, b): the gradient is a (x - b)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, D))
    return (
        np.tile(x[:1], (n, 1)) if equal else x,
        rng.uniform(0.2, 1, (n, 1)),
        rng.normal(size=(STEPS, n, D)),
    )


def trajectories(txs, schedule, mix_every=1, equal=True, active=None, in_steps=harness.in_steps):
    """{key: (steps, n, D)}: every method from the same start, in one program per round."""
    x0, a, b = problem(schedule.num_replicas, equal)

    def gradient(xs, given):
        a, b = given
        return jax.tree.map(lambda x: a * (x - b), xs)

    x, data = dict.fromkeys(txs, jnp.asarray(x0)), [(a[:, 0], rows) for rows in b]
    tx = harness.together({key: in_steps(tx, mix_every) for key, tx in txs.items()})
    history = harness.trajectory(tx, gradient, schedule, x, data, mix_every, active)
    return {key: np.stack([x[key] for x, _ in history]) for key in txs}


def wanted(method, schedule, mix_every=1, equal=True, **numbers):
    n = schedule.num_replicas
    x0, a, b = problem(n, equal)

    def matrices(t):
        r = schedule.round_at(t, mix_every)
        return None if r is None else schedule.matrix(r)

    return oracles.run(method, matrices, lambda x, t: a * (x - b[t]), x0, STEPS, LR, **numbers)


# --- DiLoCo and NoLoCo ----------------------------------------------------------------------------


def test_merges_and_weights_are_the_recursion():
    """LOSCAR's merge of late averages, and Decoupled DiLoCo's weights where replicas pause."""
    schedule = topology.make("complete", N)
    active = np.random.default_rng(1).random((STEPS, N)) < 0.6
    active[6:12] = False  # nobody makes an update between two messages
    cases = [
        (delay, carry, weighted)
        for delay in (0, 1, 2)
        for carry in (False, True)
        for weighted in (False, True)
    ]
    txs = {
        case: optim.diloco(
            SGD, schedule, mix_every=4, delay=case[0], carry=case[1], weighted=case[2]
        )
        for case in cases
    }
    got = trajectories(txs, schedule, 4, active=active)
    numbers = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True, "sync_every": 4}
    numbers["active"] = lambda t: active[t]
    for case in cases:
        given = dict(zip(("delay", "carry", "weighted"), case, strict=True))
        right = wanted("diloco", schedule, **given, **numbers)
        oracles.assert_same(got[case], right)
    assert np.abs(got[2, True, False] - got[2, False, False]).max() > 0.1
    assert np.abs(got[0, False, True] - got[0, False, False]).max() > 0.01


LATE = [(delay, carry) for delay in (1, 2) for carry in (False, True)]


def test_late_messages_of_gasloc_and_sparseloco_are_the_recursions():
    ring, complete = (topology.make(name, N) for name in ("one_peer_exp", "complete"))
    sparse = {"density": 0.5, "chunk": 4, "bits": 32}
    kept = largest_of_chunks(4, 2, 32)
    gasloc, sparseloco = optim.contrib.gasloc, optim.sparseloco
    for schedule, make, numbers, oracle, given in [
        (ring, gasloc, {"alpha": 0.6}, oracles_seldom.gasloc, {"alpha": 0.6}),
        (complete, sparseloco, sparse, oracles_seldom.sparseloco, {"compress": kept}),
    ]:
        txs = {
            (delay, carry): make(SGD, schedule, mix_every=3, delay=delay, carry=carry, **numbers)
            for delay, carry in LATE
        }
        got = trajectories(txs, schedule, 3)
        for delay, carry in LATE:
            right = wanted(oracle, schedule, 3, delay=delay, carry=carry, **given)
            oracles.assert_same(got[delay, carry], right)
        assert np.abs(got[2, True] - got[2, False]).max() > 0.05


def test_update_itself_does_all_of_a_message_beside_one_step():
    schedule = topology.make("one_peer_exp", N)
    txs = {"noloco": optim.noloco(SGD, schedule, mix_every=2, delay=1, carry=True)}
    by_parts = trajectories(txs, schedule, 2)["noloco"]
    whole = trajectories(txs, schedule, 2, in_steps=lambda tx, _: tx)["noloco"]
    oracles.assert_same(whole, by_parts)


# --- sparse messages ------------------------------------------------------------------------------


def test_sparseloco_is_the_recursion():
    schedule = topology.make("complete", N)
    make = functools.partial(optim.sparseloco, SGD, schedule, density=0.5, chunk=4)
    cases = [(2, False), (32, False), (32, True)]
    txs = {
        (bits, clipped): make(bits=bits, clipped=clipped, decay=0.8, outer_learning_rate=0.6)
        for bits, clipped in cases
    }
    got = trajectories(txs, schedule, 2)
    for bits, clipped in cases:
        numbers = {"compress": largest_of_chunks(4, 2, bits), "decay": 0.8, "outer_lr": 0.6}
        right = wanted(oracles_seldom.sparseloco, schedule, 2, clipped=clipped, **numbers)
        # 2 bits: a mean just between two bfloat16 may be rounded either way.
        atol = 1e-12 if bits == 32 else 1e-3
        np.testing.assert_allclose(got[bits, clipped], right, rtol=0, atol=atol)
    assert np.abs(got[32, True] - got[32, False]).max() > 0.05


def test_sparseloco_needs_an_identical_start():
    with refuses("sparseloco", "identical_start=True"):
        optim.sparseloco(SGD, topology.make("complete", N), identical_start=False)


@pytest.mark.parametrize("bits", [2, 32])
@pytest.mark.parametrize(
    ("size", "chunk", "density"), [(1, 4, 0.5), (23, 5, 0.6), (40, 64, 0.1), (12, 3, 1.0)]
)
def test_chunks_are_what_numpy_keeps(size, chunk, density, bits):
    """No error is enlarged."""
    codec = ChunkedTopK(density, chunk, bits)
    x = np.random.default_rng(size).normal(size=size) * np.geomspace(1, 1e-3, size)
    x[1::4] = 0  # as of rows of an embedding that no token names

    @jax.jit
    def there_and_back(x):
        return codec.decode(codec.encode(x), x)

    got = there_and_back(jnp.asarray(x, jnp.float32))
    width = min(chunk, size)
    kept = max(1, round(density * width))
    np.testing.assert_allclose(got, largest_of_chunks(width, kept, bits)(x), rtol=8e-3, atol=1e-7)
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


# --- SPARTA ---------------------------------------------------------------------------------------


def places(t):
    """Half of the numbers, those of step t."""
    (key,) = jax.random.split(jax.random.fold_in(jax.random.key(0), t), 1)  # of one array
    return np.sort(RandomK(0.5).noise(key, (D,)))


def test_sparta_mixes_the_places_of_the_step():
    schedule = topology.make("one_peer_exp", N)
    sparta = functools.partial(optim.contrib.sparta, SGD, schedule, "then")
    txs = {fraction: sparta(fraction=fraction) for fraction in (0.5, 1.0)}
    got = trajectories(txs, schedule, 2, equal=False)
    assert len({tuple(places(t)) for t in range(12)}) > 5 and len(places(0)) == 3
    right = wanted(oracles_seldom.sparta, schedule, 2, equal=False, places=places)
    oracles.assert_same(got[0.5], right)
    oracles.assert_same(got[1.0], wanted("dpsgd", schedule, 2, equal=False, combine="then"))


def test_sparta_before_diloco_is_the_recursion():
    """Outer steps after every third round; a step between two rounds sends nothing."""
    schedule = topology.repeat(topology.make("complete", N), 3)
    make = functools.partial(optim.contrib.sparta_diloco, SGD, schedule, outer_every=3)
    got = trajectories({share: make(fraction=share) for share in (0.5, 1.0)}, schedule, 2)
    numbers = {"outer_every": 3}
    right = wanted(oracles_seldom.sparta_diloco, schedule, 2, places=places, **numbers)
    oracles.assert_same(got[0.5], right)
    assert np.abs(got[0.5] - got[1.0]).max() > 0.05


@pytest.mark.parametrize(("size", "sent"), [(7, 3), (5, 5), (6, 1), (9, 4)])
def test_random_places_are_distinct_and_equally_frequent(size, sent):
    draw = jax.vmap(lambda key: RandomK(sent / size).noise(key, (size,)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(3), 20_000)))
    assert drawn.shape == (20_000, sent) and all(len(set(row)) == sent for row in drawn)
    found = np.bincount(drawn.ravel(), minlength=size) / len(drawn)
    np.testing.assert_allclose(found, sent / size, atol=4 * (0.25 / len(drawn)) ** 0.5)


def test_sparta_reaches_consensus_over_complete():
    """Averages of groups too: a part of the parameters is added on its way like the whole."""
    schedule = topology.make("complete", N)
    tx = optim.contrib.sparta(optax.sgd(0.0), schedule, fraction=0.2)
    x = jnp.asarray(problem(equal=False)[0])

    @jax.jit
    def run(x):
        step = jax.vmap(harness.step_of(tx, jnp.zeros_like, 0), axis_name="replica")
        return jax.lax.scan(lambda c, _: (step(*c), None), (x, jax.vmap(tx.init)(x)), length=60)[0]

    np.testing.assert_allclose(run(x)[0], np.tile(x.mean(0), (N, 1)), atol=1e-12)


def test_more_rounds_than_the_machine_holds_are_refused():
    """Periods whose least common multiple is astronomic, before the rounds are made."""
    with refuses("complete", "1000000000000"):
        topology.repeat(topology.make("complete", N), 10**12)


# --- DeMo -----------------------------------------------------------------------------------------


def test_demo_is_the_recursion():
    """On a matrix in chunks of 2 x 2, on one whole, and on a vector; a step without a round."""
    schedule = topology.make("complete", N)
    forms = {  # shape, longest side of a chunk; what NumPy makes of them
        ((4, 6), 2): ((4, 6), (2, 2)),
        ((4, 6), 64): ((4, 6), (4, 6)),
        ((3, 4, 2), 3): ((12, 2), (2, 2)),  # chunks do not cross the first axis
        ((24,), 9): ((1, 24), (1, 8)),
    }
    rng = np.random.default_rng(0)
    x0, a = np.tile(rng.normal(size=24), (N, 1)), rng.uniform(0.2, 1, (N, 1))
    b = rng.normal(size=(STEPS, N, 24))
    numbers = {"kept": 2, "decay": 0.9, "weight_decay": 0.3}
    txs = {form: optim.contrib.demo(LR, schedule, chunk=form[1], **numbers) for form in forms}

    def gradient(xs, given):
        a, b = given
        return {form: a * (x - b.reshape(x.shape)) for form, x in xs.items()}

    x = {form: jnp.asarray(x0.reshape(N, *form[0])) for form in forms}
    data = [(a[:, 0], rows) for rows in b]
    history = harness.trajectory(harness.together(txs), gradient, schedule, x, data, 2)
    for form, (shape, sides) in forms.items():
        got = np.stack([x[form].reshape(N, -1) for x, _ in history])
        right = oracles.run(
            oracles_seldom.demo,
            lambda t: schedule.matrix(0) if t % 2 else None,
            lambda x, t: a * (x - b[t]),
            x0, STEPS, LR, shape=shape, sides=sides, **numbers,
        )  # fmt: skip
        oracles.assert_same(got, right)
        assert (got == got[:, :1]).all()
