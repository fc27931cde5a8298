"""Steps that a run keeps while its processes are killed: table and figure of docs/clusters.md.

    python benchmarks/faults/goodput.py [ARM ...] [--out FOLDER] [--seconds 600] [--every 30]

Each arm runs on hosts made of this machine (benchmarks/hosts.sh, 1 Gbit/s) under `decent-jax
supervise`, undisturbed for a minute, and then for --seconds while a random process is killed by
SIGKILL every --every seconds. Then the steps of a run that was killed are made again without kills
and without the sleep below, and the rows of metrics of the two are compared. Needs root. A row per
run goes to FOLDER/goodput.jsonl; runs that have a row there are not made again. At the end the
table is printed, and drawn to FOLDER/goodput.png.

one_peer_exp, all_reduce   in-memory checkpoints, as by default
neighbours                 one_peer_exp with recovery.mirror=True: a whole host is lost with its
                           memory each time, a fifth one takes its place, and it is spare then
disk                       one_peer_exp with recovery.every=0 and a checkpoint every 100 steps
peers                      on Ray; its other peers continue

There are fewer cores than hosts, so computing is a sleep of 0.2 s (sleeping.py).
"""

import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from benchmarks.faults.peers import PROGRAMS, flags_of, pids_of
from benchmarks.run_on_hosts import ROOT, environment, hosts, inside, names_of_hosts
from decent_jax.checkpoints.in_memory import MEMORY, folder_of
from decent_jax.ground.run_folder import read_metrics
from decent_jax.plots.style import new_figure, save

UNDISTURBED_S, HOSTS, MBIT = 60.0, 4, 1000
AGENT = "decent_jax.cluster.agent"
SYNCHRONOUS = {"log.every": 1, "cluster.heartbeat_s": 10, "eval.batches": 1}
ARMS: dict[str, dict[str, Any]] = {
    "one_peer_exp": PROGRAMS["one_peer_exp"] | SYNCHRONOUS,
    "all_reduce": PROGRAMS["all_reduce"] | SYNCHRONOUS,
    "neighbours": PROGRAMS["one_peer_exp"] | SYNCHRONOUS | {"recovery.mirror": True},
    "disk": PROGRAMS["one_peer_exp"] | SYNCHRONOUS | {"recovery.every": 0, "checkpoint.every": 100},
    "peers": PROGRAMS["peers"] | {"mix_every": 4, "log.every": 1},
}


# --- A run ----------------------------------------------------------------------------------------


def measured(arm: str, seconds: float, every: float | None, folder: Path) -> dict[str, Any]:
    """Make a run, kill ``every`` so many seconds (None: never), and say what became of it."""
    workdir = folder / "run"
    flags = flags_of(HOSTS, workdir, ARMS[arm])
    words = folder / "words.txt"
    with words.open("w") as file:
        process = subprocess.Popen(command(arm, flags), env=environment(), stdout=file, stderr=file)
    try:
        found = watched(process, arm, workdir, words, seconds, every)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
    if every and arm != "peers":  # they have no order
        found["differ"] = differing_rows(arm, workdir)
    return found


