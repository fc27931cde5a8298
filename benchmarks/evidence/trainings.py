"""Train the tasks of docs/results.md: Shakespeare, CIFAR-10, Multi30k, prose, with seeds.

    python benchmarks/evidence/trainings.py --root DIR         # does what is left, a run per core
    python benchmarks/evidence/trainings.py --root DIR --list  # says what is done and what is left
    python benchmarks/evidence/trainings.py --root DIR --only dirichlet --at_once 5
        --config.mesh.sequential_replicas=False

DIR/data/ has the folders shakespeare, cifar10, multi30k and us_gov_web_text; the configs of these
names say how to prepare them. The list (`pieces`) is in the order of worth: what has finished can
be compared. The third trains those with a word in their names, five at once on a GPU, each with a
fifth of the cores; fields after it go to all commands and say how this machine computes. Every run
is a process of train.py in DIR/runs/NAME. A run that is killed, or this script, goes on where it
was when the script is started again. `kept` says what DIR/records/NAME.json has of a finished run;
figure.py makes tables and a figure of those in benchmarks/records/.
"""

import fcntl
import itertools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from benchmarks.run_on_hosts import KEPT_MEMORY
from decent_jax.ground.run_folder import read_metrics

CHECKOUT = Path(__file__).resolve().parents[2]
POLL_S = 2.0
EVERY, LATE = 200, 250  # steps between two rows of a record; steps of its mean at the end


class Piece(NamedTuple):
    """One run: a config with its arm after the colon, and the fields that differ from it."""

    name: str
    config: str
    changes: tuple[tuple[str, object], ...]

    @property
    def task(self) -> str:
        return self.config.partition(":")[0]

    def command(self, root: Path, here: Sequence[str] = ()) -> list[str]:
        """Of train.py, after the interpreter; ``here``: flags for this machine."""
        fields = {
            "data.path": root / "data" / re.sub("_(en_de|fast|relaysgd)$", "", self.task),
            **dict(self.changes),
        }
        return [
            str(CHECKOUT / "train.py"),
            f"--config={CHECKOUT}/configs/{self.task}.py:{self.config.partition(':')[2]}",
            f"--workdir={root / 'runs' / self.name}",
            *(f"--config.{name}={value}" for name, value in fields.items()),
            *here,
        ]


def piece(config: str, seed: int, label: str = "", **changes: object) -> Piece:
    """A piece; ``a__b`` stands for the field ``a.b``, ``label`` is added to the arm in the name."""
    task, _, arm = config.partition(":")
    fields = {name.replace("__", "."): value for name, value in changes.items()}
    length = f"-{changes['epochs']:g}" if "epochs" in changes else ""
    name = f"{task}-{arm}{label}{length}-seed{seed}"
    return Piece(name, config, (("seed", seed), *fields.items()))


def pieces() -> list[Piece]:
    """Every run, the most telling first."""
    published = _shakespeare, _cifar10_fast, _relaysgd
    main = _cifar10_main, _multi30k_main, _different_data, _language
    others = _slow_links, _rates, _higher_rates, _inverse_sqrt, _the_rest
    return [each for kind in (*published, *main, *others) for each in kind()]


MAIN = ("cifar10:momentum_sgd", "cifar10:all_reduce")
ADAM = ("cifar10:accum_adam", "cifar10:all_reduce_adam")
NANOGPT = ("all_reduce", "accum_adam", "gossiped_momentum", "gossiped_momentum_int8", "diloco")
ADAM_ARMS = ("accum_adam", "all_reduce")  # of Multi30k and of the language model
FULL, SHORT, SHORTEST = 15.0, 8.0, 4.0  # epochs
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)  # a grid for CIFAR-10; the second is that of the config
GRID_SEED = 100  # which nothing else has
TWICE, FOUR_TIMES = 0.2, 0.4  # rates at which the main arms are trained in full, too


