"""One process with eight simulated devices, and no tolerance for silent broadcasting."""

import os
import signal

# Eight CPU devices on two cores: each waiting device holds a thread of XLA's pool, which is as
# large as the core count, so a collective can wait for ever (DESIGN 4.13). Before jax starts.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # leave the user's alone

import jax
import pytest
import tiny
from jax.experimental.compilation_cache import compilation_cache
from several import start_process  # noqa: F401 (a fixture)

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them every
# process they start; the tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

_programs: list[str] = []  # that this process compiled


def _note(event, _, fun_name="", **__):
    if event == "/jax/core/compile/backend_compile_duration":
        _programs.append(fun_name)


jax.monitoring.register_event_duration_secs_listener(_note)


def pytest_collection_modifyitems(items):
    """Fast tests first, in every file: a mistake shows within seconds."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """jax keeps 8192 of the calls it has compiled; full, it keeps no new one, and all are slow."""
    yield
    jax.clear_caches()


@pytest.fixture
def programs():
    """The names of the programs compiled since the test began: ``jit(f)``, one for each time."""
    _programs.clear()
    return _programs


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A prepared folder of a few kilobytes, see `tiny.write_data`."""
    return tiny.write_data(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def compile_once(cache_folder):
    """Compiling takes most of a tiny run: done fast, and once for all runs of a session.

    Yields the same settings as environment variables, for processes that a test starts.
    """
    wanted = {
        "jax_disable_most_optimizations": True,
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": cache_folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield {name.upper(): str(value) for name, value in wanted.items()}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def mesh8():
    return jax.make_mesh((8,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
