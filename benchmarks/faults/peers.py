"""Peers beside synchronous programs: the tables of docs/peers.md.

    python benchmarks/faults/peers.py slow|links [--out FOLDER] [--seconds 20]

Each run is one that a user would start. A row per run goes to FOLDER/NAME.jsonl; runs that have a
row there are not made again, so an interrupted benchmark continues. At the end the table is
printed, with the planner's prediction for the synchronous programs.

slow    one host in four computes 2 or 10 times slower. Links of 1 Gbit/s.
links   requests after H steps, float32 and 8 bits, on links of --mbit between --hosts.

They start `train.py` on a Ray cluster of network namespaces (benchmarks/hosts.sh, four if
--hosts does not say otherwise) with one peer each, or `run_on_hosts.py train.py` on the same hosts,
which needs root. There are fewer cores than hosts, so computing is a sleep of 0.2 s (sleeping.py):
they measure waiting and the cost of the messages themselves. A step alone is that of peers that
never average.
"""

import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from benchmarks.run_on_hosts import HEAD, PORT, ROOT, environment, hosts, inside, names_of_hosts
from decent_jax import topology
from decent_jax.ground.run_folder import read_metrics
from decent_jax.planner import network, runtime, simulator

COMPUTE_S, SIZE = 0.2, 500_000  # of a step, seconds; parameters of a message
NEVER = 10**6  # steps between questions
SLEEPING = str(ROOT / "benchmarks" / "faults" / "sleeping.py")
PEERS = {
    "algorithm": "swarm",
    "schedule": "random_matching",
    "trainer": "peers",
    "ray.address": f"{HEAD}:{PORT}",
    "ray.cpus": 1,
    "peers.restarts": 1000,
}
PROGRAMS: dict[str, dict[str, Any]] = {
    "peers": PEERS,
    "one_peer_exp": {"algorithm": "decentralized_sgd", "schedule": "one_peer_exp"},
    "all_reduce": {"algorithm": "all_reduce"},
}


# --- The runs on hosts, and what is measured of each ----------------------------------------------


def cases_of(table: str, parsed) -> list[dict[str, Any]]:
    """The runs of a table: hosts, the rate of their links in Mbit/s, and fields of the config."""
    even = {"hosts": parsed.hosts, "mbit": 1000 if table == "slow" else parsed.mbit}
    alone = even | {"program": "peers", "mix_every": NEVER}
    if table == "slow":
        return [alone] + [
            even | {"program": program, "data.slow": factor, "mix_every": 4 if peers else 1}
            for program, peers in ((name, name == "peers") for name in PROGRAMS)
            for factor in ("", "1:2", "1:10")
        ]
    return [
        alone,
        *(
            even | {"program": "peers", "mix_every": every, "codec": codec}
            for every in (1, 4, 8)
            for codec in ("float32", "lattice8")
        ),
        even | {"program": "one_peer_exp"},
        even | {"program": "all_reduce"},
    ]


def flags_of(hosts: int, workdir: Path, fields: dict[str, Any]) -> list[str]:
    """Of train.py, for the task that sleeps, with a replica on each host."""
    fields = {"num_replicas": hosts, "batch_size": hosts} | fields
    flags = ["--config", SLEEPING, "--workdir", str(workdir)]
    return flags + [f"--config.{name}={value}" for name, value in fields.items()]


def measured(case: dict[str, Any], folder: Path, seconds: float) -> dict[str, Any]:
    """Make a run, stop it after ``seconds`` of training, and read what it wrote."""
    own = {"program", "hosts", "mbit"}
    fields = PROGRAMS[case["program"]] | {k: v for k, v in case.items() if k not in own}
    workdir = folder / "run"
    with started(case, flags_of(case["hosts"], workdir, fields), folder) as process:
        wait_for_rows(process, workdir, folder)
        watch(process, folder, seconds)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
    return steps_of(workdir, case["hosts"], case["program"] == "peers")


def steps_of(workdir: Path, hosts: int, peers: bool) -> dict[str, Any]:
    """Seconds of a step of each peer, or of the program; and averages of a peer per step."""
    if not peers:
        return {"step_s": {"run": step_s(workdir)}}
    rows = [row for row in read_metrics(workdir) if row.get("peers/live") == hosts]
    if len(rows) < 2:
        return {"step_s": {}}
    last = {name: rows[-1][name] - rows[0][name] for name in rows[0] if name in rows[-1]}
    ranks = sorted(path.name for path in (workdir / "peers").glob("[0-9]*"))
    seconds = {}
    for rank in ranks:
        made = max(last[f"peers/{rank}/steps"], 1)
        seconds[rank] = step_s(workdir / "peers" / rank) or last["perf/wall_time_s"] / made
    made = sum(last[f"peers/{rank}/steps"] for rank in ranks)
    names = ("averaged", "declined", "undecoded", "lost")
    return {"step_s": seconds} | {name: last[f"peers/{name}"] / made for name in names}


