"""How compiling, memory and messages grow with the number of replicas, 1 to 64.

    python benchmarks/scaling.py [--largest 64] [--algorithms one_peer_exp,...] [--json FILE]

A process for each number of replicas n compiles every executable of a run, in two layouts: one
replica on each of n simulated devices, and all n on one device. A small GPT; nothing runs.

executables  one per round: log2 n for one_peer_exp.
compile s    of one executable, the median.
HLO          lines of one executable after XLA's optimizations: the size of the compiler's work.
memory MB    per replica: of the program of a device, over the replicas that it holds.
messages     collective operations per step, counted in the HLO (one replica per device).
MB sent      per replica and step, on average over rounds.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import commands
from tqdm import tqdm

from decent_jax.ground.command_line import output_file
from decent_jax.ground.format import split_outside_brackets

ALGORITHMS = "none,all_reduce,complete,ring,one_peer_exp,hypercube,alternating_exp_ring"
LAYOUTS = ("devices", "one device")
COLUMNS = ("executables", "compile s", "HLO", "memory MB", "messages", "MB sent")
_COLLECTIVE = re.compile(
    r" (collective-permute|all-reduce|all-gather|reduce-scatter|all-to-all)(-start)?\("
)


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--largest", type=int, default=64, help="replicas; a power of two")
    parser.add_argument("--algorithms", default=ALGORITHMS, help=f"some of {ALGORITHMS}")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="for the JSON lines")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # algorithm, layout, n
    parsed = parser.parse_args(arguments)
    if parsed.one:
        algorithm, layout, n = parsed.one
        print(json.dumps(measure(algorithm, layout, int(n))))
        return
    sizes = [2**k for k in range(parsed.largest.bit_length())]
    cases = [
        (algorithm, layout, n)
        for algorithm in split_outside_brackets(parsed.algorithms)
        for layout in LAYOUTS
        for n in sizes
        if n >= smallest(algorithm)
    ]
    rows = []
    for case in tqdm(cases, desc="compiling", file=sys.stderr):
        command = [sys.executable, __file__, "--one", *map(str, case)]
        run = subprocess.run(command, env=environment(case), capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"scaling.py: {' '.join(map(str, case))} failed:\n{run.stderr[-2000:]}")
        rows.append(json.loads(run.stdout.splitlines()[-1]))
    print("\n\n".join(table(rows, layout, sizes) for layout in LAYOUTS))
    if parsed.json:
        commands.write_rows(parsed.json, rows)


def smallest(algorithm: str) -> int:
    return 4 if algorithm == "alternating_exp_ring" else 1


def environment(case) -> dict[str, str]:
    """Enough threads for simulated devices, and no programs from before."""
    threads = str(max(4 * case[2], os.cpu_count() or 1))
    return os.environ | {"PJRT_NPROC": threads, "JAX_ENABLE_COMPILATION_CACHE": "false"}


def measure(algorithm: str, layout: str, n: int) -> dict:
    """One row; sets up jax, so one process makes one row."""
    import jax
    import numpy as np
    from variant import Variant

    from decent_jax.cluster import start as cluster
    from decent_jax.train import config as config_lib
    from decent_jax.train import default_config
    from decent_jax.train.xla import memory_of

    config = default_config("language_modeling")
    config.data.path = "stdlib"
    config.model.update(layers=2, heads=2, width=64, context=64, bias=False, dtype="float32")
    config.num_replicas = config.batch_size = n
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n if layout == "devices" else 1)
    if algorithm == "all_reduce":
        config.algorithm = "all_reduce"
    elif algorithm != "none":
        config.schedule, config.local_size = algorithm, 2
    config_lib.validate(config)
    cluster.start(config)
    gossips = algorithm not in ("none", "all_reduce")
    rounds = range(config_lib.make_schedule(config).period) if gossips else [None]
    with tempfile.TemporaryDirectory() as folder:
        variant = Variant(config, Path(folder), rounds, jax.devices())
    texts = [step.as_text() for step in variant.steps]
    held = n if layout == "one device" else 1
    messages = [len(_COLLECTIVE.findall(text)) for text in texts]
    sent = 0.0
    if gossips:
        sent = variant.schedule.bytes_sent(variant.model_bytes)
    elif algorithm == "all_reduce":
        sent = 2 * (n - 1) / n * variant.model_bytes
    return {
        "algorithm": algorithm,
        "layout": layout,
        "num_replicas": n,
        "executables": len(texts),
        "compile s": statistics.median(variant.compile_s),
        "HLO": int(np.median([text.count("\n") for text in texts])),
        "memory MB": max(sum(memory_of(step)) for step in variant.steps) / held / 1e6,
        "messages": int(np.median(messages)),
        "MB sent": sent / 1e6,
    }


def table(rows: list[dict], layout: str, sizes: list[int]) -> str:
    """Markdown of a layout: a line per algorithm and column, a number for each n."""
    lines = [f"| {layout} | | {' | '.join(f'n = {n}' for n in sizes)} |"]
    lines.append("|---" * (2 + len(sizes)) + "|")
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        own = {
            r["num_replicas"]: r
            for r in rows
            if (r["algorithm"], r["layout"]) == (algorithm, layout)
        }
        for column in COLUMNS:
            cells = [f"{own[n][column]:.3g}" if n in own else "" for n in sizes]
            lines.append(f"| {algorithm} | {column} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
