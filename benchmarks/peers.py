"""Peers beside synchronous programs, on hosts made of this machine: the tables of docs/peers.md.

    python benchmarks/peers.py slow|links|loss|costs [--out FOLDER] [--seconds 20]

Each run is one that a user would start, `train.py` on a Ray cluster of network namespaces
(benchmarks/hosts.sh, four if --hosts does not say otherwise) with one peer each, or
`run_on_hosts.py train.py` on the same hosts. Needs root. A row per run goes to FOLDER/NAME.jsonl;
runs that have a row there are not made again, so an interrupted benchmark continues. At the end the
table is printed.

slow    one host in four computes 2 or 10 times slower. Links of 1 Gbit/s.
links   questions after H steps, float32 and 8 bits, on links of --mbit between --hosts.
loss    the quickstart's model on links of 75 Mbit/s with one host at half speed: loss by time. It
        trains for 800 steps, and a step sleeps for 0.1 s.
costs   memory and processor time of Ray on each host, and bytes on the wire.

There are fewer cores than hosts, so computing is a sleep of 0.2 s (benchmarks/waiting.py): the
benchmark measures waiting and the cost of the messages themselves. A step alone is that of peers
that never meet.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
from peers_tables import COMPUTE_S, NEVER, draw, table
from ray_hosts import HEAD, PORT, ROOT, environment, hosts, inside
from run_on_hosts import names_of_hosts
from tqdm import tqdm

from decent_jax.ground.run_folder import read_metrics

TEXT = {
    "steps": 800,
    "eval.every": 40,
    "eval.batches": 20,
    "log.every": 10,
    "checkpoint.every": 0,
    "checkpoint.every_minutes": 0.0,
}
CONFIG = """
from decent_jax import train

def get_config():
    config = train.default_config("benchmarks.waiting")
    config.optimizer.name, config.optimizer.momentum = "sgd", 0.0
    config.num_replicas = config.batch_size = {hosts}
    config.steps, config.learning_rate = 10**6, 1e-4
    config.lr_schedule.name, config.lr_schedule.warmup = "constant", 0
    config.log.every, config.eval.every = 5, 0
    config.checkpoint.every, config.checkpoint.every_minutes = 0, 0.0
    config.data.compute_s = {compute_s}
    return config
