"""One process with eight simulated devices, and no tolerance for silent broadcasting."""

import os

# Eight CPU devices on two cores: each waiting device holds a thread of XLA's pool, which is as
# large as the core count, so a collective can wait for ever (DESIGN 4.13). Before jax starts.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """Fast tests first: a mistake shows within seconds."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture
def mesh8():
    return jax.make_mesh((8,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
