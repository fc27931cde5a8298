"""Which of XLA's options a step is compiled with."""

import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from decent_jax import replicas
from decent_jax.train import compiler_options


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    compiler_options.known.cache_clear()


def on(platform, fsdp=1):
    """A placement, as far as the options look at it."""
    devices = np.array([SimpleNamespace(platform=platform)] * fsdp)
    return SimpleNamespace(mesh=SimpleNamespace(devices=devices), fsdp=fsdp)


def test_none_on_cpus():
    assert compiler_options.of_step(replicas.place(4, jax.devices()[:4])) == {}


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_xla_knows_all_of_those_for_gpus(platform):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler_options.of_step(on(platform)) == compiler_options.FOR_GPUS


def test_none_where_a_replica_has_several_gpus():
    assert compiler_options.of_step(on("gpu", fsdp=2)) == {}


def test_the_user_goes_first(monkeypatch):
    taken, *others = compiler_options.FOR_GPUS
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x --{taken}=false")
    assert list(compiler_options.of_step(on("gpu"))) == others


def test_an_option_that_is_gone_is_left_out_with_a_word(monkeypatch):
    monkeypatch.setitem(compiler_options.FOR_GPUS, "xla_gpu_no_such_option", True)
    with pytest.warns(UserWarning, match=r"does not know xla_gpu_no_such_option: messages may"):
        options = compiler_options.of_step(on("gpu"))
    assert "xla_gpu_no_such_option" not in options and len(options) == 2


def test_a_wrong_value_is_an_error():
    name = "xla_gpu_experimental_parallel_collective_overlap_limit"
    with pytest.raises(jax.errors.JaxRuntimeError, match=name):
        compiler_options.known(name, "many")
