"""Peers of one machine in a storm of kills, beside a synchronous run: table and figure.

    python benchmarks/faults/storm.py [--peers 32] [--seconds 1800] [--every 29] [--runs 3]
                                      [--out FOLDER]

calm          peers that nobody kills
storm 0, ...  a random peer is killed by SIGKILL every --every seconds
supervised    four processes of one synchronous run under `decent-jax supervise`, and the same storm
alone         these four without kills

Each is observed for --seconds from the moment in which all train, and then ended by SIGTERM. A row
per run goes to FOLDER/storm.jsonl; runs that have a row there are not made again. After a storm the
runs of all peers are replayed and compared bit by bit, and whatever still runs is counted. Memory
and descriptors are those of `train.py` and of a peer that was never killed, in the sixth and the
last tenth. There are fewer cores than peers, so computing is a wait of a second for each record
(`sleeping.py`); the loss at equal steps is that of the consensus model, a mean over the last 20
evaluations that both runs made.
"""

import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from benchmarks.faults.one_run import of_process
from benchmarks.faults.peers import ROOT, SLEEPING
from decent_jax.ground.run_folder import read_metrics
from decent_jax.plots.style import new_figure, save

AGENT = "decent_jax.cluster.agent"
PROCESSES = 4
EVAL_EVERY = 30  # steps
COMMON = {"log.every": 1, "eval.every": EVAL_EVERY, "checkpoint.every_minutes": 2.0}
PEERS = {"trainer": "peers", "algorithm": "swarm", "schedule": "random_matching"}
PEERS |= {"optimizer.name": "sgd", "peers.restarts": 1000, "mix_every": 4}
GOSSIP = {"algorithm": "decentralized_sgd", "schedule": "one_peer_exp"}
CLI = [sys.executable, "-m", "decent_jax.commands.main"]


# --- A run ----------------------------------------------------------------------------------------


def command_of(arm: str, workdir: Path, count: int) -> list[str]:
    """The command of a run with ``count`` replicas."""
    fields = COMMON | (PEERS if has_peers(arm) else GOSSIP)
    fields = fields | {"num_replicas": count, "batch_size": count}
    train = [str(ROOT / "train.py"), "--config", f"{SLEEPING}:points", "--workdir", str(workdir)]
    train += [f"--config.{name}={value}" for name, value in fields.items()]
    if has_peers(arm):
        return [sys.executable, *train]
    return [*CLI, "supervise", "--processes", str(count), "--again", "10000", "--", *train]


def has_peers(arm: str) -> bool:
    return arm == "calm" or arm.startswith("storm")


