"""Start a program on hosts that benchmarks/hosts.sh makes of this machine.

    benchmarks/hosts.sh up 4 200mbit
    python benchmarks/run_on_hosts.py train.py --config configs/quickstart.py --workdir runs/hosts
    python benchmarks/run_on_hosts.py benchmarks/speed/step_time.py --batch_size 8
    benchmarks/hosts.sh down

Processes of one jax.distributed run, one in every host. The program gets
``--config.cluster.coordinator``, ``num_processes`` and ``process_id`` in addition to its own flags.
The output of process 0 is shown, and the last lines of the others if one fails. When one fails, or
at Ctrl-C or SIGTERM, all are killed.

    python benchmarks/run_on_hosts.py --ray --mbit 26 --cpus 2 train.py
        --config configs/quickstart_peers.py --workdir runs/hosts
        --config.ray.address=10.77.0.1:6391 --config.ray.cpus=1

With ``--ray`` the program starts on the first of four hosts that have a Ray node each. It makes
the hosts and Ray, which are there while the program runs; SIGTERM and Ctrl-C reach it.

Both need root. Processes keep the memory that a step frees, as those with accelerators do
(`KEPT_MEMORY`; a GLIBC_TUNABLES in the environment replaces it).
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import commands

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "benchmarks" / "hosts.sh")
HEAD, PORT = "10.77.0.1", 6391  # of Ray
COORDINATOR = "10.77.0.1:9876"
# Otherwise glibc gives the temporary memory of every step back to the kernel, which makes new pages
# of it for the next step.
KEPT_MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:"
    "glibc.malloc.mmap_threshold=100000000000:glibc.malloc.trim_threshold=100000000000"
)


def main(arguments: list[str]) -> int:
    parser = commands.parser(__doc__)
    parser.add_argument("--ray", action="store_true", help="on the first of hosts with Ray")
    parser.add_argument("--hosts", type=int, default=4, help="with --ray")
    parser.add_argument("--mbit", type=float, default=200.0, help="with --ray: of a link, Mbit/s")
    parser.add_argument("--cpus", type=int, default=1, help="with --ray: reserved of a host")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a Python file and its flags")
    parsed = parser.parse_args(arguments)
    if not parsed.program:
        parser.error("no program; say which Python file to start, such as train.py")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if parsed.ray:
        with hosts(parsed.hosts, parsed.mbit, parsed.cpus):
            return run_on_first(parsed.program)
    names = names_of_hosts()
    if not names:
        parser.error("there are no hosts; make them with benchmarks/hosts.sh up 4 200mbit")
    return run_on_all(names, parsed.program)


def names_of_hosts() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("djhost")]
    return sorted(names, key=lambda name: int(name.removeprefix("djhost")))


# --- A process in every host ----------------------------------------------------------------------


def run_on_all(names: list[str], program: list[str]) -> int:
    """1 if a process failed, else 0."""
    with contextlib.ExitStack() as stack:
        words = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in names]
        processes = [start(k, name, len(names), program, words[k]) for k, name in enumerate(names)]
        try:
            failed = wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed:
            words[failed].seek(0)
            sys.stderr.write(f"--- {names[failed]} failed:\n{words[failed].read()[-3000:]}")
        return max(process.returncode != 0 for process in processes)


def start(index, host, count, program, words) -> subprocess.Popen:
    argv = inside(host, [sys.executable, *program])
    argv += [f"--config.cluster.coordinator={COORDINATOR}"]
    argv += [f"--config.cluster.num_processes={count}", f"--config.cluster.process_id={index}"]
    streams = {} if index == 0 else {"stdout": words, "stderr": words}
    environment = {"GLIBC_TUNABLES": KEPT_MEMORY, **os.environ}
    return subprocess.Popen(argv, env=environment, **streams)


def wait(processes: list[subprocess.Popen]) -> int | None:
    """Wait until all have ended or one has failed; returns the index of that one."""
    while True:
        codes = [process.poll() for process in processes]
        for k, code in enumerate(codes):
            if code:
                return k
        if None not in codes:
            return None
        time.sleep(0.1)


# --- Hosts for one program, and Ray on them -------------------------------------------------------


@contextlib.contextmanager
def hosts(count: int, mbit: float, cpus: int = 1, ray: bool = True) -> Iterator[None]:
    """Namespaces with links of this rate; all are removed at the end.

    ray: with a Ray node in each, of its name.
    """
    if names_of_hosts():
        sys.exit("there are hosts already, perhaps of another benchmark; benchmarks/hosts.sh down")
    subprocess.run([SCRIPT, "up", str(count), f"{mbit:g}mbit"], check=True, stdout=sys.stderr)
    try:
        for k, host in enumerate(names_of_hosts() if ray else ()):
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


def run_on_first(program: list[str]) -> int:
    """Its exit code."""
    command = inside(names_of_hosts()[0], [sys.executable, *program])
    process = subprocess.Popen(command, env=environment())
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal sends it to the program, too
        return process.wait()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
