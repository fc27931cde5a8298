"""Start a program on the first of four hosts of benchmarks/hosts.sh that have a Ray node each.

    python benchmarks/ray_hosts.py --mbit 26 --cpus 2 train.py --config configs/quickstart_peers.py
        --workdir runs/hosts --config.peers.address=10.77.0.1:6391 --config.peers.cpus=1

Hosts and Ray are there while the program runs; SIGTERM and Ctrl-C reach it. Needs root.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import commands
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


def main(arguments: list[str]) -> int:
    parser = commands.parser(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of a link, Mbit/s")
    parser.add_argument("--cpus", type=int, default=1, help="what Ray reserves on a host at most")
    parser.add_argument("program", nargs="...", help="a Python file and its flags")
    parsed = parser.parse_args(arguments)
    if not parsed.program:
        parser.error("no program; say which Python file to start, such as train.py")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with hosts(parsed.hosts, parsed.mbit, parsed.cpus):
        command = inside(names_of_hosts()[0], [sys.executable, *parsed.program])
        process = subprocess.Popen(command, env=environment())
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal sends it to the program, too
            return process.wait()
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
