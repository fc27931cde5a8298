"""Wrong versions of the package, `mutations.txt`, each of which some test must notice.

Not collected by pytest. The script copies the checkout, applies one mutation after the other to the
copy, runs the tests that should notice it, and prints which one did:

    python tests/mutations.py                      # all of them; exit code 1 if one survives
    python tests/mutations.py --only gossip        # a room, or part of a name; may be repeated
    python tests/mutations.py --check              # the same tests without any mutation: they pass
    python tests/mutations.py --list

`mutations.txt` holds them as patches, by room. The text after ``-`` must occur exactly once in
``decent_jax/``, in whichever file; the text after ``+`` takes its place. After ``|`` stand the test
files, without ``test_`` and ``.py`` (or a path, for doctests), and pytest's options.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.txt"
PACKAGE = "decent_jax"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", "*.egg-info", "runs", "build"
)
TIMEOUT_S = 1200  # of one run of pytest; a mutation that hangs is not caught


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One wrong line: the text `find`, which occurs once, becomes `replace`."""

    name: str
    find: str
    replace: str
    tests: tuple[str, ...]  # arguments of pytest


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a mutation; `ok` is True where a test failed, as it should."""

    ok: bool
    text: str
    seconds: float = 0.0


def parse(table: str) -> list[Mutation]:
    """The mutations of a table, in order."""
    mutations, room = [], ""
    for block in re.split(r"\n(?![-+])", table.strip()):
        head, *lines = block.split("\n")
        if head.startswith("== "):
            room = head[3:]
        elif head:
            name, selection = head.split(" | ")
            words = shlex.split(selection)
            options = next((k for k, word in enumerate(words) if word.startswith("-")), len(words))
            files = [w if "/" in w else f"tests/test_{w}.py" for w in words[:options]]
            find, replace = (
                "\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+"
            )
            mutations.append(Mutation(f"{room}/{name}", find, replace, (*files, *words[options:])))
    return mutations


def target(mutation: Mutation, root: Path) -> Path | str:
    """The file that holds the text, or a sentence: it is nowhere, or more than once."""
    files = (root / PACKAGE).rglob("*.py")
    counts = {path: path.read_text().count(mutation.find) for path in files}
    found = [path for path, count in counts.items() if count]
    if sum(counts.values()) == 1:
        return found[0]
    where = f"{sum(counts.values())} times: {', '.join(path.name for path in found)}"
    return f"does not apply: its text occurs {where if found else 'nowhere'}"


def run_tests(tests: tuple[str, ...], root: Path) -> tuple[int, str]:
    """The exit code of pytest in `root`, and the test that failed first or the last line."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    # No bytecode: Python would take a mutated file for the old one, if length and second agree.
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {TIMEOUT_S} s"
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/test_)?(.+?)(?: - .*)?$", done.stdout, re.M)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, failed[1] if failed else lines[-1] if lines else ""


def attempt(mutation: Mutation, root: Path, mutated: bool = True) -> Result:
    """Apply a mutation to the copy in `root`, run its tests, and restore the copy.

    Not ``mutated``, the tests must pass, or they prove nothing.
    """
    path = target(mutation, root)
    if isinstance(path, str):
        return Result(False, path)
    whole, began = path.read_text(), time.monotonic()
    if mutated:
        path.write_text(whole.replace(mutation.find, mutation.replace))
    try:
        code, text = run_tests(mutation.tests, root)
    finally:
        path.write_text(whole)
    if not mutated:
        said = text if code == 0 else f"fails without the mutation: {text}"
        return Result(code == 0, said, time.monotonic() - began)
    said = {0: "SURVIVES", 1: text, 5: "its tests do not exist"}.get(code, f"pytest fails: {text}")
    return Result(code == 1, said, time.monotonic() - began)


def run_all(mutations: list[Mutation], run, jobs: int) -> bool:
    """Run every mutation in one of `jobs` copies, with a line for each; whether all are ok."""
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            copy = Path(folder) / str(number) / "checkout"
            shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
            shared = ROOT.parent / "shared"
            if shared.exists():  # golden values and data lie beside a checkout
                (copy.parent / "shared").symlink_to(shared.resolve())
            copies.put(copy)

        def in_a_copy(mutation: Mutation) -> Result:
            copy = copies.get()
            try:
                return run(mutation, copy)
            finally:
                copies.put(copy)

        wrong = []
        width = max(len(mutation.name) for mutation in mutations)
        with (
            concurrent.futures.ThreadPoolExecutor(jobs) as pool,
            tqdm(total=len(mutations), unit="mutation", file=sys.stderr) as bar,
        ):
            began = {pool.submit(in_a_copy, mutation): mutation for mutation in mutations}
            for done in concurrent.futures.as_completed(began):
                mutation, result = began[done], done.result()
                sign = " " if result.ok else "!"
                line = f"{sign} {mutation.name:<{width}}  {result.seconds:5.0f} s  {result.text}"
                bar.write(line, file=sys.stdout)
                sys.stdout.flush()
                bar.update()
                wrong += [] if result.ok else [mutation.name]
    print(f"{len(mutations) - len(wrong)} of {len(mutations)} as they should be")
    if wrong:
        print("not so:", *wrong, sep="\n  ")
    return not wrong


def main() -> int:
    """Parse the command line and run; the exit code."""
    parser = argparse.ArgumentParser(description="Does some test notice each of these mistakes?")
    parser.add_argument("--only", action="append", metavar="NAME", help="part of a name; repeat")
    parser.add_argument("--check", action="store_true", help="run the tests without mutations")
    parser.add_argument("--list", action="store_true", help="print the mutations, run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="copies that run at a time")
    arguments = parser.parse_args()
    mutations = parse(TABLE.read_text())
    if arguments.only:
        mutations = [m for m in mutations if any(part in m.name for part in arguments.only)]
    if not mutations:
        parser.error("no mutation has such a name; --list prints them")
    if arguments.list:
        for mutation in mutations:
            path = target(mutation, ROOT)
            where = path if isinstance(path, str) else path.relative_to(ROOT / PACKAGE)
            print(f"{mutation.name:<50} {where}  {shlex.join(mutation.tests)}")
        return 0
    run = functools.partial(attempt, mutated=not arguments.check)
    return 0 if run_all(mutations, run, arguments.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
