"""A fixture: this process, as if a supervisor had started it."""

import contextlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from decent_jax.cluster import rendezvous
from decent_jax.cluster.supervise import PLACE


@pytest.fixture
def supervised(monkeypatch):
    monkeypatch.setenv(PLACE, "0")
    monkeypatch.setenv(rendezvous.SECRET, 32 * "s")
    with no_cache():
        yield


@contextlib.contextmanager
def no_cache():
    """Of jax: executables that come from there are not cached again."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()