def _shakespeare() -> Iterator[Piece]:
    """The 1.88 of nanoGPT, its twelve sequences on 4 replicas, then on 12; and both rates."""
    yield from (piece(f"shakespeare:{arm}", 0) for arm in NANOGPT)
    published = {"learning_rate": 1e-3, "optimizer__b2": 0.99}
    yield piece("shakespeare:gossiped_momentum", 0, "-published_rate", **published)
    yield piece("shakespeare:all_reduce", 0, "-twice_the_rate", learning_rate=2e-3)
    for seed, arm in itertools.product(range(3), ("gossiped_momentum", "all_reduce")):
        yield piece(f"shakespeare:{arm}", seed, "-four_times_the_rate", learning_rate=4e-3)
    for arm in ("gossiped_momentum", "all_reduce"):  # is there still a better one?
        yield piece(f"shakespeare:{arm}", 0, "-eight_times_the_rate", learning_rate=8e-3)
    yield piece("shakespeare:diloco", 0, "-twice_the_rate", learning_rate=2e-3)
    twice = {"learning_rate": 2e-3, "optimizer__b2": 0.999}
    yield piece("shakespeare:accum_adam", 0, "-twice_the_rate", **twice)
    yield from (piece(f"shakespeare:{arm}", seed) for seed in (1, 2) for arm in NANOGPT)
    for seed, arm in itertools.product(range(3), NANOGPT):
        yield piece(f"shakespeare:{arm}", seed, "-12_replicas", num_replicas=12)
    own = {"num_replicas": 12, "learning_rate": 3.5e-3}  # the published rate times sqrt(12)
    yield piece("shakespeare:gossiped_momentum", 0, "-12_replicas-higher_rate", **own)


def _cifar10_fast() -> Iterator[Piece]:
    """airbench94, whose 94% the field knows; then Muon's beta exchanged, and a higher rate."""
    arms = ("all_reduce", "gossip", "gossip_awc", "gossiped_momentum", "hypercube")
    yield from (piece(f"cifar10_fast:{arm}", seed) for seed in range(3) for arm in arms)
    muon = "decent_jax.models.airbench.optimizer"
    yield piece("cifar10_fast:all_reduce", 0, "-higher_beta", optimizer__name=f"{muon}(beta=0.85)")
    yield piece("cifar10_fast:gossiped_momentum", 0, "-published_beta", optimizer__name=muon)
    higher = {"learning_rate": 0.36, "optimizer__name": muon}
    yield piece("cifar10_fast:gossiped_momentum", 0, "-higher_rate", **higher)


def _relaysgd() -> Iterator[Piece]:
    """RelaySGD's Table 2 for two cores: a quarter of the width, a twentieth of the epochs."""
    arms = ("exponential", "ring", "ring_quasi_global", "ring_d2")
    own = {"epochs": 10.0, "model__width": 16}
    for seed in range(3):
        yield piece("cifar10_relaysgd:all_reduce,0.1", seed, **own)
        for alpha, arm in itertools.product(("0.01", "0.1", "1"), arms):
            yield piece(f"cifar10_relaysgd:{arm},{alpha}", seed, **own)


def _cifar10_main() -> Iterator[Piece]:
    """The shortest budget first, as mistakes show early; then the longest with seeds."""
    yield from (piece(arm, 0, epochs=SHORTEST) for arm in MAIN)
    yield from (piece(arm, seed, epochs=FULL) for seed in range(3) for arm in MAIN)


def _rates() -> Iterator[Piece]:
    """A grid of learning rates; at twice the config's, arms whose replicas are nearer, too."""
    nearer = ("momentum_sgd_atc", "gossiped_momentum", "alternating_exp_ring")
    at_twice = (*MAIN, *(f"cifar10:{arm}" for arm in nearer))
    for rate in RATES:
        own = {"epochs": SHORTEST, "learning_rate": rate}
        arms = at_twice if rate == TWICE else MAIN
        yield from (piece(arm, GRID_SEED, f"-rate{rate:g}", **own) for arm in arms)


def _higher_rates() -> Iterator[Piece]:
    """Higher rates, for the length and seeds of the main arms and of what is nearer in the grid."""
    arms = (*MAIN, "cifar10:momentum_sgd_atc")
    for label, rate in ("-twice_the_rate", TWICE), ("-four_times_the_rate", FOUR_TIMES):
        own = {"epochs": FULL, "learning_rate": rate}
        yield from (piece(arm, seed, label, **own) for seed in range(3) for arm in arms)
        if rate == TWICE:
            yield piece("cifar10:gossiped_momentum", 0, label, **own)


def _multi30k_main() -> Iterator[Piece]:
    yield from (piece(f"multi30k_en_de:{arm}", seed) for seed in range(3) for arm in ADAM_ARMS)


def _different_data() -> Iterator[Piece]:
    """Each replica has a mixture of classes of its own."""
    own = {"epochs": SHORT, "data__partition": "dirichlet", "data__alpha": 0.1}
    arms = ("momentum_sgd", "all_reduce", "gossiped_momentum", "exact_diffusion")
    for seed in range(2):
        yield from (piece(f"cifar10:{arm}", seed, "-dirichlet", **own) for arm in arms)


