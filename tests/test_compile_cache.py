"""Where compiled programs are kept, and that a second process finds them there."""

import os
import subprocess
import sys
from pathlib import Path

import jax

from decent_jax.train import xla

TWICE_SLOW = """
import jax, jax.numpy as jnp
from decent_jax.train import xla
xla._MIN_SECONDS = 0.0
print(xla.use_cache())
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3))).block_until_ready()
print(sum(name == "/jax/compilation_cache/cache_hits" for name in hits))
"""


def call(home):
    """(folder, cache hits) of a process of its own."""
    variables = {"XDG_CACHE_HOME": str(home), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    variables = os.environ | variables
    variables.pop("JAX_COMPILATION_CACHE_DIR", None)  # a user's own would come first
    argv = [sys.executable, "-c", TWICE_SLOW]
    said = subprocess.check_output(argv, env=variables, text=True)
    folder, hits = said.split()
    return folder, int(hits)


def test_a_second_process_compiles_nothing(tmp_path):
    folder, hits = call(tmp_path)
    assert Path(folder) == tmp_path / "decent_jax" / "compiled" and hits == 0
    assert any(Path(folder).iterdir())
    same, hits = call(tmp_path)
    assert same == folder and hits >= 1


def test_the_users_own_settings_come_first():
    """No cache, as in these tests, or a folder of the user's own."""
    assert xla.use_cache() is None
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", "/my/own")
    try:
        assert xla.use_cache() is None and jax.config.jax_compilation_cache_dir == "/my/own"
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
        jax.config.update("jax_compilation_cache_dir", None)


def test_what_was_read_longest_ago_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(xla, "CACHE_LIMIT", 100)
    for age, name in enumerate("abcde"):
        path = tmp_path / name
        path.write_bytes(bytes(30))
        os.utime(path, (1000 - age, 1000 - age))
    for _ in range(2):  # the second time it is below the limit
        xla._prune(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
