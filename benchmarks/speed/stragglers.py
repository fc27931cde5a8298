"""The time that algorithms lose to replicas that are slow, always or now and then.

    python benchmarks/speed/stragglers.py [--processes 8] [--steps 60]

Starts real processes, one per replica, that train nothing: the compute of a step is a sleep, and
the messages are those of the library, over gloo, of a small array. The processes need no cores, so
the benchmark measures waiting alone.

even       every step takes 50 ms on every replica.
slow       one replica in four takes twice as long, always.
now, then  50 ms on average, 20 ms of them drawn from an exponential distribution, each step anew.

The number is the time of a step, relative to 50 ms. "awc" sends parameters as they were before
the step, so that a neighbour waits only until the other has *begun* it; "atc" sends the result of
the step. In brackets, the prediction of the planner's simulator for the same compute times on a
network that takes no time. All-reduce waits for all replicas in every step.
"""

import argparse
import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax import gossip, topology
from decent_jax.planner import network, runtime, simulator

MEAN_S = 0.05
RANDOM = 0.4  # of the mean, exponentially distributed
SLOW = 2.0
CASES = ("even", "slow", "now, then")
ALGORITHMS = ("all_reduce", "complete", "ring", "bidirectional_ring", "one_peer_exp", "hypercube")


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--processes", type=int, default=8, help="replicas; a power of two")
    parser.add_argument("--steps", type=int, default=60, help="of each measurement")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)  # which one this is
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.process is not None:
        replica(parsed)
        return
    rows = [row | {"simulated": simulated(row, parsed.processes)} for row in measured(parsed)]
    print(table(rows))


# --- The measuring processes --------------------------------------------------------------------


def measured(parsed) -> list[dict]:
    """Starts the processes; the rows that process 0 prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, f"--processes={parsed.processes}", f"--port={port}"]
    command += [f"--steps={parsed.steps}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [*command, f"--process={k}"],
            env=environment,
            stdout=subprocess.PIPE if k == 0 else subprocess.DEVNULL,
            stderr=None if k == 0 else subprocess.DEVNULL,
            text=True,
        )
        for k in range(parsed.processes)
    ]
    try:
        words, _ = processes[0].communicate()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if processes[0].returncode:
        sys.exit("stragglers.py: a process failed; its output is above")
    lines = words.splitlines()  # gloo lists its peers there, too
    return [json.loads(line) for line in lines if line.startswith("{")]


def replica(parsed) -> None:
    """One process: goes through all measurements with the others."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{parsed.port}",
        parsed.processes,
        parsed.process,
        cluster_detection_method="deactivate",
    )
    # All-reduce has no choice of an order: gradients exist only after the pass.
    orders = {name: ("",) if name == "all_reduce" else ("awc", "atc") for name in ALGORITHMS}
    plans = [(name, combine) for name in ALGORITHMS for combine in orders[name]]
    mixes = {name: programs(name, parsed.processes) for name in ALGORITHMS}
    bar = tqdm(total=len(plans) * len(CASES), disable=parsed.process > 0, file=sys.stderr)
    for name, combine in plans:
        for case in CASES:
            bar.set_description(f"{name}, {case}")
            sleeps = MEAN_S * factors(case, parsed.processes, parsed.steps)[:, parsed.process]
            multihost_utils.sync_global_devices("begin")
            began = time.monotonic()
            run(mixes[name], sleeps, combine)
            own = np.array([time.monotonic() - began])
            seconds = float(multihost_utils.process_allgather(own).max()) / parsed.steps
            row = {"algorithm": name, "combine": combine, "case": case}
            row |= {"of_compute": seconds / MEAN_S, "steps": parsed.steps}
            if parsed.process == 0:
                print(json.dumps(row), flush=True)
            bar.update()
    jax.distributed.shutdown()


def programs(name: str, n: int) -> list:
    """A compiled round each, of a small array sharded over all processes, and that array."""
    mesh = jax.make_mesh((n,), ("replica",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("replica"))
    x = jax.make_array_from_callback((n, 8), sharding, lambda index: np.ones((1, 8), np.float32))
    if name == "all_reduce":
        bodies = [gossip.mean]
    else:
        schedule = topology.make(name, n)
        bodies = [
            functools.partial(gossip.mix, schedule=schedule, round=r)
            for r in range(schedule.period)
        ]
    on_mesh = [gossip.on_mesh(body, mesh, "replica") for body in bodies]
    return [(jax.jit(program).lower(x).compile(), x) for program in on_mesh]


def run(mixes: list, sleeps: np.ndarray, combine: str) -> None:
    """The steps of this replica; in the order "awc" messages travel while it sleeps."""
    with ThreadPoolExecutor(1) as thread:  # as `decent_jax.cpu.overlap` does it
        for t, seconds in enumerate(sleeps):
            mix, x = mixes[t % len(mixes)]
            slept = thread.submit(time.sleep, seconds)
            if combine != "awc":
                slept.result()
            jax.block_until_ready(mix(x))
            slept.result()


# --- What both use ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ShiftedExponential:
    """``shift + (1 - shift) Exp(1)``: a floor, and rare long interruptions."""

    shift: float

    def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
        return self.shift + (1 - self.shift) * rng.standard_exponential(shape)

    def exceeded(self, probability: np.ndarray) -> np.ndarray:
        return self.shift - (1 - self.shift) * np.log(probability)


def factors(case: str, n: int, steps: int) -> np.ndarray:
    """(steps, n) compute times relative to the mean; the same wherever they are asked for."""
    if case == "now, then":
        law = ShiftedExponential(1 - RANDOM)
        return law.sample(np.random.default_rng(0), (steps, n))
    return np.ones((steps, n)) * (slowness(n) if case == "slow" else 1)


def slowness(n: int) -> np.ndarray:
    return np.where(np.arange(n) % 4 == 1, SLOW, 1.0)


def simulated(row: dict, n: int) -> float:
    """The same by the planner's simulator, over many more steps."""
    far = np.full((n, n), 1e12)  # bytes per second
    free = network.from_matrices(np.zeros((n, n)), far, names=[f"p{k}/0" for k in range(n)])
    slow = row["case"] == "slow"
    law = ShiftedExponential(1 - RANDOM)
    workload = runtime.Workload(
        model_bytes=32.0,
        forward_s=0.0,
        backward_s=MEAN_S,
        compute=law if row["case"] == "now, then" else runtime.CONSTANT,
        slowness=tuple(slowness(n).tolist()) if slow else 1.0,
    )
    if row["algorithm"] == "all_reduce":
        algorithm = runtime.AllReduce()
    else:
        schedule = topology.make(row["algorithm"], n)
        algorithm = runtime.Gossip(schedule, combine=row["combine"], execution="plain")
    return simulator.simulate(free, workload, algorithm, steps=2000).step_s / MEAN_S


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [f"| algorithm | order | {' | '.join(CASES)} |", "|---|---|---|---|---|"]
    for k in range(0, len(rows), len(CASES)):
        cells = [f"{r['of_compute']:.2f} ({r['simulated']:.2f})" for r in rows[k : k + len(CASES)]]
        name, combine = rows[k]["algorithm"], rows[k]["combine"]
        lines.append(f"| {name} | {combine} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
