"""Pipelines on hosts made of this machine: the tables of docs/pipelines.md.

    python benchmarks/pipelines.py [--out FOLDER] [--only TABLE,...]

Eight network namespaces (benchmarks/hosts.sh) with a Ray node and a cell each; needs root. Their
links are those of scaled-down copies of DT-FM's networks (benchmarks/pipeline_cases.py), computing
is a sleep (benchmarks/pipeline_cells.py), and all else is that of `train.py`. A row per run goes to
FOLDER/rows.jsonl; runs that have a row there are not made again. At the end the tables are printed.

layouts    seconds per step of the plan, of DT-FM's where it is another, of two layouts along the
           list and of five random ones
averaging  all_reduce beside gossip between the pipelines, at the plan
orders     gpipe, 1f1b, and gpipe with sends that wait until the message has arrived
slow       one machine at half speed: equal layers and planned ones
bubble     without limits of the network
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import commands
from ray_hosts import ROOT, environment, hosts, inside

sys.path.insert(0, str(ROOT))
from benchmarks.pipeline_cases import LAYER_S, LAYERS, MACHINES, REPLICAS, STAGES, layouts
from benchmarks.pipeline_tables import TABLES
from decent_jax.plan.orders import divide

GOSSIP, REDUCE = "decentralized_adam", "all_reduce"
EVEN = [[1.0] * STAGES] * REPLICAS
SLOW = [[1.0, 2.0, 1.0, 1.0], [1.0] * STAGES]


def jobs() -> list[dict[str, Any]]:
    """All runs, those with the same algorithm and layers after each other."""
    equal = divide(LAYERS, STAGES)
    plain = {"order": "gpipe", "blocking": False, "slowness": EVEN, "layers": equal}
    plain |= {"layer_s": LAYER_S}

    def of(algorithm: str, wire: str, case: str) -> list[dict[str, Any]]:
        own = {"algorithm": algorithm, "wire": wire, "case": case, "table": "layouts"}
        return [
            plain | own | {"layout": layout, "stages": stages.tolist()}
            for layout, stages in layouts(case, wire).items()
        ]

    found = [one for case in MACHINES for one in of(GOSSIP, "int8", case)]
    plans = [one for one in found if one["layout"] == "plan"]
    for one in plans:
        found.append(one | {"table": "orders", "order": "1f1b"})
        found.append(one | {"table": "orders", "blocking": True})
    limits = {"case": "no limits", "layer_s": 4 * LAYER_S}
    (limitless,) = (one | limits for one in plans if one["case"] == "case 4")
    found += [limitless | {"table": "bubble", "order": name} for name in ("gpipe", "1f1b")]
    planned = divide(LAYERS, STAGES, speeds=[1, 0.5, 1, 1])
    found += [
        limitless | {"table": "slow", "slowness": SLOW, "layers": layers}
        for layers in (equal, planned)
    ]
    reduced = [one for case in MACHINES for one in of(REDUCE, "float32", case)]
    found += [
        one
        for one in reduced
        if one["case"] in ("case 4", "case 5") or not one["layout"].startswith("random")
    ]
    return found + [one | {"table": "averaging", "wire": "float32"} for one in plans]


def session(one: dict[str, Any]) -> tuple[str, ...]:
    """What all jobs of a session have in common."""
    return one["algorithm"], one["wire"], str(one["layers"])


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("pipelines_out"), metavar="FOLDER")
    parser.add_argument("--only", help="tables, or cases such as 'case 4', between commas")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "rows.jsonl"
    rows = read(path)
    known = [{name: row[name] for name in row["job"]} for row in rows]
    wanted = options.only.split(",") if options.only else None
    missing = [
        one
        for one in jobs()
        if one not in known and (wanted is None or {one["table"], one["case"]} & set(wanted))
    ]
    if missing:
        with hosts(STAGES * REPLICAS, 1000, cpus=0):  # whose cells need none
            for _, some in itertools.groupby(missing, session):
                run(list(some), path)
    rows = read(path)
    for name, table in TABLES.items():
        print(f"\n{name}\n\n{table(rows)}")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(some: list[dict[str, Any]], path: Path) -> None:
    """A session of cells that makes these jobs."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([one | {"job": list(one)} for one in some], file)
        file.flush()
        module = [sys.executable, "-m", "benchmarks.pipeline_session", file.name, str(path)]
        subprocess.run(inside("djhost0", module), env=environment(), cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
