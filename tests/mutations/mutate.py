"""Eighty mistakes in the core, `rows.txt`, each of which some test must notice.

The weekly workflow runs it, pytest does not:

    python tests/mutations/mutate.py               # all of them; exit code 1 if one survives
    python tests/mutations/mutate.py gossip d2     # those with such a part in their name
    python tests/mutations/mutate.py --jobs 2      # two at a time

A row is a patch. The text after ``-`` must occur exactly once in ``decent_jax/``, in whichever
file; the text after ``+`` takes its place, in a copy of the checkout. After ``|`` stand the files
of tests that should fail then, without ``test_`` and ``.py``, and pytest's options.
"""

import argparse
import concurrent.futures
import dataclasses
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

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", "*.egg-info", "runs", "build"
)
TIMEOUT_S = 600  # of one run of pytest; a mutation that hangs is not caught


@dataclasses.dataclass(frozen=True)
class Mutation:
    """The text `find`, which occurs once, becomes `replace`."""

    name: str
    find: str
    replace: str
    tests: tuple[str, ...]  # arguments of pytest

    def files(self, root: Path) -> list[Path]:
        """The file that holds the text, in a checkout; one for each time."""
        files = (root / "decent_jax").rglob("*.py")
        return [path for path in files for _ in range(path.read_text().count(self.find))]


def test_file(name: str) -> str:
    """The path of a file of tests, wherever in ``tests/`` it lies."""
    found = ROOT.glob(f"tests/**/test_{name}.py")
    return str(next(found, ROOT / f"tests/test_{name}.py").relative_to(ROOT))


def parse(table: str) -> list[Mutation]:
    """The mutations of a table, in order."""
    mutations, room = [], ""
    for block in re.split(r"\n(?![-+])", table.strip()):
        head, *lines = block.split("\n")
        if head.startswith("== "):
            room = head[3:]
        elif head:
            name, selection = head.split(" | ")
            files, dash, options = selection.partition(" -")
            tests = [test_file(file) for file in files.split()]
            find, replace = (
                "\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+"
            )
            arguments = (*tests, *shlex.split(dash + options))
            mutations.append(Mutation(f"{room}/{name}", find, replace, arguments))
    return mutations


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
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, failed[1] if failed else lines[-1] if lines else ""


def notices(mutation: Mutation, root: Path) -> tuple[bool, str]:
    """Whether a test fails with the mutation, in the copy `root`, which is restored; and which."""
    path = mutation.files(root)[0]
    whole = path.read_text()
    path.write_text(whole.replace(mutation.find, mutation.replace))
    try:
        code, text = run_tests(mutation.tests, root)
    finally:
        path.write_text(whole)
    said = {0: "SURVIVES", 1: text, 5: "its tests do not exist"}
    return code == 1, said.get(code, f"pytest fails: {text}")


def run_all(mutations: list[Mutation], jobs: int) -> list[str]:
    """The names of those that no test notices, each printed when it has run."""
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            copies.put(Path(shutil.copytree(ROOT, Path(folder) / str(number), ignore=LEFT_OUT)))

        def in_a_copy(mutation: Mutation) -> str | None:
            copy, began = copies.get(), time.monotonic()
            try:
                ok, text = notices(mutation, copy)
            finally:
                copies.put(copy)
            seconds = time.monotonic() - began
            print(f"{' ' if ok else '!'} {mutation.name:<60} {seconds:4.0f} s  {text}", flush=True)
            return None if ok else mutation.name

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            return [name for name in pool.map(in_a_copy, mutations) if name]


def main() -> int:
    """Parse the command line and run; the exit code."""
    parser = argparse.ArgumentParser(description="Does some test notice each of these mistakes?")
    parser.add_argument("parts", nargs="*", metavar="PART", help="of the names of those to run")
    parser.add_argument("--jobs", type=int, default=1, help="copies that run at a time")
    arguments = parser.parse_args()
    every = parse(Path(__file__).with_name("rows.txt").read_text())
    counts = {m.name: len(m.files(ROOT)) for m in every}
    if amiss := [f"{name}: its text occurs {n} times" for name, n in counts.items() if n != 1]:
        print("These rows do not apply; mend or replace them:", *amiss, sep="\n  ")
        return 1
    chosen = [m for m in every if any(p in m.name for p in arguments.parts or [""])]
    missed = run_all(chosen, arguments.jobs)
    print(f"tests notice {len(chosen) - len(missed)} of {len(chosen)} mistakes")
    if missed:
        print("not:", *missed, sep="\n  ")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
