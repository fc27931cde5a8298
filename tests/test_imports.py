"""Imports of the package follow the arrows of its rooms."""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "decent_jax"

GROUND = {"errors", "text", "json_files", "progress", "fields", "plot_style"}  # importable by all

# room: what it may import besides the ground and itself.
ARROWS = {
    "topology": set(),
    "gossip": {"topology", "cpu"},
    "replicas": {"gossip"},
    "optim": {"gossip", "replicas", "topology"},
    "models": {"cpu"},
    "data": set(),
    "tasks": {"models", "data"},
    "cluster": {"topology"},
    "train": {"tasks", "optim", "gossip", "replicas", "topology", "data", "cluster", "cpu"},
    "cpu": {"gossip", "replicas", "optim"},
    "planner": {"topology"},
    "simulate": {"topology"},
}
# Started by users (`python -m decent_jax.NAME`), so nothing may import them, and they anything.
COMMANDS = {"sample", "export", "translate", "plot", "preflight", "prepare", "run_folder"}


# Upward arrows that are being mended, (room, imported): none may be added, and one that is gone
# must go from here too.
KNOWN = {
    ("planner", "plot"),  # colours and fonts, which move to the ground
    ("planner", "train"),  # --config, read in the command only
    ("saved_model", "data"),  # the file itself moves into tasks
    ("saved_model", "models"),
    ("saved_model", "replicas"),
    ("saved_model", "tasks"),
    ("saved_model", "train"),
    ("simulate", "planner"),  # the network of machines that a simulated time is for
    ("train", "plot"),  # the figure at the end of a run
}
# What users may call in a loop of their own knows pytrees only.
FOREIGN = {"flax", "ml_collections", "grain", "orbax", "tensorflow_datasets"}
CORE = ("topology", "gossip", "replicas", "optim")


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """(full name, line) of every import in a file, wherever in the file it stands."""
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
        yield from ((name, node.lineno) for name in names)


def arrows(package=PACKAGE):
    """{(room, imported room): [places]}"""
    found = {}
    for path in sorted(package.rglob("*.py")):
        for name, line in imported(path):
            first, *rest = name.split(".")
            if first == "decent_jax" and rest and rest[0] != room_of(path):
                place = f"{path.relative_to(package)}:{line}"
                found.setdefault((room_of(path), rest[0]), []).append(place)
    return found


def allowed(room, target):
    return room in COMMANDS or target in GROUND or target in ARROWS.get(room, ())


def test_imports_follow_the_arrows():
    upward = {arrow: places for arrow, places in arrows().items() if not allowed(*arrow)}
    new = {arrow: places for arrow, places in upward.items() if arrow not in KNOWN}
    assert not new, "\n".join(f"{a} imports {b}: {places}" for (a, b), places in new.items())
    assert not KNOWN - set(upward), "mended: take them off the list"


def test_every_room_is_in_the_table():
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    known = GROUND | set(ARROWS) | COMMANDS | {room for room, _ in KNOWN}
    assert rooms <= known, f"say what it may import: {sorted(rooms - known)}"


def test_the_ground_imports_nothing_of_the_package():
    assert not [arrow for arrow in arrows() if arrow[0] in GROUND and arrow[1] not in GROUND]


def test_the_core_knows_only_pytrees():
    for room in CORE:
        for path in [*PACKAGE.glob(f"{room}.py"), *PACKAGE.glob(f"{room}/**/*.py")]:
            first = {name.partition(".")[0]: line for name, line in imported(path)}
            assert not FOREIGN & set(first), path
            if room == "topology":  # schedules are NumPy and the standard library
                others = set(first) - set(sys.stdlib_module_names) - {"decent_jax"}
                assert others <= {"numpy", "scipy", "matplotlib", "networkx"}, (path, others)


def test_an_upward_import_is_found(tmp_path, monkeypatch):
    """In any form: from, import, and inside a function."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "topology").mkdir()
    text = "from decent_jax import optim\ndef f():\n    import decent_jax.train.loop\n"
    (tmp_path / "topology" / "make.py").write_text(text + "from ..gossip import mix\n")
    found = arrows(tmp_path)
    assert found[("topology", "optim")] == ["topology/make.py:1"]
    assert found[("topology", "train")] == ["topology/make.py:3"]
    assert found[("topology", "gossip")] == ["topology/make.py:4"]
    assert not any(allowed(*arrow) for arrow in found)
