"""In-memory checkpoints: a run that died resumes from them as if nothing had failed."""

import errno
import itertools
import os
import shutil
import time
from types import SimpleNamespace
from typing import NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from decent_jax import replicas
from decent_jax.checkpoints import in_memory, shard_file
from decent_jax.checkpoints.executables import ExecutableCache, open_cache
from decent_jax.cluster import rendezvous
from decent_jax.cluster.supervise import PLACE
from decent_jax.ground.format import format_bytes
from decent_jax.monitor.goodput import Clock
from decent_jax.train import config as config_lib
from decent_jax.train import loop, saved_model, stepper
from decent_jax.train.config import parse
from decent_jax.train.experiment import open_experiment
from decent_jax.train.signals import Signals
from decent_jax.train.synchronous import Synchronous

pytestmark = pytest.mark.usefixtures("compile_once")

ARMS = {
    "accum_adam": {"algorithm": "accum_adam", "schedule": "one_peer_exp"},
    "diloco": {"algorithm": "diloco", "schedule": "complete", "mix_every": 4},
    "all_reduce": {"algorithm": "all_reduce"},
    "sharded": {"algorithm": "accum_adam", "mesh": {"devices": 8, "fsdp": 2}},
}


class Died(BaseException):
    """In place of SIGKILL: nothing is saved after it."""