def _language() -> Iterator[Piece]:
    """Adam's, Muon's, and Adam whose first moment is averaged, too: gradients are mostly noise."""
    for seed in range(2):
        yield from (piece(f"us_gov_web_text:{arm}", seed) for arm in ADAM_ARMS)
    muon = ("muon", "gossiped_muon", "sparseloco_muon")
    yield from (piece(f"us_gov_web_text:{arm}", 0) for arm in muon)
    yield from (piece("us_gov_web_text:gossiped_momentum", seed) for seed in range(2))


def _inverse_sqrt() -> Iterator[Piece]:
    """The schedule of papers on translation, whose rate ends at a third of its peak."""
    own = {"lr_schedule__name": "inverse_sqrt", "learning_rate": 5e-3, "optimizer__b2": 0.98}
    yield from (piece(f"multi30k_en_de:{arm}", 0, "-inverse_sqrt", **own) for arm in ADAM_ARMS)


def _slow_links() -> Iterator[Piece]:
    """Less time on slow links in as many steps: a host's model in every second, and int8."""
    yield piece("cifar10:alternating_exp_ring", 0, epochs=FULL)
    yield piece("multi30k_en_de:alternating_exp_ring", 0)
    yield piece("multi30k_en_de:accum_adam", 0, "-int8", codec="int8")


def _the_rest() -> Iterator[Piece]:
    """Adam, other arms beside an all-reduce as long, peers, other budgets."""
    yield from (piece(arm, seed, epochs=SHORT) for seed in range(2) for arm in ADAM)
    yield from (piece(arm, 0, epochs=SHORT) for arm in MAIN)
    others = ("hypercube", "ring", "base_graph", "swarm", "noloco", "sparseloco")
    yield from (piece(f"cifar10:{arm}", 0, epochs=SHORT) for arm in others)
    yield piece("multi30k_en_de:swarm", 0)
    yield piece("multi30k_en_de:peers", 0)
    for budget in (SHORTEST, SHORT):
        yield from (piece(arm, seed, epochs=budget) for seed in (1, 2) for arm in MAIN)


# --- Which are done ------------------------------------------------------------------------------


def record_of(root: Path, name: str) -> Path:
    """The file of a finished run."""
    return root / "records" / f"{name}.json"


def left(root: Path, all_pieces: list[Piece]) -> list[Piece]:
    """Those without a record, in order."""
    return [each for each in all_pieces if not record_of(root, each.name).exists()]


def listing(root: Path, all_pieces: list[Piece]) -> str:
    """A line per piece: its state, the hours it has trained, its last evaluation."""
    waiting, lines = left(root, all_pieces), []
    for each in all_pieces:
        folder = root / "runs" / each.name
        state = "done" if each not in waiting else "begun" if folder.exists() else "waits"
        lines.append(f"{state:<6}{each.name:<56}{_progress(folder)}".rstrip())
    return "\n".join([*lines, f"{len(lines) - len(waiting)} of {len(lines)} done"])


def _progress(folder: Path) -> str:
    try:
        rows = read_metrics(folder)
    except FileNotFoundError:
        return ""
    seen = {name: value for row in rows for name, value in row.items()}
    hours = seen.get("perf/wall_time_s", 0.0) / 3600
    evaluated = [f"{name} {seen[name]:.4g}" for name in ("eval/loss", "eval/top1") if name in seen]
    return f"step {seen.get('step', 0)}, {hours:.2f} h  {'  '.join(evaluated)}"


# --- Training ------------------------------------------------------------------------------------


def train(
    root: Path, waiting: list[Piece], places: Iterable[set[int]], lock: IO, here: Sequence[str]
) -> list[Piece]:
    """Trains pieces to their ends, one at a time on each set of cores; returns those that failed.

    Two runs with a core each take less time than one after the other on both: a step has parts
    that use one core only.
    """
    free, waiting, running, failed = list(places), list(waiting), {}, []
    try:
        while waiting or running:
            while waiting and free:
                cores, each = free.pop(0), waiting.pop(0)
                running[start(root, each, cores, lock, here)] = cores, each
                print(f"{each.name} ...", flush=True)
            time.sleep(POLL_S)
            for process in [process for process in running if process.poll() is not None]:
                cores, each = running.pop(process)
                free.append(cores)
                if process.returncode:
                    failed.append(each)
                    print(f"{each.name} failed, see {_beside(root, each, 'log')}", flush=True)
                else:
                    record(root, each, here)
                    print(f"{each.name}: {_progress(root / 'runs' / each.name)}", flush=True)
    finally:
        for process in running:
            process.terminate()  # it saves and ends
        for process in running:
            process.wait()
    return failed