def step_s(folder: Path) -> float | None:
    """Seconds of a step by the rows of a run after the first two; None: too few."""
    rows = [row for row in read_metrics(folder) if "perf/wall_time_s" in row][2:]
    if len(rows) < 2:
        return None
    took = rows[-1]["perf/wall_time_s"] - rows[0]["perf/wall_time_s"]
    return took / (rows[-1]["step"] - rows[0]["step"])


@contextlib.contextmanager
def started(case, flags: list[str], folder: Path) -> Iterator[subprocess.Popen]:
    """`train.py` on the hosts; killed at the end, with everything that it started."""
    names = names_of_hosts()
    train = [str(ROOT / "train.py"), *flags]
    if case["program"] == "peers":
        command = inside(names[0], [sys.executable, *train])
    else:
        command = [sys.executable, str(ROOT / "benchmarks" / "run_on_hosts.py"), *train]
    with (folder / "words.txt").open("w") as words:
        process = subprocess.Popen(command, env=environment(), stdout=words, stderr=words)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_rows(process: subprocess.Popen, workdir: Path, folder: Path) -> None:
    ends = time.monotonic() + 120
    while not commands.last_step(workdir):
        if time.monotonic() > ends or process.poll() is not None:
            sys.exit(f"the run did not begin:\n{(folder / 'words.txt').read_text()[-3000:]}")
        time.sleep(0.1)


def watch(process: subprocess.Popen, folder: Path, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        sys.exit(f"the run ended:\n{(folder / 'words.txt').read_text()[-3000:]}")


def pids_of(host: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


# --- The tables -----------------------------------------------------------------------------------


def predicted(row: dict[str, Any], alone_s: float) -> float:
    """Seconds of a step of a synchronous program, by the planner; ``alone_s``: without messages."""
    n = row["hosts"]
    slow = dict(pair.split(":") for pair in row.get("data.slow", "").split(",") if pair)
    factors = [float(slow.get(str(k), 1.0)) for k in range(n)]
    # The rest of a step, which is no sleep, is as fast everywhere.
    sleeps = [(alone_s + COMPUTE_S * (factor - 1)) / alone_s for factor in factors]
    link = network.Link(100e-6, row["mbit"] * 1e6 / 8)
    between = network.cluster([1] * n, network.Link(5e-6, 300e9), link)
    work = runtime.Workload(4.0 * SIZE, alone_s / 3, 2 * alone_s / 3, slowness=tuple(sleeps))
    algorithm: Any = runtime.AllReduce(bucket_bytes=float("inf"))
    if row["program"] != "all_reduce":
        algorithm = runtime.Gossip(topology.make(row["program"], n), execution="plain")
    return simulator.simulate(between, work, algorithm, steps=400).step_s


def waiting_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    alone = {(r["hosts"], r["mbit"]): r for r in rows if r.get("mix_every") == NEVER}
    heads = ["hosts", "Mbit/s", "program", "host 1 slower", "H", "format"]
    heads += ["a fast host's step, of alone", "planner"]
    heads += ["examples of all, of each alone", "averages per step"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        base = statistics.median(alone[row["hosts"], row["mbit"]]["step_s"].values())
        n, peers = row["hosts"], row["program"] == "peers"
        steps = sorted(row["step_s"].values())
        slowness = float(row.get("data.slow", "").rpartition(":")[2] or 1)
        ideal = (n - 1) / base + 1 / (base + (slowness - 1) * COMPUTE_S)
        rate = sum(1 / s for s in steps) if peers else n / steps[0]
        every = "never" if row.get("mix_every") == NEVER else str(row.get("mix_every", ""))
        cells = [str(n), f"{row['mbit']:g}", row["program"], f"{slowness:g}", every]
        cells += [row.get("codec", ""), f"{statistics.median(steps[: n - 1]) / base:.3f}"]
        cells += ["" if peers else f"{predicted(row, base) / base:.3f}", f"{rate / ideal:.3f}"]
        lines.append([*cells, f"{row['averaged']:.2f}" if "averaged" in row else ""])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("table", choices=("slow", "links"))
    parser.add_argument("--out", type=Path, default=Path("peers_out"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in each run")
    parser.add_argument("--mbit", type=float, default=75.0, help="of links, for the table links")
    parser.add_argument("--hosts", type=int, default=4, help="of the table links")
    parsed = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parsed.out.mkdir(parents=True, exist_ok=True)
    path = parsed.out / f"{parsed.table}.jsonl"
    rows = commands.read_rows(path)
    cases = cases_of(parsed.table, parsed)
    known = [{k: row.get(k) for k in row["case"]} for row in rows]
    missing = [case for case in cases if case not in known]
    with contextlib.ExitStack() as stack:
        if missing:
            stack.enter_context(hosts(parsed.hosts, missing[0]["mbit"]))
        for case in tqdm(missing, file=sys.stderr):
            with tempfile.TemporaryDirectory() as name:
                found = measured(case, Path(name), parsed.seconds)
            rows.append(case | {"case": list(case)} | found)
            commands.write_rows(path, rows)
    print(waiting_table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
