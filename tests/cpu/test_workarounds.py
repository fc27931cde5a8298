"""`decent_jax.cpu`: what is done for CPUs alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from decent_jax import cpu

PROGRAMS = [
    (cpu.computed_once, (4,), "optimization_barrier"),
    (lambda x: cpu.conv(x, jnp.ones((3, 3, 2, 2))), (1, 8, 8, 2), "custom_vjp"),
]


@pytest.mark.parametrize(("function", "shape", "workaround"), PROGRAMS)
@pytest.mark.parametrize(
    ("kind", "platform", "for_cpus"),
    [("cpu", "cpu", True), ("TPU v5 lite", "tpu", False), ("NVIDIA H100", "cuda", False)],
)
def test_a_described_device_gets_no_workaround_for_cpus(
    function, shape, workaround, kind, platform, for_cpus
):
    """The host that compiles for it is a CPU."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        program = str(jax.make_jaxpr(function)(jnp.ones(shape)))
    assert (workaround in program) == for_cpus
