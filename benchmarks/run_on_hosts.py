"""Start a program in every host of benchmarks/hosts.sh, as processes of one jax.distributed run.

    benchmarks/hosts.sh up 4 200mbit
    python benchmarks/run_on_hosts.py train.py --config configs/quickstart.py --workdir runs/hosts
    python benchmarks/run_on_hosts.py benchmarks/step_time.py --batch_size 8
    benchmarks/hosts.sh down

The program gets ``--config.cluster.coordinator``, ``num_processes`` and ``process_id`` in addition
to its own flags. The output of process 0 is shown, and the last lines of the others if one fails.
When one fails, or at Ctrl-C or SIGTERM, all are killed.

Processes keep the memory that a step frees, as those with accelerators do (`KEPT_MEMORY`; a
GLIBC_TUNABLES in the environment replaces it).
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

COORDINATOR = "10.77.0.1:9876"
# Otherwise glibc gives the temporary memory of every step back to the kernel, which makes new pages
# of it for the next step.
KEPT_MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:"
    "glibc.malloc.mmap_threshold=100000000000:glibc.malloc.trim_threshold=100000000000"
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # the docstring has it
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a Python file and its flags")
    program = parser.parse_args(arguments).program
    if not program:
        parser.error("no program; say which Python file to start, such as train.py")
    hosts = names_of_hosts()
    if not hosts:
        parser.error("there are no hosts; make them with benchmarks/hosts.sh up 4 200mbit")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        words = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in hosts]
        processes = [start(k, host, len(hosts), program, words[k]) for k, host in enumerate(hosts)]
        try:
            failed = wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed:
            words[failed].seek(0)
            sys.stderr.write(f"--- {hosts[failed]} failed:\n{words[failed].read()[-3000:]}")
        return max(process.returncode != 0 for process in processes)


def names_of_hosts() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("djhost")]
    return sorted(names, key=lambda name: int(name.removeprefix("djhost")))


def start(index, host, count, program, words) -> subprocess.Popen:
    argv = ["ip", "netns", "exec", host, sys.executable, *program]
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


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