def start(
    root: Path, each: Piece, own: set[int], lock: IO, here: Sequence[str]
) -> subprocess.Popen:
    """Starts to train a piece, or goes on with it, on cores of its own.

    The process inherits the lock: should this one be killed, nobody trains beside its children.
    """
    _beside(root, each, "log").parent.mkdir(parents=True, exist_ok=True)
    _note_commit(root, each)
    # Ray's processes need the path; memory that a step frees is kept for the next one.
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "GLIBC_TUNABLES": KEPT_MEMORY}
    cores = os.sched_getaffinity(0)
    with _beside(root, each, "log").open("ab") as log:
        os.sched_setaffinity(0, own)  # children inherit it
        try:
            return subprocess.Popen(
                [sys.executable, *each.command(root, here)],
                cwd=CHECKOUT,
                env=os.environ | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lock.fileno(),),
            )
        finally:
            os.sched_setaffinity(0, cores)


def record(root: Path, each: Piece, here: Sequence[str]) -> None:
    """Writes what is kept of a finished run, in one piece."""
    folder, path = root / "runs" / each.name, record_of(root, each.name)
    arguments = (
        argument.replace(str(root), "DIR").replace(f"{CHECKOUT}/", "")
        for argument in each.command(root, here)
    )
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {
        "config": each.config,
        "changes": dict(each.changes),
        "command": shlex.join(["python", *arguments]),
        "commits": _commits(root, each),
    }
    entries = kept(summary, read_metrics(folder))
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    draft.rename(path)


def kept(summary: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary, all evaluations, loss and distance every `EVERY` steps, the mean late loss."""
    trained = [row for row in rows if "train/loss" in row]
    late = [row["train/loss"] for row in trained if row["step"] > trained[-1]["step"] - LATE]
    shown = ("train/loss", "train/consensus_distance_relative")
    evaluated = [row for row in rows if "eval/loss" in row]
    names = {name: None for row in evaluated for name in row if name.startswith("eval/")}
    return summary | {
        "evaluations": _columns(evaluated, names),
        "training": _columns([row for row in trained if row["step"] % EVERY == 0], shown),
        f"loss_of_the_last_{LATE}_steps": _short(statistics.mean(late)),
    }


def _columns(rows: list[dict[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    return {name: [_short(row.get(name)) for row in rows] for name in ("step", *names)}


def _short(value: Any) -> Any:
    """To 7 digits, as many as float32 has."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _note_commit(root: Path, each: Piece) -> None:
    describe = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip() or "unknown"
    if commit not in _commits(root, each):
        with _beside(root, each, "commits").open("a") as file:
            print(commit, file=file)


def _commits(root: Path, each: Piece) -> list[str]:
    """Of the checkouts that trained the piece, in order."""
    file = _beside(root, each, "commits")
    return file.read_text().split() if file.exists() else []


def _beside(root: Path, each: Piece, kind: str) -> Path:
    """A file beside the folder of a run."""
    return root / "runs" / f"{each.name}.{kind}"


def main(arguments: list[str] | None = None) -> int:
    """0: all is done; 1: some runs failed, see their logs; 2: bad input."""
    parser = commands.parser(__doc__, allow_abbrev=False)
    parser.add_argument("--root", required=True, type=Path, metavar="DIR")
    parser.add_argument("--list", action="store_true", help="say what is left, and leave")
    parser.add_argument("--only", default="", metavar="WORD", help="those with it in their names")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument(
        "--at_once", type=int, default=len(cores), metavar="N", help="one per core if not given"
    )
    parsed, here = parser.parse_known_args(arguments)
    if odd := [flag for flag in here if not flag.startswith("--config.")]:
        parser.error(f"{odd[0]} is neither an option of this script nor a field of a config")
    if not 0 < parsed.at_once <= len(cores):
        parser.error(f"--at_once must be from 1 to the {len(cores)} cores, got {parsed.at_once}")
    root = parsed.root.resolve()
    chosen = [each for each in pieces() if parsed.only in each.name]
    if not chosen:
        parser.error(f"--only {parsed.only} is in no name; --list shows them all")
    if parsed.list:
        print(listing(root, chosen))
        return 0
    if not (root / "data").is_dir():
        print(f"trainings.py: there is no folder {root / 'data'}; see --help", file=sys.stderr)
        return 2
    waiting = left(root, chosen)
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"trainings.py: another one, or a run of it, works in {root}", file=sys.stderr)
            return 2
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            places = [set(cores[k :: parsed.at_once]) for k in range(parsed.at_once)]
            failed = train(root, waiting, places, lock, here)
        except KeyboardInterrupt:
            print("interrupted; run it again to continue", flush=True)
            return 130
    print(f"{len(failed)} failed" if failed else "all done")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
