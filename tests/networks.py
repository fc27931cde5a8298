"""What tests of networks share: parameters that compile nothing, and how close is equal."""

from functools import partial

import jax
import numpy as np

SPREADS = {"kernel": 1.5, "embedding": 1.5, "scale": 0.3, "bias": 0.3}


def shapes_of(module, config):
    """What ``module.init`` returns, as shapes."""
    return jax.eval_shape(partial(module.init, config), jax.random.key(0))


def drawn(module, config, seed=9, spreads=SPREADS):
    """Parameters that NumPy draws: all of them matter, and attention is far from uniform.

    Matrices spread by ``spread * columns ** -0.5``, biases around 0 and scales around 1.
    """
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        kind = path[-1].key
        columns = shape.shape[-1] if kind in ("kernel", "embedding") else 1
        noise = spreads[kind] * columns**-0.5 * rng.normal(size=shape.shape)
        return np.float32(noise + (kind == "scale"))

    return jax.tree_util.tree_map_with_path(draw, shapes_of(module, config))


def assert_close(got, wanted, rtol=1e-5):
    """Each array of a tree differs by at most ``rtol`` of the largest number in it."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.max(np.abs(g - w)) <= rtol * np.max(np.abs(w))
