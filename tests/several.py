"""Processes that a test starts, as a cluster would, and their output."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture
def start_process(tmp_path):
    """Starts processes that write to files, and kills those that still run at the end."""
    started = []

    def start(arguments, **variables):
        path = tmp_path / f"{len(started)}.txt"
        env = os.environ | {"JAX_NUM_CPU_DEVICES": "1"} | variables
        with path.open("w") as words:
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)], stdout=words, stderr=words, env=env
            )
        process.words = path
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


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