def differing_rows(arm: str, workdir: Path) -> list[int]:
    """The steps whose rows in ``workdir`` are not those of the same run without kills."""
    rows, again = read_metrics(workdir), workdir.with_name("again")
    # One step more: the last one of a run has an evaluation.
    changes = {"steps": rows[-1]["step"] + 1, "data.compute_s": 0.0}
    flags = flags_of(HOSTS, again, ARMS[arm] | changes)
    done = subprocess.run(command(arm, flags), env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the run without kills failed:\n{done.stderr[-3000:]}")
    wanted = {row["step"]: _trained(row) for row in read_metrics(again)[:-1]}
    found = {row["step"]: _trained(row) for row in rows}
    return [step for step in wanted | found if wanted.get(step) != found.get(step)]


def _trained(row: dict[str, Any]) -> dict[str, Any]:
    """What it says of the training, not of time."""
    return {name: x for name, x in row.items() if name.partition("/")[0] in ("train", "eval")}


def command(arm: str, flags: list[str]) -> list[str]:
    """The command of a run."""
    train = [str(ROOT / "train.py"), *flags]
    names = names_of_hosts()
    if arm == "peers":
        return inside(names[0], [sys.executable, *train])
    listed = [f"{name}=10.77.0.{k + 1}" for k, name in enumerate(names)]
    own = [sys.executable, "-m", "decent_jax.commands.main", "supervise"]
    own += ["--hosts", ",".join(listed[:HOSTS])]
    if listed[HOSTS:]:
        own += ["--spares", ",".join(listed[HOSTS:])]
    lost = train[train.index("--workdir") + 1]  # lost.HOST is there while the host is lost
    via = f"""sh -c 'test ! -e {lost}.{{host}} && exec ip netns exec {{host}} sh -c "$0"'"""
    return [*own, "--via", via, "--again", "1000", "--", *train]


def watched(
    process: subprocess.Popen,
    arm: str,
    workdir: Path,
    words: Path,
    seconds: float,
    every: float | None,
) -> dict[str, Any]:
    """Watch a run from its first step on: [seconds, step] of its rows, and what each kill cost."""
    draw, trace, kills = random.Random(0), [], []
    while not rows_of(workdir):
        if process.poll() is not None:
            sys.exit(f"the run did not begin:\n{words.read_text()[-3000:]}")
        time.sleep(0.1)
    began = time.monotonic()
    next_at = began + every / 2 if every else float("inf")
    while (now := time.monotonic()) < began + seconds and process.poll() is None:
        step = (rows_of(workdir) or [0])[-1]  # none where a run begins again
        if not trace or trace[-1][1] != step:
            trace.append([round(now - began, 2), step])
        starts = words.read_text().count("processes start")
        if kills and "again_s" not in kills[-1] and starts > kills[-1]["starts"]:
            resumed = re.findall(r"resuming after step (\d+)", words.read_text())
            if len(resumed) >= starts - 1:
                after = int(resumed[-1])
                kills[-1]["back"] = kills[-1].get("back", False) or step <= after
                if kills[-1]["back"] and step > after:  # not a row that is about to go
                    kills[-1]["again_s"] = round(now - kills[-1]["at"], 2)
                    kills[-1]["lost"] = max(0, kills[-1]["step"] - after)
        if now > next_at and kill(arm, workdir, draw):
            kills.append({"at": now, "step": step, "starts": starts})
            next_at += every
        time.sleep(0.05)
    steps = trace[-1][1] - trace[0][1]
    return {"seconds": round(now - began, 1), "steps": steps, "kills": kills, "trace": trace}


def rows_of(workdir: Path) -> list[int]:
    """The steps of the rows so far."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return [row["step"] for row in read_metrics(workdir)]
    return []


def kill(arm: str, workdir: Path, draw: random.Random) -> bool:
    """Kill a random process of the run, or all of a host with its memory; whether there was one."""
    found = trainers(arm, workdir)
    if not found:
        return False
    pid = draw.choice(sorted(found))
    if arm != "neighbours":
        os.kill(pid, signal.SIGKILL)
        return True
    memory = MEMORY / f"decent_jax-{os.getuid()}" / folder_of(workdir).parent.name
    for before in workdir.parent.glob(f"{workdir.name}.*"):
        before.unlink()
    workdir.with_name(f"{workdir.name}.{found[pid]}").touch()
    for each in pids_of(found[pid]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    shutil.rmtree(memory / found[pid], ignore_errors=True)
    return True


def trainers(arm: str, workdir: Path) -> dict[int, str]:
    """The processes that train, with their hosts."""
    found = {}
    for host in names_of_hosts():
        for pid in pids_of(host):
            with contextlib.suppress(psutil.Error, OSError):
                own, above = psutil.Process(pid), psutil.Process(pid).parent()
                if arm == "peers":
                    trains = os.readlink(f"/proc/{pid}/fd/1").startswith(f"{workdir}/peers/")
                else:  # a fork of an agent, whose command it has
                    trains = above is not None and AGENT in own.cmdline() == above.cmdline()
                if trains:
                    found[pid] = host
    return found


# --- All of them ----------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """Steps kept, of an undisturbed run; seconds from a kill to the next step; steps lost."""
    heads = ["", "seconds", "killed", "steps kept", "of undisturbed"]
    heads += ["seconds to the next step: median, worst", "steps lost: median, most"]
    heads += ["rows that differ"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        whole = next(r for r in rows if r["arm"] == row["arm"] and not r["every"])
        share = row["steps"] / row["seconds"] / (whole["steps"] / whole["seconds"])
        again = [one["again_s"] for one in row["kills"] if "again_s" in one]
        lost = [one["lost"] for one in row["kills"] if "lost" in one]
        took = f"{statistics.median(again):.1f}, {max(again):.1f}" if again else ""
        cost = f"{statistics.median(lost):g}, {max(lost)}" if lost else ""
        lines.append(
            f"| {row['arm']} | {row['seconds']:.0f} | {len(row['kills'])} | {row['steps']} | "
            f"{share:.0%} | {took} | {cost} | {len(row['differ']) if 'differ' in row else ''} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Steps against time, with kills and undisturbed."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    for k, arm in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        for row in (row for row in rows if row["arm"] == arm):
            seconds, steps = zip(*row["trace"], strict=True)
            label = {"label": arm} if row["every"] else {"linestyle": ":", "linewidth": 1}
            axes.plot(seconds, [s - steps[0] for s in steps], color=f"C{k}", **label)
    killed = max((row for row in rows if row["every"]), key=lambda row: len(row["kills"]))
    axes.set(xlabel="seconds", ylabel="steps kept")
    axes.set_title(f"A process is killed every {killed['every']:g} s (dotted: undisturbed)")
    axes.legend()
    save(figure, path)


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("arms", nargs="*", metavar="ARM", help=f"of {', '.join(ARMS)}; all")
    parser.add_argument("--out", type=Path, default=Path("goodput_out"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=600.0, help="of training with kills")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills")
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.arms) - set(ARMS)
    if unknown:
        parser.error(f"there is no arm {', '.join(sorted(unknown))}; choose of {', '.join(ARMS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parsed.out.mkdir(parents=True, exist_ok=True)
    path = parsed.out / "goodput.jsonl"
    rows = commands.read_rows(path)
    done = {(row["arm"], row["every"]) for row in rows}
    for arm in parsed.arms or ARMS:
        for every in (None, parsed.every):
            if (arm, every) in done:
                continue
            seconds = parsed.seconds if every else min(parsed.seconds, UNDISTURBED_S)
            count, ray = HOSTS + (arm == "neighbours"), arm == "peers"
            with hosts(count, MBIT, ray=ray), tempfile.TemporaryDirectory() as folder:
                row = {"arm": arm, "every": every} | measured(arm, seconds, every, Path(folder))
            rows.append(row)
            commands.write_rows(path, rows)
            print(f"{arm}: {row['steps']} steps in {row['seconds']:.0f} s", file=sys.stderr)
    print(table(rows))
    draw(rows, parsed.out / "goodput.png")


if __name__ == "__main__":
    main(sys.argv[1:])