"""
PEERS = {
    "algorithm": "swarm",
    "schedule": "random_matching",
    "peers.use": True,
    "peers.address": f"{HEAD}:{PORT}",
    "peers.cpus": 1,
    "peers.restarts": 1000,
}
PROGRAMS: dict[str, dict[str, Any]] = {
    "peers": PEERS,
    "one_peer_exp": {"algorithm": "decentralized_sgd", "schedule": "one_peer_exp"},
    "all_reduce": {"algorithm": "all_reduce"},
}


# --- The tables: their runs, and what is measured of each -----------------------------------------


def cases_of(table: str, parsed) -> list[dict[str, Any]]:
    """The runs of a table: hosts, the rate of their links in Mbit/s, and fields of the config."""
    return [{"hosts": parsed.hosts, **case} for case in _cases_of(table, parsed)]


def _cases_of(table: str, parsed) -> list[dict[str, Any]]:
    if table == "slow":
        factors = {"none": "", "2": "1:2", "10": "1:10"}
        alone = {"program": "peers", "slow": "none", "mbit": 1000, "mix_every": NEVER}
        return [alone] + [
            {"program": program, "slow": name, "mbit": 1000, "data.slow": factor}
            | ({"mix_every": 4} if program == "peers" else {})
            for program in PROGRAMS
            for name, factor in factors.items()
        ]
    if table == "links":
        even = {"mbit": parsed.mbit}
        return [
            {"program": "peers", "mix_every": NEVER, **even},
            *(
                {"program": "peers", "mix_every": every, "peers.wire": wire, **even}
                for every in (1, 4, 8)
                for wire in ("float32", "lattice8")
            ),
            {"program": "one_peer_exp", **even},
            {"program": "all_reduce", **even},
        ]
    if table == "loss":
        even = {"text": True, "mbit": 75, "data.slow": "1:2"}
        of_peers = {"mix_every": 1, "optimizer.name": "accum_adam"}
        return [
            {"program": "peers", **of_peers, **even},
            {"program": "one_peer_exp", "algorithm": "accum_adam", **even},
            {"program": "all_reduce", **even},
        ]
    if table == "costs":
        return [{"program": "peers", "mix_every": 4, "mbit": 1000, "costs": True}]
    raise ValueError(table)


def measured(case: dict[str, Any], folder: Path, seconds: float) -> dict[str, Any]:
    """Make a run, stop it after ``seconds`` of training, and read what it wrote."""
    own = {"program", "hosts", "mbit", "slow", "costs", "text"}
    fields = PROGRAMS[case["program"]] | {k: v for k, v in case.items() if k not in own}
    config = folder / "config.py"
    config.write_text(CONFIG.format(hosts=case["hosts"], compute_s=COMPUTE_S))
    if case.get("text"):
        config = ROOT / "benchmarks" / "quickstart_waiting.py"
        fields |= TEXT | {"num_replicas": case["hosts"]}
    workdir = folder / "run"
    flags = ["--config", str(config), "--workdir", str(workdir)]
    flags += [f"--config.{name}={value}" for name, value in fields.items()]
    found: dict[str, Any] = {}
    began = time.monotonic()
    with started(case, flags, folder) as process:
        wait_for_rows(process, workdir, folder, 1)
        found["start_s"] = time.monotonic() - began
        before = usage() if case.get("costs") else {}
        if case.get("text"):
            process.wait()
            return found | {"rows": losses(workdir)}
        watch(process, folder, seconds)
        if case.get("costs"):
            found["costs"] = difference(before, usage())
        found |= progress(workdir, time.monotonic() - began)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
    return found | steps_of(workdir, case["hosts"], case["program"] == "peers")


def losses(workdir: Path) -> list[tuple[int, float, float]]:
    """(step, seconds, validation loss) of the evaluations of a run."""
    rows = read_metrics(workdir)
    timed = [row for row in rows if "perf/wall_time_s" in row]
    seconds = {row["step"]: row["perf/wall_time_s"] for row in timed}
    return [(row["step"], seconds.get(row["step"], timed[-1]["perf/wall_time_s"]), row["eval/loss"])
            for row in rows if "eval/loss" in row]  # fmt: skip


def progress(workdir: Path, seconds: float) -> dict[str, Any]:
    """The progress of a run, counted from its start."""
    return {"steps": read_metrics(workdir)[-1]["step"], "after_s": seconds}


def steps_of(workdir: Path, hosts: int, peers: bool) -> dict[str, Any]:
    """Seconds of a step of each peer, or of the program; and meetings of a peer per step."""
    if not peers:
        return {"step_s": {"run": step_s(workdir)}}
    rows = [row for row in read_metrics(workdir) if row.get("peers/live") == hosts]
    if len(rows) < 2:
        return {"step_s": {}}
    last = {name: rows[-1][name] - rows[0][name] for name in rows[0] if name in rows[-1]}
    slots = sorted(path.name for path in (workdir / "peers").glob("[0-9]*"))
    seconds = {}
    for slot in slots:
        made = max(last[f"peers/{slot}/steps"], 1)
        seconds[slot] = step_s(workdir / "peers" / slot) or last["perf/wall_time_s"] / made
    made = sum(last[f"peers/{slot}/steps"] for slot in slots)
    names = ("met", "declined", "not_understood", "lost")
    return {"step_s": seconds} | {name: last[f"peers/{name}"] / made for name in names}


def step_s(folder: Path) -> float | None:
    """Seconds of a step by the rows of a run after the first two; None: too few."""
    rows = [row for row in read_metrics(folder) if "perf/wall_time_s" in row][2:]
    if len(rows) < 2:
        return None
    took = rows[-1]["perf/wall_time_s"] - rows[0]["perf/wall_time_s"]
    return took / (rows[-1]["step"] - rows[0]["step"])


# --- Hosts, Ray on them, and programs -------------------------------------------------------------


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


def wait_for_rows(process, workdir: Path, folder: Path, count: int) -> None:
    ends = time.monotonic() + 120
    while True:
        with contextlib.suppress(FileNotFoundError):
            if len(read_metrics(workdir)) >= count:
                return
        if time.monotonic() > ends or process.poll() is not None:
            sys.exit(f"the run did not begin:\n{(folder / 'words.txt').read_text()[-3000:]}")
        time.sleep(0.1)


def watch(process, folder: Path, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if process.poll() is not None:
            sys.exit(f"the run ended:\n{(folder / 'words.txt').read_text()[-3000:]}")
        time.sleep(0.2)


def pids_of(host: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


# --- What Ray costs -------------------------------------------------------------------------------


def usage() -> dict[str, dict[str, Any]]:
    """By host and process: MB of unshared memory, seconds of processor time; bytes sent."""
    tick, found = os.sysconf("SC_CLK_TCK"), {}
    for host in names_of_hosts():
        for pid in pids_of(host):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                name = Path(words[0].split(" ")[0]).name
                if name.startswith("python"):
                    name = next((Path(w).name for w in words if w.endswith(".py")), name)
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                pss = next(line for line in lines if line.startswith("Pss:"))
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                cpu = (int(fields[11]) + int(fields[12])) / tick
                found[f"{host} {pid}"] = {
                    "mb": int(pss.split()[1]) / 1e3,
                    "cpu_s": cpu,
                    "name": name,
                }
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        command = ["ip", "netns", "exec", host, "cat", path]
        sent = subprocess.run(command, capture_output=True, text=True, check=True)
        found[f"{host} link"] = {"sent_mb": int(sent.stdout) / 1e6}
    found["time"] = {"s": time.monotonic()}
    return found


def difference(before, after) -> dict[str, dict[str, Any]]:
    """The differences of two usages; memory is that at the end."""
    kept = {"mb", "name"}
    return {
        key: {k: v if k in kept else v - before.get(key, {}).get(k, 0.0) for k, v in one.items()}
        for key, one in after.items()
    }


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("table", choices=("slow", "links", "loss", "costs"))
    parser.add_argument("--out", type=Path, default=Path("peers_out"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in each run")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="of the table loss")
    parser.add_argument("--mbit", type=float, default=75.0, help="of links, for the table links")
    parser.add_argument("--hosts", type=int, default=4, help="of the table links")
    parsed = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parsed.out.mkdir(parents=True, exist_ok=True)
    path = parsed.out / f"{parsed.table}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    cases = cases_of(parsed.table, parsed)
    known = [{k: row.get(k) for k in row if k in row["case"]} for row in rows]
    missing = [case for case in cases if case not in known]
    with contextlib.ExitStack() as stack:
        if missing:
            stack.enter_context(hosts(parsed.hosts, missing[0]["mbit"]))
        for case in tqdm(missing, file=sys.stderr):
            with tempfile.TemporaryDirectory() as folder:
                row = case | {"case": list(case)} | measured(case, Path(folder), parsed.seconds)
            rows.append(row)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(table(parsed.table, rows))
    if parsed.figure:
        draw(rows, parsed.figure)


if __name__ == "__main__":
    main(sys.argv[1:])
