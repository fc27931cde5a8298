"""Hosts of benchmarks/hosts.sh with a Ray node in each."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from run_on_hosts import names_of_hosts

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "benchmarks" / "hosts.sh")
HEAD, PORT = "10.77.0.1", 6391


@contextlib.contextmanager
def hosts(count: int, mbit: float, cpus: int = 1) -> Iterator[None]:
    """Namespaces with links of this rate and a Ray node in each; all are removed at the end.

    The Ray nodes have the names of the hosts.
    """
    if names_of_hosts():
        sys.exit("there are hosts already, perhaps of another benchmark; benchmarks/hosts.sh down")
    subprocess.run([SCRIPT, "up", str(count), f"{mbit:g}mbit"], check=True, stdout=sys.stderr)
    try:
        for k, host in enumerate(names_of_hosts()):
            _start(k, host, cpus)
        yield
    finally:
        subprocess.run([SCRIPT, "down"], check=True)


def _start(k: int, host: str, cpus: int) -> None:
    where = [f"--address={HEAD}:{PORT}"]
    if k == 0:
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    command = ["ray", "start", *where, f"--node-ip-address=10.77.0.{k + 1}"]
    command += [f"--node-name={host}", f"--num-cpus={cpus}"]
    command += [f"--object-store-memory={128 * 2**20}"]
    with tempfile.TemporaryFile("w+") as words:
        streams = {"stdout": words, "stderr": words}
        if subprocess.run(inside(host, command), env=environment(), **streams).returncode:
            words.seek(0)
            sys.exit(f"Ray did not start on {host}:\n{words.read()[-2000:]}")


def inside(host: str, command: list[str]) -> list[str]:
    """A command that runs in this host."""
    return ["ip", "netns", "exec", host, *command]


def environment() -> dict[str, str]:
    """The environment in which programs on the hosts find Ray and this project."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", **tokens}
    own |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    own |= {"RAY_raylet_start_wait_time_s": "120"}
    return os.environ | own
