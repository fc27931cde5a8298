"""The quickstart with eight peers, beside synchronous gossip and all-reduce, at equal examples.

    python benchmarks/peers_quality.py --out FOLDER [--steps 3000] [--seeds 3]

Each run is `train.py` with configs/quickstart.py on this machine; peers are eight processes that
meet after every step. There are not eight hosts, so a step of a peer also sleeps for --compute_s
(benchmarks/waiting_text.py): without the sleep, a meeting of eight processes on two cores takes
longer than several steps. `swarm`, the same recursion in one synchronous program, is there for
comparison. The validation losses of the consensus models, and the meetings per step of a peer, go
to FOLDER/quality.jsonl, a row per run. Runs that have a row are not made again. At the end the
table is printed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import commands
from tqdm import tqdm

from decent_jax.ground.run_folder import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SWARM = {
    "algorithm": "swarm",
    "schedule": "random_matching",
    "optimizer.name": "accum_adam",
    "mix_every": 1,
}
PROGRAMS: dict[str, dict] = {
    "all_reduce": {"algorithm": "all_reduce", "optimizer.name": "accum_adam"},
    "one_peer_exp": {},
    "swarm": SWARM,
    "peers": SWARM | {"peers.use": True},
}


def result_of(program: str, steps: int, seed: int, compute_s: float) -> dict:
    """Nats per byte of the consensus model at the end of a run, and meetings per step and peer."""
    fields = PROGRAMS[program] | {"steps": steps, "seed": seed, "eval.every": steps}
    config = ROOT / "configs" / "quickstart.py"
    if compute_s:
        config = ROOT / "benchmarks" / "quickstart_waiting.py"
        fields["data.compute_s"] = compute_s
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder, "run")
        command = [sys.executable, str(ROOT / "train.py"), "--workdir", str(workdir)]
        command += ["--config", str(config)]
        command += [f"--config.{name}={value}" for name, value in fields.items()]
        subprocess.run(command, check=True, stdout=sys.stderr, env=environment(program))
        loss = json.loads((workdir / "summary.json").read_text())["final"]["eval/loss"]
        rows = [row for row in read_metrics(workdir) if "peers/met" in row]
        if not rows:
            return {"loss": loss}
        return {"loss": loss, "met": rows[-1]["peers/met"] / (rows[-1]["step"] * 8)}


def environment(program: str) -> dict[str, str]:
    """Peers share two cores, so each is content with one device."""
    found = os.environ | {"PYTHONPATH": str(ROOT)}  # of benchmarks.waiting_text
    return found | ({"JAX_NUM_CPU_DEVICES": "1"} if program == "peers" else {})


def table(rows: list[dict]) -> str:
    lines = ["| program | validation loss | mean | of all_reduce |", "|---|---|---|---|"]
    losses = {name: [r["loss"] for r in rows if r["program"] == name] for name in PROGRAMS}
    base = statistics.mean(losses["all_reduce"])
    for name, found in losses.items():
        mean = statistics.mean(found)
        listed = ", ".join(f"{loss:.4f}" for loss in found)
        lines.append(f"| {name} | {listed} | {mean:.4f} | {mean / base:.4f} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=3000, help="of all peers together (3000)")
    parser.add_argument("--seeds", type=int, default=3, help="(3)")
    parser.add_argument(
        "--compute_s", type=float, default=0.1, help="that a step of a peer sleeps (0.1 s; 0: none)"
    )
    parsed = parser.parse_args(arguments)
    parsed.out.mkdir(parents=True, exist_ok=True)
    path = parsed.out / "quality.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    wanted = [
        {"program": name, "steps": parsed.steps, "seed": seed}
        | {"compute_s": parsed.compute_s if name == "peers" else 0.0}
        for seed in range(parsed.seeds)
        for name in PROGRAMS
    ]
    known = [{name: row[name] for name in wanted[0]} for row in rows]
    for case in tqdm([case for case in wanted if case not in known], file=sys.stderr):
        rows.append(case | result_of(**case))
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print(table([row for row in rows if {k: row[k] for k in wanted[0]} in wanted]))


if __name__ == "__main__":
    main(sys.argv[1:])
