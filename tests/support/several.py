"""Processes that a test starts, as a cluster would, and their output."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import psutil
import pytest
from jax._src import xla_bridge


def free_port() -> int:
    """A port for a process that begins to listen seconds later.

    It lies below the ports that Linux gives to connections and to those who ask for any port, and
    above those of Ray's workers, so that nobody takes it meanwhile.
    """
    while True:
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("localhost", random.randrange(20_000, 32_768)))
            return tried.getsockname()[1]


@contextlib.contextmanager
def starting(folder):
    """Starts processes that write to files in it, and kills those that still run at the end."""
    started = []

    def start(arguments, **variables):
        path = folder / f"{len(started)}.txt"
        env = os.environ | {"JAX_NUM_CPU_DEVICES": "1"} | variables
        with path.open("w") as words:
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)], stdout=words, stderr=words, env=env
            )
        process.words = path
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture
def start_process(tmp_path):
    """See `starting`."""
    with starting(tmp_path) as start:
        yield start


@pytest.fixture
def joins(monkeypatch):
    """For a test that calls `decent_jax.cluster.start`: its settings end with the test."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)  # by these tests
    collectives = jax.config.values["jax_cpu_collectives_implementation"]
    yield
    jax.config.update("jax_cpu_collectives_implementation", collectives)


def until(true, *processes, seconds: float = 300) -> None:
    """Wait until something is true while these run; else show what they said."""
    ends = time.monotonic() + seconds
    while not true():
        alive = all(process.poll() is None for process in processes)
        if not alive or time.monotonic() > ends:
            words = "\n".join(process.words.read_text()[-3000:] for process in processes)
            pytest.fail(words or "nothing happened")
        time.sleep(0.05)


def wait_for_rows(group, workdir, count: int) -> None:
    """Until the run's metrics.jsonl has ``count`` rows."""
    path = workdir / "metrics.jsonl"
    until(lambda: path.exists() and path.read_text().count("\n") >= count, *group)


def children_of(process) -> list[psutil.Process]:
    """Its children, and theirs."""
    return psutil.Process(process.pid).children(recursive=True)


def by_output(process) -> dict[Path, psutil.Process]:
    """Its children, and theirs, by the file or pipe to which they print."""
    found = {}
    for child in children_of(process):
        with contextlib.suppress(psutil.Error, OSError):
            found[Path(os.readlink(f"/proc/{child.pid}/fd/1"))] = child
    return found


def lives(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended may wait long for its new parent to notice."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def nothing_is_left(children) -> None:
    """All of these end soon."""
    until(lambda: not any(map(lives, children)), seconds=120)


def finish(group, codes: list[int], timeout: float = 300) -> str:
    """The output of all processes, which must end in time with these exit codes."""
    end = time.monotonic() + timeout
    found = [process.wait(timeout=max(end - time.monotonic(), 0.1)) for process in group]
    words = "\n".join(process.words.read_text() for process in group)
    assert found == codes, words
    return words


def said(process) -> str:
    """A process's output without gloo's greeting, "waiting for", and jax's note on recovery."""
    lines = process.words.read_text().splitlines(keepends=True)
    lines = [line for line in lines if not line.startswith(("[Gloo]", "ready", "waiting"))]
    return "".join(line for line in lines if "experimental recoverable task" not in line)


def slurm(port: int, count: int, index: int) -> dict[str, str]:
    """The variables that srun sets, for `count` processes of this machine."""
    common = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    own = {"SLURM_NTASKS": str(count), "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
    return common | own | {"JAX_COORDINATOR_PORT": str(port)}


def cluster_flags(port: int, count: int, index: int) -> list[str]:
    flags = [f"--config.cluster.coordinator=localhost:{port}"]
    flags += [f"--config.cluster.num_processes={count}", f"--config.cluster.process_id={index}"]
    return flags
