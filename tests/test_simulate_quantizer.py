"""The quantizer of SwarmSGD: exact within reach, and beyond it wrong as often as it has to be."""

import numpy as np
import pytest

from decent_jax.simulate import LatticeQuantizer


@pytest.mark.parametrize("colours", [2, 16, 256, 2**16])
def test_decoding_within_reach_is_rounding(colours):
    rng = np.random.default_rng(0)
    quantizer = LatticeQuantizer(0.01, colours)
    x = rng.uniform(-50, 50, 5000)
    key = x + quantizer.reach * rng.uniform(-1, 1, 5000)
    key[:2] = x[:2] + quantizer.reach * np.array([1, -1]) * (1 - 1e-9)
    message, sent = quantizer.encode(x)
    decoded = quantizer.decode(message, key)
    assert decoded.ok and np.array_equal(decoded.value, sent)
    np.testing.assert_allclose(sent, 0.01 * np.round(x / 0.01), rtol=0, atol=1e-12)
    assert np.abs(sent - x).max() <= 0.005 + 1e-12
    assert message.colours.max() == colours - 1
    assert quantizer.bits(5000) == 5000 * np.log2(colours) + 64
    # the formula as it is published
    c, s, q = message.colours, 0.01, colours
    published = s * q * np.round(key / (s * q) - c / q) + s * c
    np.testing.assert_allclose(decoded.value, published, rtol=0, atol=1e-10)


def test_beyond_reach_it_is_off_by_multiples_and_the_checksum_says_so():
    rng = np.random.default_rng(1)
    quantizer = LatticeQuantizer(0.1, 16)
    x = rng.standard_normal(100)
    message, sent = quantizer.encode(x)
    for trial in range(2000):
        key = x.copy()
        wrong = rng.choice(100, size=1 + trial % 100, replace=False)
        far = rng.uniform(0.81, 8.0, len(wrong)) * rng.choice([-1, 1], len(wrong))
        key[wrong] = sent[wrong] + far
        decoded = quantizer.decode(message, key)
        off = (decoded.value - sent) / (0.1 * 16)
        assert not decoded.ok
        np.testing.assert_allclose(off, np.round(off), rtol=0, atol=1e-9)
        assert np.array_equal(np.flatnonzero(np.round(off)), np.sort(wrong))


@pytest.mark.parametrize(("colours", "percent"), [(256, 0.098), (16, 1.56)])
def test_fail_rate_up_to_half_the_period(colours, percent):
    """1 / (4 q); of four million coordinates 2% (5% for q = 256) is four standard deviations."""
    rng = np.random.default_rng(3)
    quantizer = LatticeQuantizer(1.0, colours)
    x = rng.uniform(-1000, 1000, 4_000_000)
    key = x + rng.uniform(0, colours / 2, x.size) * rng.choice([-1, 1], x.size)
    message, sent = quantizer.encode(x)
    rate = np.mean(quantizer.decode(message, key).value != sent)
    assert rate == pytest.approx(1 / (4 * colours), rel=0.02 if colours == 16 else 0.05)
    assert 100 / (4 * colours) == pytest.approx(percent, rel=0.01)


def test_stochastic_rounding_is_unbiased():
    rng = np.random.default_rng(4)
    quantizer = LatticeQuantizer(2.0, stochastic=True)
    x = np.full(200_000, 3.5)  # 1.75 steps
    _, sent = quantizer.encode(x, rng)
    assert set(np.unique(sent)) == {2.0, 4.0}
    assert sent.mean() == pytest.approx(3.5, abs=0.01)
    assert sent.var() == pytest.approx(4 * 0.75 * 0.25, rel=0.02)
    with pytest.raises(ValueError, match="needs rng"):
        quantizer.encode(x)


def test_the_checksum_is_exact_and_wraps():
    long, short = LatticeQuantizer(1.0), LatticeQuantizer(1.0)
    long.checksum(np.zeros(1000, np.int64))
    quotient = np.random.default_rng(5).integers(-(2**40), 2**40, 101)
    a = short._multipliers_of(101).tolist()
    wanted = sum(one * int(z) for one, z in zip(a, quotient, strict=True)) % 2**32
    assert int(short.checksum(quotient)) == wanted == int(long.checksum(quotient))
    assert all(one % 2 for one in a) and len(set(a)) == 101


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LatticeQuantizer(0.0), "step must be"),
        (lambda: LatticeQuantizer(np.nan), "step must be"),
        (lambda: LatticeQuantizer(1.0, 100), "power of two"),
        (lambda: LatticeQuantizer(1.0).encode(np.array([np.nan])), "must be finite"),
    ],
)
def test_quantizer_refuses(make, words):
    with pytest.raises(ValueError, match=words):
        make()