class Dies(Signals):
    """The process dies after so many steps of the loop, which looks for signals once per step."""

    def __init__(self, steps):
        self._left = steps
        super().__init__()

    @property
    def received(self):
        self._left -= 1
        if self._left == 0:
            raise Died

    @received.setter
    def received(self, number):
        pass


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """A folder in place of /dev/shm."""
    monkeypatch.setattr(in_memory, "MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def configured(**changes):
    """In memory after 4, 8 and 12 steps, rows after 3, 6, 9 and 12, on disk at the end."""
    changes = {"recovery": {"every": 4}, "checkpoint": {"every": 0}, "log": {"every": 3}} | changes
    return tiny.waves(**changes)


def die(config, folder, steps=10):
    with pytest.raises(Died), open_experiment(parse(config), folder) as (experiment, work):
        runner = Synchronous(experiment, work)
        with runner.memory:
            loop.train(runner, work, signals=Dies(steps))


def everything(folder, step=12):
    return jax.tree.leaves(saved_model.load_replicas(folder, step).params)


def files_in(memory):
    return sorted(memory.glob("*/*/*/*.own"), key=lambda path: int(path.stem))


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["diloco", "sharded"])
def test_a_run_that_died_goes_on_bit_for_bit(arm, tmp_path, memory, capsys):
    """Model, optimizer, random state, data and the unfinished row; the files are then removed."""
    config = configured(**ARMS[arm])
    tiny.run(config, tmp_path / "undisturbed")
    die(config, tmp_path / "run")
    assert [path.stem for path in files_in(memory)] == ["4", "8"]
    capsys.readouterr()
    tiny.run(config, tmp_path / "run")
    assert "resuming after step 8" in capsys.readouterr().err
    assert tiny.measured(tmp_path / "run") == tiny.measured(tmp_path / "undisturbed")
    for one, other in zip(
        everything(tmp_path / "run"), everything(tmp_path / "undisturbed"), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert not files_in(memory)


class NeverLowered:
    """In place of a step, where the executables of all rounds are cached."""

    def lower(self, *args, **kwargs):
        raise AssertionError("a program was traced again")


def test_a_supervised_process_neither_traces_nor_compiles_what_the_one_before_had(
    tmp_path, memory, monkeypatch, supervised
):
    config = configured(**ARMS["accum_adam"])
    tiny.run(config, tmp_path / "undisturbed")
    die(config, tmp_path / "run")
    assert list(memory.glob("*/*/*/*.executable"))
    monkeypatch.setattr(stepper, "make_step", lambda *args: NeverLowered())
    tiny.run(config, tmp_path / "run")
    assert tiny.measured(tmp_path / "run") == tiny.measured(tmp_path / "undisturbed")
    assert not list(memory.glob("*/*/*/*.executable"))


@pytest.mark.slow
def test_the_executables_of_an_overlapped_step_are_cached_one_by_one(tmp_path, memory, supervised):
    """Two gradients or steps, two for each of the two rounds, and a step without a round."""
    changes = {"schedule": "one_peer_exp", "mix_every": 3, "outer": {"delay": 2}}
    config = configured(algorithm="noloco", mesh={"devices": 2}, **changes)

    def written():
        return {path.name: path.stat().st_mtime_ns for path in memory.glob("*/*/*/*.executable")}

    with harness.as_if(over_gloo=True):
        tiny.run(config, tmp_path / "undisturbed")
        die(config, tmp_path / "run", steps=6)
        first = written()
        die(config, tmp_path / "run", steps=2)
        assert written() == first
        tiny.run(config, tmp_path / "run")
    assert len(first) == 7
    assert tiny.measured(tmp_path / "run") == tiny.measured(tmp_path / "undisturbed")


def test_an_executable_from_the_cache_of_jax_is_not_cached_again(tmp_path, compile_once):
    """XLA for CPUs writes it without its kernels: what reads it fails when it is called."""
    x, new = np.arange(1000.0), time.time_ns() % 1e9  # no earlier run left it in the cache

    def get(folder):
        folder.mkdir()
        jax.clear_caches()
        lowered = jax.jit(lambda x: jnp.cumsum(jnp.where(x > 3, jnp.sin(x), new))).lower(x)
        cache = ExecutableCache(folder, devices=jax.devices()[:1])
        return cache.get("cumsum", lowered.compile)(x), list(folder.iterdir())

    first, written = get(tmp_path / "first")
    again, none = get(tmp_path / "again")
    assert written and not none
    np.testing.assert_array_equal(first, again)


def test_programs_stay_the_same_when_process_0_gets_another_port(tmp_path, supervised):
    placement = replicas.place(4, jax.devices()[:1])

    def get(port, compiled):
        config = configured(cluster={"coordinator": f"localhost:{port}"})
        return open_cache(parse(config).by_name, tmp_path, placement).get("twice", compiled)

    get(9876, jax.jit(lambda x: 2 * x).lower(1.0).compile)
    assert get(9877, lambda: pytest.fail("compiled again"))(1.0) == 2


def test_programs_of_another_supervisor_or_damaged_ones_are_compiled_again(
    tmp_path, memory, monkeypatch, supervised
):
    config = configured(**ARMS["all_reduce"])
    die(config, tmp_path / "run")
    (cached,) = memory.glob("*/*/*/*.executable")
    cached.write_bytes(cached.read_bytes()[:1000])
    die(config, tmp_path / "run", steps=2)
    assert [path.name for path in memory.glob("*/*/*/*.executable")] == [cached.name]
    assert cached.stat().st_size > 1000
    monkeypatch.setenv(rendezvous.SECRET, 32 * "t")
    die(config, tmp_path / "run", steps=2)
    assert len(list(memory.glob("*/*/*/*.executable"))) == 2


@pytest.mark.parametrize("step", [4, None])
def test_a_checkpoint_that_the_others_could_not_restore_is_never_taken_later(
    step, tmp_path, memory, monkeypatch
):
    """Its rows were removed, so that a run which went on from it would lack them."""
    config = configured()
    tiny.run(config, tmp_path / "undisturbed")
    die(config, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(in_memory, "common", lambda *held: step)
        die(config, tmp_path / "run", steps=2)
    assert [path.stem for path in files_in(memory)] == ([] if step is None else ["4"])
    tiny.run(config, tmp_path / "run")
    assert tiny.measured(tmp_path / "run") == tiny.measured(tmp_path / "undisturbed")


def test_a_newer_checkpoint_is_taken_instead(tmp_path, capsys):
    config = configured(checkpoint={"every": 9})
    die(config, tmp_path / "run", steps=11)
    capsys.readouterr()
    tiny.run(config, tmp_path / "run")
    assert "resuming after step 9" in capsys.readouterr().err


def damage(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: damage(path, -100),
        lambda path: path.write_bytes(path.read_bytes()[:50]),
    ],
    ids=["array", "cut"],
)
def test_a_damaged_file_is_named_and_the_one_before_it_taken(harm, tmp_path, memory, capsys):
    config = configured()
    die(config, tmp_path / "run")
    harm(files_in(memory)[-1])
    capsys.readouterr()
    tiny.run(config, tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("/8.own ") == 1 and "resuming after step 4" in said
    assert tiny.summary(tmp_path / "run")["steps"] == 12


def test_checkpoints_of_another_run_are_not_taken(tmp_path, memory, capsys):
    """Such as of one whose folder was removed."""
    config = configured()
    die(config, tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    capsys.readouterr()
    tiny.run(config, tmp_path / "run")
    said = capsys.readouterr().err
    assert "another run" in said and "resuming" not in said


def test_a_full_memory_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shard_file, "write", full)
    tiny.run(configured(), tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("no in-memory checkpoint") == 1 and "No space left" in said
    assert tiny.summary(tmp_path / "run")["steps"] == 12


@pytest.fixture(params=["missing", "small"])
def no_memory(request, memory, monkeypatch):
    if request.param == "missing":
        monkeypatch.setattr(in_memory, "MEMORY", memory / "nothing")
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000))


class Usage(NamedTuple):
    free: int


def test_the_memory_is_checked_before_anything_compiles(no_memory, tmp_path):
    config = configured()
    with (
        refused("recovery.every", 4),
        open_experiment(parse(config), tmp_path / "run") as (experiment, work),
    ):
        Synchronous(experiment, work)


@pytest.mark.parametrize("hosts", ["abbb", "baab"])
def test_processes_of_one_host_share_its_memory(hosts, tmp_path, memory, monkeypatch):
    """Space of their old files counts as free."""
    config = configured()
    with open_experiment(parse(config), tmp_path / "run") as (experiment, work):
        shapes = jax.eval_shape(lambda: stepper.init(experiment))
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        held = 1000 * (hosts.count(hosts[0]) - 1)
        for k in range(1, len(hosts)):
            if hosts[k] == hosts[0]:
                other = in_memory.folder_of(work.path).with_name(str(k))
                other.mkdir(parents=True)
                (other / "4.own").write_bytes(bytes(1000))
        monkeypatch.setattr(in_memory.cluster, "hosts", lambda: list(hosts))
        needed = 3 * size * hosts.count(hosts[0]) - held
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(needed - 1))
        with refused("recovery.every", 4):
            Synchronous(experiment, work)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(needed))
        Synchronous(experiment, work)


