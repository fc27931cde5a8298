"""Formats of messages: JAX and NumPy agree, errors keep their bounds, bytes are as documented."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refuses

from decent_jax import gossip, topology
from decent_jax.gossip import codecs
from decent_jax.gossip.codecs import BFloat16, Int4, Int8, Lattice
from decent_jax.gossip.sparse import ChunkedTopK, TopK

SIDE = np.float32(2.0**-7)
# A codec; bytes of an array (6, 50); the largest error of one of its numbers, from the array.
CASES = {
    "bfloat16": (BFloat16(), 600, lambda x: 2.0**-8 * np.abs(x)),
    "int8": (Int8(), 300 + 4 * 6, lambda x: np.abs(x).max(-1, keepdims=True) / 126),
    "int4": (Int4(), 150 + 4 * 6, lambda x: np.abs(x).max(-1, keepdims=True) / 6.9),
    "lattice8": (Lattice(8, SIDE), 300 + 8, lambda x: SIDE / 2 + 1e-6),
    "lattice16": (Lattice(16, SIDE), 600 + 8, lambda x: SIDE / 2 + 1e-6),
}
every = pytest.mark.parametrize(("codec", "size", "bound"), CASES.values(), ids=CASES)


def numbers(shape=(6, 50), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def noise_of(codec, shape, seed=0):
    """What the codec draws for itself, or None."""
    return jax.jit(codec.noise, static_argnums=1)(jax.random.key(seed), shape)


@every
def test_jax_and_numpy_send_and_read_the_same(codec, size, bound):
    for shape in ((6, 50), (), (0, 3), (7,)):
        x, noise = numbers(shape), noise_of(codec, shape)
        here = codec.encode(x, None if noise is None else np.asarray(noise))
        there = jax.jit(codec.encode)(jnp.asarray(x), noise)
        for a, b in zip(here, there, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_array_equal(a, b)
        read = jax.jit(codec.decode)(there, jnp.asarray(x))
        assert isinstance(read, jax.Array) and read.dtype == x.dtype
        np.testing.assert_array_equal(codec.decode(here, x), read)


@every
def test_errors_keep_their_bound(codec, size, bound):
    x = numbers()
    noise = noise_of(codec, x.shape)
    got = codec.decode(codec.encode(x, None if noise is None else np.asarray(noise)), x)
    assert (np.abs(got - x) <= bound(x)).all() and (got != x).any()
    zeros = np.zeros_like(x)
    np.testing.assert_array_equal(codec.decode(codec.encode(zeros), zeros), zeros)


@every
def test_bytes_are_those_of_the_table(codec, size, bound):
    assert codecs.bytes_sent(codec, (6, 50)) == size
    assert sum(part.nbytes for part in codec.encode(numbers())) == size


def test_every_format_of_a_config_is_tested():
    tested = [codec for codec, *_ in CASES.values()]
    assert all(codec is None or codec in tested for codec in codecs.NAMED.values())
    sizes = {"float32": 1200, "bfloat16": 600, "int8": 324, "int4": 174}
    sizes |= {"lattice8": 308, "lattice16": 608}
    names = (*codecs.NAMED, *codecs.LATTICES)
    assert {name: codecs.bytes_sent(codecs.named(name), (6, 50)) for name in names} == sizes


# --- 8 and 4 bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=repr)
def test_rounding_by_chance_is_unbiased(codec):
    x = jnp.asarray(numbers((4, 50)))

    def there_and_back(key):
        return codec.decode(codec.encode(x, codec.noise(key, x.shape)), x)

    draws = np.asarray(jax.jit(jax.vmap(there_and_back))(jax.random.split(jax.random.key(0), 4000)))
    below, above = draws.min(0), draws.max(0)  # two neighbours among the numbers of the format
    assert all(len(np.unique(column)) <= 2 for column in draws.reshape(4000, -1).T)
    error = np.abs(draws.mean(0) - x) / np.where(above > below, above - below, 1)
    assert error.max() < 5 * 0.5 / np.sqrt(4000)


def test_int8_of_bfloat16_draws_in_float32():
    """A scale of 1 leaves whole numbers; in bfloat16 100 + 0.8 is 101."""
    x = jnp.full(200, 100.0, jnp.bfloat16).at[0].set(127)
    codes, scale = Int8().encode(x, noise_of(Int8(), (200,)))
    assert scale.tolist() == [1.0] and set(codes[1:].tolist()) == {100}


def test_int8_decodes_without_rounding():
    """Else a fused product on one side of a message moves the mean, further in every round."""
    x = jnp.asarray(numbers((40, 50)))
    codes, scale = parts = Int8().encode(x, noise_of(Int8(), x.shape))
    exact = np.asarray(codes, np.float64) * np.asarray(scale, np.float64)
    np.testing.assert_array_equal(Int8().decode(parts, x), exact)


def sent_by_int8(arrays, n=8):
    """What n replicas that hold the same arrays send, decoded: each (n, ...)."""
    schedule = topology.make("one_peer_exp", n)

    def one(_):
        return gossip.mix_coded(arrays, schedule, 0, "replica", Int8(), jax.random.key(0))[1]

    return jax.jit(jax.vmap(one, axis_name="replica"))(jnp.arange(n))


def test_replicas_and_arrays_are_rounded_by_different_chance():
    x = jnp.asarray(numbers((64,)))
    rows = np.concatenate(sent_by_int8([x, x]))
    assert len({row.tobytes() for row in rows}) == 16


def test_more_arrays_draw_no_more_often():
    """XLA for CPUs compiles a draw for longer than the rest of the coding of an array."""

    def draws(arrays):
        primitives = str(jax.make_jaxpr(sent_by_int8)([jnp.ones(64)] * arrays))
        return len(re.findall(r"= random_(bits|fold_in|split)", primitives))

    assert 0 < draws(1) == draws(9)


# --- the lattice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_a_lattice_is_the_published_formula_within_its_reach(bits):
    """Davies et al. 2021, in float64: s q round(y / (s q) - c / q) + s c is s round(x / s)."""
    rng = np.random.default_rng(0)
    s, q = 0.01, 2**bits
    lattice, x = Lattice(bits, s), rng.uniform(-50, 50, 5000)
    y = x + lattice.reach * rng.uniform(-1, 1, 5000)
    y[:2] = x[:2] + lattice.reach * np.array([1, -1]) * (1 - 1e-9)
    c = np.round(x / s).astype(int) % q
    published = s * q * np.round(y / (s * q) - c / q) + s * c
    message = lattice.encode(x)
    np.testing.assert_array_equal(message[0], c)
    np.testing.assert_allclose(lattice.decode(message, y), published, rtol=0, atol=1e-10)
    np.testing.assert_allclose(published, s * np.round(x / s), rtol=0, atol=1e-10)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_lattice_of_float32_reads_up_to_its_distance(bits):
    """Nearly s (q - 1) / 2 in each coordinate; rounding both sides took half a side of that."""
    x, lattice = jnp.asarray(numbers(20_000)), Lattice(bits, jnp.float32(2.0**-10))
    message = lattice.encode(x)
    for sign in (-1, 1):
        got = lattice.decode(message, x + sign * lattice.reach * (1 - 2**-8))
        assert np.abs(got - x).max() <= 0.51 * lattice.side


def test_beyond_its_reach_a_lattice_is_off_by_periods_and_the_checksum_says_so():
    rng = np.random.default_rng(1)
    lattice, x = Lattice(4, 0.1), rng.standard_normal(100)
    message = lattice.encode(x)
    points = np.round(x / 0.1)
    for trial in range(2000):
        y = x.copy()
        wrong = rng.choice(100, size=1 + trial % 100, replace=False)
        y[wrong] = 0.1 * points[wrong] + rng.uniform(0.81, 8.0, len(wrong)) * rng.choice([-1, 1])
        periods = (lattice.nearest(message, y)[1] - points) / 16
        assert np.isnan(lattice.decode(message, y)).all()
        np.testing.assert_array_equal(periods, np.round(periods))
        np.testing.assert_array_equal(np.flatnonzero(periods), np.sort(wrong))


def test_errors_in_a_pattern_do_not_cancel_in_the_checksum():
    """One period too many at i and i + 3, one too few at i + 1 and i + 2."""
    lattice, x = Lattice(4, 1.0), np.zeros(64)
    message = lattice.encode(x)
    for i in range(60):
        y = x.copy()
        y[i : i + 4] = 16 * np.array([1, -1, -1, 1])
        assert np.isnan(lattice.decode(message, y)).all()


def test_noise_is_uniform_over_places_and_over_keys():
    """And neighbours, and the same place under other keys, know nothing of each other."""
    keys = jax.random.split(jax.random.key(1), 2000)
    noise = np.asarray(jax.vmap(lambda key: Int8().noise(key, (128,)))(keys), np.float64)
    assert noise.min() >= 0 and noise.max() < 1
    apart = (noise - 0.5) * 12**0.5  # of mean 0 and variance 1
    for axis in (0, 1):
        sums = apart.sum(axis) / apart.shape[axis] ** 0.5
        assert np.abs(sums).max() < 5 and abs(np.square(sums).mean() - 1) < 0.3
        for lag in (1, 2, 16):
            pairs = apart.take(range(lag, apart.shape[axis]), axis)
            both = pairs * apart.take(range(apart.shape[axis] - lag), axis)
            assert abs(both.mean()) * both.size**0.5 < 5
    counts = np.bincount((256 * noise).astype(int).ravel(), minlength=256)
    assert np.square(counts - counts.mean()).mean() < 1.4 * counts.mean()


def test_a_lattice_with_noise_is_unbiased():
    rng = np.random.default_rng(4)
    lattice, x = Lattice(8, 2.0), np.full(200_000, 3.5)  # 1.75 sides
    sent = lattice.decode(lattice.encode(x, rng.random(x.shape)), x)
    assert set(np.unique(sent)) == {2.0, 4.0}
    assert sent.mean() == pytest.approx(3.5, abs=0.01)
    assert sent.var() == pytest.approx(4 * 0.75 * 0.25, rel=0.02)


def test_the_side_of_a_lattice():
    """2 y / (q - 1), but no less than 2^-21 of the largest number."""
    assert Lattice(8).reaching(0.51, 1.0).side == pytest.approx(2 * 0.51 / 255)
    assert Lattice(8).reaching(0.51, 1.0).reach == pytest.approx(0.51)
    assert Lattice(8).reaching(1e-12, 4.0).side == 2.0**-19
    assert Lattice(16).reaching(0.0, 0.0).side > 0
    for bits in (0, 17):
        with refuses("bits", bits):
            Lattice(bits)


# --- a part of the numbers ------------------------------------------------------------------------


def test_top_k_keeps_the_largest():
    x = jnp.asarray(numbers((40,)))
    got = TopK(0.1).decode(TopK(0.1).encode(x), x)
    largest = np.argsort(-np.abs(x))[:4]
    np.testing.assert_array_equal(np.flatnonzero(got), np.sort(largest))
    np.testing.assert_array_equal(got[largest], x[largest])


def test_numbers_of_chunks_that_cannot_be():
    for given in ({"density": 0}, {"chunk": 0}):
        ((name, value),) = given.items()
        with refuses(name, value):
            ChunkedTopK(**given)
