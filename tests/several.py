"""Processes that a test starts, as a cluster would, and what they say."""

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
    """Starts processes that write to files; what is left of them at the end is killed."""
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
    """What a process said, without gloo's greeting and what it waited for."""
    lines = process.words.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("[Gloo]", "ready", "waiting")))


def cluster_flags(port: int, count: int, index: int) -> list[str]:
    flags = [f"--config.cluster.coordinator=localhost:{port}"]
    flags += [f"--config.cluster.num_processes={count}", f"--config.cluster.process_id={index}"]
    return flags
