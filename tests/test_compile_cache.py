"""Where compiled programs are kept, and that a second process finds them there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from decent_jax.train import xla

TWICE_SLOW = """
import jax, jax.numpy as jnp
from decent_jax.train import xla
import decent_jax.train.xla as module
module._MIN_SECONDS = 0.0
print(xla.use_cache())
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3))).block_until_ready()
print(sum(name == "/jax/compilation_cache/cache_hits" for name in hits))
"""


def call(home, **environment):
    """(folder, cache hits) of a process of its own."""
    variables = os.environ | {"XDG_CACHE_HOME": str(home), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    run = subprocess.run(
        [sys.executable, "-c", TWICE_SLOW],
        env=variables | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    folder, hits = run.stdout.split()
    return folder, int(hits)


def test_a_second_process_compiles_nothing(tmp_path):
    folder, hits = call(tmp_path)
    assert re.fullmatch(r"\S+/decent_jax/compiled/[\w.]+-[0-9a-f]{12}", folder) and hits == 0
    assert Path(folder).is_relative_to(tmp_path) and any(Path(folder).iterdir())
    same, hits = call(tmp_path)
    assert same == folder and hits >= 1


def test_the_users_own_settings_come_first(tmp_path):
    assert call(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false") == ("None", 0)
    own = tmp_path / "own"
    assert call(tmp_path, JAX_COMPILATION_CACHE_DIR=str(own)) == ("None", 0)
    assert not (tmp_path / "decent_jax").exists()


def test_a_home_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    assert call(tmp_path / "file") == ("None", 0)


def test_what_was_read_longest_ago_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(xla, "CACHE_LIMIT", 100)
    (tmp_path / "cpu").mkdir()
    for age, name in enumerate("abcde"):
        path = tmp_path / "cpu" / name
        path.write_bytes(bytes(30))
        os.utime(path, (1000 - age, 1000 - age))
    xla._prune(tmp_path)
    assert sorted(path.name for path in (tmp_path / "cpu").iterdir()) == ["a", "b"]
    xla._prune(tmp_path)  # below the limit
    assert len(list((tmp_path / "cpu").iterdir())) == 2


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="another system")
def test_other_cpus_have_another_folder(monkeypatch):
    here = xla._cpu()
    monkeypatch.setattr(Path, "read_text", lambda path: "flags : none")
    assert xla._cpu() != here


def test_nothing_is_kept_while_testing():
    assert not jax.config.jax_enable_compilation_cache
    assert xla.use_cache() is None
