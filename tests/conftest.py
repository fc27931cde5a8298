"""One process with eight simulated devices, and no tolerance for silent broadcasting."""

import gc
import os
import signal

# Eight CPU devices on two cores: each waiting device holds a thread of XLA's pool, which is as
# large as the core count, so a collective can wait for ever. Before jax starts.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # leave the user's alone

import hypothesis
import jax
import pytest
import tiny

# XLA's options for all programs of a process have no public name but the variable XLA_FLAGS, which
# is read once, and the tests of HLO need the options that users have.
from jax._src import compiler
from jax.experimental.compilation_cache import compilation_cache
from several import joins, start_process  # noqa: F401 (fixtures)
from supervised import supervised  # noqa: F401 (a fixture)

# A shell that starts the tests in the background lets them ignore Ctrl-C, nohup SIGHUP, and with
# them every process they start; the tests of these signals need them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # pytest's own frames are a hundred

# The same examples in every run, however slow: a test that fails, fails for everybody.
hypothesis.settings.register_profile(
    "alike",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("alike")

collect_ignore = ["data/weights/make.py"]  # needs torch; doctests are collected from every file

LONGEST = "peers multiprocess pipelines_ray supervise_lost_host docs checkpoint_killed models"
LONGEST += " pipelines hlo launchers memory_checkpoints train fsdp on_device faults any_optimizer"
LONGEST = {f"test_{name}": place for place, name in enumerate(LONGEST.split())}

# Programs of tests run for a few steps, for which LLVM's optimizations do not pay: XLA compiles the
# gradient of a GPT-2 layer in 0.7 instead of 14 s. They change no HLO, and so no message.
jax.config.update("jax_disable_most_optimizations", True)
# Without them, the former emitters of the CPU backend take a third of the newer ones' time, but
# fuse otherwise: `users_hlo` switches them off. jaxlib 0.12 has the newer ones only. To compile the
# parts of a small program in parallel takes longer than the whole.
FAST = {"xla_cpu_parallel_codegen_split_count": 1}
FAST |= {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 12) else {}
_options, _changed = compiler.get_compile_options, dict(FAST)


def _fast_options(*args, env_options_overrides=None, **kwargs):
    changed = _changed | (env_options_overrides or {})
    return _options(*args, env_options_overrides=changed, **kwargs)


compiler.get_compile_options = _fast_options

KEPT = 1000  # programs, before jax's caches are cleared
_programs: list[str] = []  # that this process compiled
_kept = 0  # of them, since the caches were cleared


def _note(event, _, fun_name="", **__):
    global _kept
    if event == "/jax/core/compile/backend_compile_duration":
        _programs.append(fun_name)
        _kept += 1


jax.monitoring.register_event_duration_secs_listener(_note)


def pytest_collection_modifyitems(items):
    """The longest files first, so that no worker idles at the end; a file keeps its order."""
    items.sort(key=lambda item: LONGEST.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish():
    """What was imported lives as long as the process: the collector need not look at it again.

    Tracing makes thousands of objects that live on, for which collections take a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """jax keeps 8192 of the calls it has compiled; full, it keeps no new one, and all are slow."""
    global _kept
    yield
    if _kept > KEPT:
        jax.clear_caches()
        _kept = 0


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
    """One for all workers of a session and the processes they start."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(shared / "cache")


@pytest.fixture(scope="module")
def compile_once(cache_folder):
    """Compiling takes most of a tiny run: done once for all runs of a session.

    Yields these settings, and those of fast compilation, as environment variables, for processes
    that a test starts.
    """
    wanted = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": cache_folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    variables = {name.upper(): str(value) for name, value in wanted.items()}
    options = " ".join(f"--{name}={str(value).lower()}" for name, value in FAST.items())
    with tiny.sharing():
        yield variables | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true", "XLA_FLAGS": options}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def users_hlo():
    """For what is read off a compiled program: it is the one that users have."""
    _changed.clear()
    yield
    _changed.update(FAST)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
