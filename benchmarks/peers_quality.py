"""The quickstart with eight peers, beside synchronous gossip and all-reduce, at equal examples.

    python benchmarks/peers_quality.py --out FOLDER [--steps 3000] [--seeds 3]

Each run is `train.py --config configs/quickstart.py` on this machine; peers are eight processes
that meet after every step. The validation losses of the consensus models go to
FOLDER/quality.jsonl, a row per run. Runs that have a row are not made again. At the end the table
is printed.
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

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {
    "all_reduce": {"algorithm": "all_reduce", "optimizer.name": "accum_adam"},
    "one_peer_exp": {},
    "peers": {
        "algorithm": "swarm",
        "schedule": "random_matching",
        "optimizer.name": "accum_adam",
        "peers.use": True,
        "mix_every": 1,
    },
}


def loss_of(program: str, steps: int, seed: int) -> float:
    """Nats per byte of the consensus model at the end of a run."""
    fields = PROGRAMS[program] | {"steps": steps, "seed": seed, "eval.every": steps}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "--workdir", folder]
        command += ["--config", str(ROOT / "configs" / "quickstart.py")]
        command += [f"--config.{name}={value}" for name, value in fields.items()]
        subprocess.run(command, check=True, stdout=sys.stderr, env=environment(program))
        return json.loads((Path(folder) / "summary.json").read_text())["final"]["eval/loss"]


def environment(program: str) -> dict[str, str]:
    """Peers share two cores, so each is content with one device."""
    return os.environ | ({"JAX_NUM_CPU_DEVICES": "1"} if program == "peers" else {})


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
    parsed = parser.parse_args(arguments)
    parsed.out.mkdir(parents=True, exist_ok=True)
    path = parsed.out / "quality.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    wanted = [
        {"program": name, "steps": parsed.steps, "seed": seed}
        for seed in range(parsed.seeds)
        for name in PROGRAMS
    ]
    known = [{name: row[name] for name in ("program", "steps", "seed")} for row in rows]
    for case in tqdm([case for case in wanted if case not in known], file=sys.stderr):
        rows.append(case | {"loss": loss_of(**case)})
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print(table([row for row in rows if row["steps"] == parsed.steps]))


if __name__ == "__main__":
    main(sys.argv[1:])
