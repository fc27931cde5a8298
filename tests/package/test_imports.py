"""Imports of the package follow the arrows of its rooms."""

import ast
import functools
import graphlib
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "decent_jax"

# Importable by all.
GROUND = {"ground"}

# room: what it may import besides the ground and itself.
ARROWS = {
    "topology": set(),
    "plots": {"monitor", "topology"},
    "plan": {"topology"},
    "gossip": {"topology", "cpu"},
    "replicas": {"gossip"},
    "optim": {"gossip", "replicas", "topology"},
    "models": {"cpu"},
    "data": set(),
    "tasks": {"models", "data"},
    "cluster": {"plan", "topology"},
    "checkpoints": {"cluster", "optim", "replicas"},
    "monitor": set(),
    "train": {
        *("checkpoints", "monitor", "tasks", "optim", "gossip", "replicas", "topology"),
        *("data", "cluster", "cpu", "plots", "plan"),
    },
    "cpu": set(),
    "planner": {"plan", "plots", "topology"},
    "actors": {"cluster"},
    "peers": {
        *("train", "checkpoints", "monitor", "actors", "data", "replicas", "optim", "topology"),
        "gossip",
    },
    "pipelines": {
        *("train", "checkpoints", "monitor", "actors", "tasks", "models", "data", "optim"),
        *("gossip", "replicas", "topology", "cluster", "plan"),
    },
}
# Each can be deleted with its tests, and the rest passes.
EXTENSIONS = {"peers", "pipelines", "planner"}
# Started by users (`python -m decent_jax.NAME`): they may import all, and no room imports them.
COMMANDS = {"commands"}
COMMAND_FILES = {
    "planner/options.py",  # the flags of the planner, among them --config
}
# The most lines of code of each room, without blanks, comments and docstrings. Who raises a number
# says in the commit what needs the lines.
MOST_LINES = {
    "topology": 797,
    "gossip": 880,
    "replicas": 208,
    "optim": 1449,
    "models": 1547,
    "data": 3422,
    "tasks": 1067,
    "train": 3391,
    "checkpoints": 861,
    "monitor": 661,
    "cpu": 293,
    "cluster": 1362,
    "planner": 1788,
    "actors": 206,
    "peers": 2030,
    "pipelines": 1077,
    "plan": 128,
    "plots": 468,
    "commands": 793,
    "ground": 962,
    "__init__": 13,
}
# What users may call in a loop of their own knows pytrees only.
FOREIGN = {"flax", "ml_collections", "grain", "orbax"}
CORE = ("topology", "gossip", "replicas", "optim")


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_command(path):
    return room_of(path) in COMMANDS or str(path.relative_to(PACKAGE)) in COMMAND_FILES


@functools.cache
def imported(path):
    """[(full name, line)] of every import in a file, wherever in the file it stands."""
    found = []
    package = ["decent_jax", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(name, node.lineno) for name in names]
    return found


def code_lines(path):
    """How many lines of a file hold code: no blanks, comments or docstrings."""
    layout = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    with path.open("rb") as file:
        unread = {tokenize.COMMENT, tokenize.NL}
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in unread]
    lines = set()
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        alone = before.type in layout and after.type == tokenize.NEWLINE
        if token.type not in layout and not (token.type == tokenize.STRING and alone):
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines)


def arrows():
    """{(room, imported room): [places]}, without what commands import."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if is_command(path):
            continue
        room = room_of(path)
        for name, line in imported(path):
            first, *rest = name.split(".")
            if first == "decent_jax" and rest and rest[0] != room:
                place = f"{path.relative_to(PACKAGE)}:{line}"
                found.setdefault((room, rest[0]), []).append(place)
    return found


def allowed(room, target):
    return target in GROUND or target in ARROWS.get(room, ())


def test_imports_follow_the_arrows():
    upward = {arrow: places for arrow, places in arrows().items() if not allowed(*arrow)}
    assert not upward, "\n".join(f"{a} imports {b}: {places}" for (a, b), places in upward.items())


def test_rooms_and_modules_import_each_other_in_no_circle():
    """Not even inside a function."""
    below = {}
    for room, target in arrows():
        below.setdefault(room, set()).add(target)
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(["decent_jax", *path.relative_to(PACKAGE).with_suffix("").parts])
        below[module.removesuffix(".__init__")] = found = set()
        for name, _ in imported(path):
            while name and not (PACKAGE.parent / (name.replace(".", "/") + ".py")).is_file():
                name = name.rpartition(".")[0]
            found |= {name} - {""}
    try:
        graphlib.TopologicalSorter(below).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_no_room_needs_an_extension():
    assert not [room for room, may in ARROWS.items() if may & EXTENSIONS]


def test_every_room_is_in_the_table():
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    known = GROUND | set(ARROWS) | COMMANDS
    assert rooms == known, f"say what it may import: {sorted(rooms ^ known)}"
    assert all((PACKAGE / name).is_file() for name in COMMAND_FILES)


def test_no_room_has_more_lines_than_it_may():
    lines = Counter()
    for path in PACKAGE.rglob("*.py"):
        lines[room_of(path)] += code_lines(path)
    assert lines.keys() == MOST_LINES.keys()
    more = {room: (count, MOST_LINES[room]) for room, count in lines.items()}
    more = {room: pair for room, pair in more.items() if pair[0] > pair[1]}
    assert not more, f"{more}: (lines of code, the most)"


def test_the_core_knows_only_pytrees():
    for room in CORE:
        for path in [*PACKAGE.glob(f"{room}.py"), *PACKAGE.glob(f"{room}/**/*.py")]:
            first = {name.partition(".")[0]: line for name, line in imported(path)}
            assert not FOREIGN & set(first), path
            if room == "topology":  # schedules are NumPy and the standard library
                others = set(first) - set(sys.stdlib_module_names) - {"decent_jax"}
                assert others <= {"numpy", "scipy", "networkx"}, (path, others)


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them as modules without a package, and would stop at the second."""
    files = [*PACKAGE.parent.glob("tests/**/*.py")]
    names = [path.name for path in files if path.stem == "conftest" or "test_" in path.stem]
    assert len(names) > 50 and len(set(names)) == len(names)
