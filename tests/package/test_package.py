"""What pip installs: the core alone, the extras, every package of the wheel, one command."""

import datetime
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from refusals import refuses
from test_imports import imported

import decent_jax
from decent_jax.commands import main as command
from decent_jax.ground import command_line, extras
from decent_jax.train import flags

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "decent_jax"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


def distributions(requirements):
    """Names of the distributions that requirements name, with those of extras of this project."""
    found = set()
    for requirement in requirements:
        if requirement.startswith("decent_jax["):
            for extra in re.findall(r"\w+", requirement.partition("[")[2]):
                found |= distributions(EXTRAS[extra])
        else:
            found.add(re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-"))
    return found


CORE = distributions(PYPROJECT["project"]["dependencies"])
OF_EXTRAS = distributions([f"decent_jax[{','.join(EXTRAS)}]"]) - CORE
WITH_OTHERS = {"jaxlib", "ml-dtypes", "absl-py", "array-record"}  # jax, jax; grain


@pytest.fixture(scope="module")
def installed_as():
    """{top-level module: distributions}."""
    found = importlib.metadata.packages_distributions().items()
    return {module: {n.lower().replace("_", "-") for n in names} for module, names in found}


def test_the_wheel_has_every_package():
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(found | {"decent_jax.configs"}) == sorted(listed)


def test_the_changelog_has_a_date_for_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.search(r"^## (\S+) - (\S+)$", text, re.MULTILINE).groups()
    assert version == PYPROJECT["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert datetime.date.fromisoformat(date).year >= 2026


def test_what_the_code_imports_is_a_dependency(installed_as):
    of_files = {
        name.partition(".")[0]: path for path in PACKAGE.rglob("*.py") for name, _ in imported(path)
    }
    for module, path in of_files.items():
        names = installed_as.get(module, {module})
        known = CORE | OF_EXTRAS | WITH_OTHERS | {"decent-jax", *sys.stdlib_module_names}
        assert names & known or module in known, f"{path} imports {module}, which is in no extra"


def test_what_the_code_asks_for_is_in_the_extra_that_it_names(installed_as):
    asked = 0
    for path in PACKAGE.rglob("*.py"):
        for extra, modules in re.findall(r"extras\.need\(\"(\w+)\", (.*?)\)", path.read_text()):
            for module in re.findall(r"\w+", modules):
                asked += 1
                names = installed_as.get(module, {module})
                assert names & distributions(EXTRAS[extra]), (path, extra, module)
    assert asked > 10


def test_the_core_works_where_no_extra_is_installed(installed_as):
    """And a command says which extra it needs, in one sentence."""
    blocked = [module for module, names in installed_as.items() if names & OF_EXTRAS]
    assert {"flax", "tqdm", "ml_collections", "matplotlib", "orbax"} <= set(blocked)
    code = f"""
import sys
sys.modules.update(dict.fromkeys({blocked}))
from decent_jax import optim, topology, gossip, replicas
import decent_jax, optax
tx = decent_jax.optim.decentralized(optax.sgd(0.1), topology.make("ring", 4))
try:
    from decent_jax.plots import rounds
except ImportError as error:
    print(error)
from decent_jax.commands import main as command
for name in command.COMMANDS:
    try:
        print(name, command.main([name, "w" if name == "plot" else "--help"]))
    except SystemExit as end:
        print(name, end.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    hint = "pip install 'decent_jax[train]'"
    assert f"matplotlib is not installed: {hint}" in done.stdout.splitlines()
    codes = {
        name: int(re.search(rf"^{name} (\d)$", done.stdout, re.M)[1]) for name in command.COMMANDS
    }
    assert [name for name, code in codes.items() if code == 0] == ["status"]
    said = dict(
        line.removeprefix("decent-jax ").split(": ", 1) for line in done.stderr.splitlines()
    )
    assert said.keys() == codes.keys() - {"status"}
    assert all(sentence.endswith(f" not installed: {hint}") for sentence in said.values())
    missing = "ml_collections, flax, grain, matplotlib, orbax and tqdm"
    assert said["train"] == f"{missing} are not installed: {hint}"
    assert said["plot"] == f"matplotlib is not installed: {hint}"


def test_another_system_has_the_core_and_is_told_what_it_cannot_do():
    """Windows has no fcntl, macOS no pidfd_open."""
    code = """
import platform, sys
import jax
from decent_jax.commands import main as command
platform.system = lambda: "Windows"
sys.modules["fcntl"] = None
from decent_jax import optim, topology, gossip, replicas
print(command.main(["train", "--config", "quickstart", "--workdir", "w"]))
del sys.modules["fcntl"]
platform.system = lambda: "Darwin"
print(command.main(["supervise", "--processes", "2", "--", "train.py"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["2", "2"], done.stderr
    windows, mac = done.stderr.splitlines()
    assert "this is Windows" in windows and "WSL" in windows
    assert "this is Darwin" in mac and "supervise" in mac


def test_rooms_are_attributes_of_the_package():
    assert decent_jax.topology.make("ring", 4).period == 2
    rooms = {
        path.stem for path in Path(decent_jax.__file__).parent.iterdir() if path.stem[0] != "_"
    }
    assert rooms - {"py", "configs"} <= set(dir(decent_jax))
    assert "create" in dir(decent_jax.replicas) and "jax" not in dir(decent_jax.replicas)
    with refuses("'topologies'", error=AttributeError):
        decent_jax.topologies  # noqa: B018
    extras.need("train", "flax")
    with refuses("no_such", "'decent_jax[train]'", error=extras.Unavailable):
        extras.need("train", "flax", "no_such")


def test_the_command_teaches_and_knows_its_commands(capsys):
    assert command.main([]) == 0
    words = capsys.readouterr().out
    for name in command.COMMANDS:
        assert f"\n  {name} " in words
        with pytest.raises(SystemExit):
            command.main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: decent-jax {name} ")
    assert all(name in words for name in command_line.CONFIGS)
    for wrong, near in (("tran", "train"), ("sweep", "sample"), ("\u2192", "planner")):
        assert command.main([wrong]) == 2
        err = capsys.readouterr().err
        assert f"no command {wrong!r}" in err and near in err and err.count("\n") == 1


def test_configs_have_names(capsys):
    assert set(command_line.CONFIGS) == {path.stem for path in (ROOT / "configs").glob("*.py")}
    by_name, by_file = flags.load("quickstart"), flags.load(str(ROOT / "configs/quickstart.py"))
    assert by_name.to_dict() == by_file.to_dict()
    assert command.main(["train", "--config", "quickstrat", "--workdir", "w"]) == 2
    assert "'quickstrat'" in capsys.readouterr().err