def measured(arm: str, count: int, seconds: float, every: float | None, folder: Path) -> dict:
    """Make a run in ``folder``, and say what became of it."""
    folder.mkdir(parents=True)
    workdir, words = folder / "run", folder / "words.txt"
    own = {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    started = time.monotonic()
    with words.open("w") as file:
        argv = command_of(arm, workdir, count)
        process = subprocess.Popen(argv, env=os.environ | own, stdout=file, stderr=file)
    family: set[psutil.Process] = set()
    try:
        while not all_train(arm, workdir, count):
            if process.poll() is not None:
                sys.exit(f"the run did not begin:\n{words.read_text()[-3000:]}")
            time.sleep(0.5)
        found: dict[str, Any] = {"start_s": round(time.monotonic() - started, 1)}
        cost = costs(process, workdir) if has_peers(arm) else (0, 0)
        found["peer_mb"], found["peer_cpu_s"] = cost
        found |= watched(process, arm, workdir, words, seconds, every, family)
    finally:
        family |= set(descendants(process))
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(180)
        process.kill()
        process.wait()
    time.sleep(60 if seconds > 300 else 20)  # two of Ray's agents take that long
    found["orphans"] = [one.pid for one in family if lives(one)]
    if has_peers(arm):
        evaluations = [row for row in read_metrics(workdir) if "eval/loss" in row]
        found["losses"] = [[row["step"], row["eval/loss"]] for row in evaluations]
    if every and has_peers(arm):
        found["replay"] = replayed(workdir)
    return found


def all_train(arm: str, workdir: Path, count: int) -> bool:
    row = last_row(workdir)
    return row.get("peers/live") == count if has_peers(arm) else bool(row)


def watched(
    process: subprocess.Popen,
    arm: str,
    workdir: Path,
    words: Path,
    seconds: float,
    every: float | None,
    family: set[psutil.Process],
) -> dict[str, Any]:
    """Kill, and watch: [seconds, steps of all replicas], kills and when others took their place."""
    draw, trace, kills, held = random.Random(arm), [], [], []
    known: dict[str, int] = {}  # a row lacks the ranks whose peer has not trained yet
    began = time.monotonic()
    next_at = began + every if every else float("inf")
    offset = last_row(workdir).get("perf/wall_time_s", 0.0)
    while (now := time.monotonic()) < began + seconds and process.poll() is None:
        known |= steps_of(arm, last_row(workdir))
        steps = sum(known.values())
        if not trace or trace[-1][1] != steps:
            trace.append([round(now - began, 2), steps])
        if now > next_at and (peers := trainers(arm, process, workdir)):
            rank = draw.choice(sorted(peers))
            kills.append({"at": round(now - began, 2), "rank": rank, "steps": steps})
            peers[rank].kill()
            next_at += every or 0.0
        joined = re.findall(r"peer (\d+) trains again", words.read_text())
        for rank in {kill["rank"] for kill in kills}:
            of_rank = [kill for kill in kills if kill["rank"] == rank]
            for kill in of_rank[: joined.count(rank)]:
                kill.setdefault("again_s", round(now - began - kill["at"], 2))
        if len(held) < (now - began) / 10:
            family |= set(descendants(process))
            peers = trainers(arm, process, workdir)
            held.append(
                {"driver": of_process(process.pid)}
                | {f"{rank} {peer.pid}": of_process(peer.pid) for rank, peer in peers.items()}
            )
        time.sleep(0.25)
    made = {"seconds": round(now - began, 1), "steps": trace[-1][1] - trace[0][1]}
    return made | {"kills": kills, "trace": trace, "offset": offset, "held": growth(held)}


def steps_of(arm: str, row: dict[str, Any]) -> dict[str, int]:
    """Of each rank, or of all replicas together."""
    if not has_peers(arm):
        return {"all": PROCESSES * row.get("step", 0)}
    return {name: int(x) for name, x in row.items() if re.fullmatch(r"peers/\d+/steps", name)}


def last_row(workdir: Path) -> dict[str, Any]:
    """The last whole row of the run's metrics; empty if there is none."""
    with contextlib.suppress(FileNotFoundError), (workdir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2**16))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    return {}


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def trainers(arm: str, process: subprocess.Popen, workdir: Path) -> dict[str, psutil.Process]:
    """The processes that train, by rank or process id."""
    found = {}
    for one in descendants(process):
        with contextlib.suppress(psutil.Error, OSError):
            if has_peers(arm):
                log = Path(os.readlink(f"/proc/{one.pid}/fd/1"))
                if log.is_relative_to(workdir / "peers"):
                    found[log.parent.name] = one
            else:  # a fork of an agent, whose command it has
                own, above = one.cmdline(), one.parent()
                if above is not None and AGENT in own and above.cmdline() == own:
                    found[str(one.pid)] = one
    return found


def costs(process: subprocess.Popen, workdir: Path) -> tuple[float, float]:
    """Medians over peers that just began: proportional memory in MB, seconds of a core."""
    peers = trainers("storm", process, workdir).values()
    memory = statistics.median(peer.memory_full_info().pss for peer in peers) / 2**20
    spent = statistics.median(sum(peer.cpu_times()[:2]) for peer in peers)
    return round(memory, 1), round(spent, 1)