def test_a_run_that_did_not_ask_for_checkpoints_does_without(
    no_memory, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(PLACE, "0")
    tiny.run(configured(recovery={"every": -1}), tmp_path / "run")
    assert capsys.readouterr().err.count("no in-memory checkpoints") == 1


def test_a_supervised_run_chooses_the_interval(tmp_path, memory, monkeypatch, capsys):
    tiny.run(configured(recovery={"every": -1}), tmp_path / "alone")
    assert "in-memory" not in capsys.readouterr().err and not list(memory.iterdir())
    monkeypatch.setenv(PLACE, "a")
    signals, ticks = (
        tiny.SignalAfter(-1, 0),
        itertools.count(),
    )  # a checkpoint takes two, a step 10 s
    monkeypatch.setattr(in_memory, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    clock = Clock(lambda: 10.0 * signals.looks)
    config = configured(recovery={"every": -1}, log={"every": 1})
    with open_experiment(parse(config), tmp_path / "run") as (experiment, work):
        runner = Synchronous(experiment, work)
        with runner.memory:
            loop.train(runner, work, clock=clock, signals=signals)
    said = capsys.readouterr().err
    assert "every 20 steps" in said and "2e+03 ms each" in said
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(runner.stepper.shapes))
    assert f"take up to {format_bytes(3 * size)} in " in said


@pytest.mark.parametrize("changes", [{"steps": 3}, {"trainer": "pipelines"}, {"trainer": "peers"}])
def test_intervals_that_would_never_be_used_are_refused(changes):
    with refused("recovery.every", 4):
        config_lib.check(parse(configured(**changes)))  # as each room does
    config_lib.check(
        config_lib.parse(configured(steps=3, epochs=1.0))
    )  # which count instead of steps


# --- Which step all have --------------------------------------------------------------------------


@given(st.data())
def test_processes_that_are_one_checkpoint_apart_have_one_in_common(data):
    """`MemoryCheckpoints` writes one at a time, and the two before it stay."""
    newest = data.draw(st.integers(2, 50), label="checkpoints begun by those ahead")
    held = []
    for _ in range(data.draw(st.integers(1, 6), label="processes")):
        begun = newest - data.draw(st.booleans(), label="behind")
        own = [step for step in (begun - 2, begun - 1) if step >= 0]
        if data.draw(st.booleans(), label="finished"):
            own.append(begun)
        held.append(own)
    none = [[]] * len(held)
    found = in_memory.common(held, none, -1)
    assert found is not None and found >= newest - 2
    assert all(found in own for own in held)
    assert not any(all(step in own for own in held) for step in range(found + 1, newest + 1))
    assert in_memory.common(held, none, found) is None


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=6))
def test_the_rows_of_a_lost_host_come_from_the_next_process(held):
    """Of each process, whether it has its own rows of step 7, and those of the one before it."""
    own, others = ([[7] * has for has in column] for column in zip(*held, strict=True))
    found = in_memory.common(own, others, -1)
    n = len(held)
    assert (found == 7) == all(held[p][0] or held[(p + 1) % n][1] for p in range(n))
