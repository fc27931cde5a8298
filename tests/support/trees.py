"""Trees of arrays compared leaf by leaf."""

import jax
import numpy as np


def assert_equal(got, wanted):
    """Bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def assert_close(got, wanted, rtol=1e-5, atol=1e-6):
    """But for the rounding of programs compiled apart."""

    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)

    jax.tree.map(close, got, wanted)