def growth(held: list[dict[str, dict[str, float]]]) -> dict[str, list[float]]:
    """[in the sixth tenth, in the last] of `train.py` and of one peer that was never killed."""
    tenth = max(len(held) // 10, 1)
    parts = held[5 * len(held) // 10 :][:tenth], held[-tenth:]
    stayed = [name for name in held[0] if name != "driver" and all(name in row for row in held)]
    return {
        f"{name} {what}": [statistics.median(row[name].get(what, 0) for row in p) for p in parts]
        for name in ["driver", *stayed[:1]]
        for what in ("descriptors", "threads", "memory_mb")
    }


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def replayed(workdir: Path) -> str:
    """The last line of a replay without the waits."""
    path = workdir / "config.json"
    config = json.loads(path.read_text())
    config["data"]["read_s"] = 1e-9
    path.write_text(json.dumps(config))
    command = [*CLI, "peers", "replay", "--workdir", str(workdir)]
    own = {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


# --- The table and the figure ---------------------------------------------------------------------


def share(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """Steps per second, of those of the same run without kills."""
    whole = next(r for r in rows if r["arm"] == ("calm" if has_peers(row["arm"]) else "alone"))
    return row["steps"] / row["seconds"] / (whole["steps"] / whole["seconds"])


def loss_at_equal_steps(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Of the calm run's, a mean over the last evaluations of both: one differs by some percent."""
    calm = dict(map(tuple, next(r for r in rows if r["arm"] == "calm")["losses"]))
    # Evaluations follow the first row of a multiple of `EVAL_EVERY`, a few steps apart.
    calm = {step // EVAL_EVERY: loss for step, loss in calm.items()}
    both = [loss / calm[s // EVAL_EVERY] for s, loss in row["losses"] if s // EVAL_EVERY in calm]
    return f"{statistics.mean(both[-20:]) - 1:+.2%}" if both else ""


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    heads = ["run", "start, s", "seconds", "killed", "steps of replicas", "of undisturbed"]
    heads += ["s until another trains: median, worst", "loss", "orphans", "replay"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        again = [kill["again_s"] for kill in row["kills"] if "again_s" in kill]
        took = f"{statistics.median(again):.1f}, {max(again):.1f}" if again else ""
        storm = row["arm"].startswith("storm")
        cells = [row["arm"], f"{row['start_s']:.0f}", f"{row['seconds']:.0f}"]
        cells += [str(len(row["kills"])), str(row["steps"]), f"{share(row, rows):.1%}", took]
        cells += [loss_at_equal_steps(row, rows) if storm else "", str(len(row["orphans"]))]
        lines.append(f"| {' | '.join([*cells, row.get('replay', '')])} |")
    return "\n".join(lines)


def draw(row: dict[str, Any], workdir: Path, path: Path) -> None:
    """A lane per peer with its kills and joins, and the disagreement below."""
    rows = [r for r in read_metrics(workdir) if "perf/wall_time_s" in r]
    ranks = sorted({int(name.split("/")[1]) for r in rows for name in r if name.endswith("/steps")})
    figure = new_figure(8, 6)
    lanes, below = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    for rank in ranks:
        own = [r for r in rows if f"peers/{rank}/steps" in r]
        times = [r["perf/wall_time_s"] for r in own]
        steps = [r[f"peers/{rank}/steps"] for r in own]
        pairs = zip(times, times[1:], steps, steps[1:], strict=False)
        trains = [(a, b - a) for a, b, s, t in pairs if t > s]
        lanes.broken_barh(trains, (rank - 0.3, 0.6), color="C0")
    kills = [kill for kill in row["kills"] if kill["rank"].isdecimal()]
    at = [kill["at"] + row["offset"] for kill in kills]
    lanes.plot(at, [int(kill["rank"]) for kill in kills], "x", color="C3", ms=4)
    joined = [
        (t + kill["again_s"], kill) for t, kill in zip(at, kills, strict=True) if "again_s" in kill
    ]
    lanes.plot([t for t, _ in joined], [int(k["rank"]) for _, k in joined], ">", color="C2", ms=3)
    lanes.set(ylabel="peer", title=f"{len(kills)} kills (x) and joins (>) of {len(ranks)} peers")
    name = "train/consensus_distance_relative"
    below.plot(*zip(*[(r["perf/wall_time_s"], r[name]) for r in rows if name in r], strict=True))
    below.set(xlabel="seconds", ylabel="disagreement", yscale="log")
    save(figure, path)


def main(arguments: list[str]) -> int:
    parser = commands.parser(__doc__)
    parser.add_argument("--peers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of each run")
    parser.add_argument("--every", type=float, default=29.0, help="seconds between two kills")
    parser.add_argument("--runs", type=int, default=3, help="storms")
    parser.add_argument("--out", type=Path, default=Path("storm_out"), metavar="FOLDER")
    parsed = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    path = parsed.out / "storm.jsonl"
    rows = commands.read_rows(path)
    storms = [f"storm {k}" for k in range(parsed.runs)]
    for arm in ("calm", *storms, "alone", "supervised"):
        if arm in {row["arm"] for row in rows}:
            continue
        count = parsed.peers if has_peers(arm) else PROCESSES
        every = parsed.every if arm in (*storms, "supervised") else None
        folder = (parsed.out / arm.replace(" ", "-")).absolute()
        rows.append({"arm": arm} | measured(arm, count, parsed.seconds, every, folder))
        commands.write_rows(path, rows)
        print(f"{arm}: {rows[-1]['steps']} steps", file=sys.stderr)
    first = next(row for row in rows if row["arm"] == "storm 0")
    draw(first, parsed.out / "storm-0" / "run", parsed.out / "storm.png")
    print(table(rows))
    print(json.dumps(first["held"]), f"a peer: {first['peer_mb']} MB, {first['peer_cpu_s']} s")
    shares = [share(row, rows) for row in rows if row["arm"] in storms]
    kills = sum(len(row["kills"]) for row in rows if row["arm"] in storms) // len(storms)
    print(f"supervised: kept {share(rows[-1], rows):.1%} of the steps")
    print(f"peers: kept {min(shares):.1%} to {max(shares):.1%} in {len(shares)} storms")
    kept = f"kept {statistics.mean(shares):.1%} of the steps of an undisturbed run"
    print(f"{kept} ({parsed.peers} peers, {kills} kills)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
