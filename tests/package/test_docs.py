"""What the documents say is there, and the code in them runs."""

import contextlib
import functools
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from flax import nnx

from decent_jax import replicas, topology, train
from decent_jax.ground.command_line import CONFIGS
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.json_files import flat
from decent_jax.optim import METHODS
from decent_jax.tasks import TASKS
from decent_jax.topology import graphs
from decent_jax.train import config as config_lib
from decent_jax.train import flags

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "docs/log/*.md")
    for path in sorted(ROOT.glob(pattern))
]
# Folders of this repository; a path that begins with one must exist.
FOLDERS = ("benchmarks", "configs", "decent_jax", "docs", "launch", "notebooks", "tests")
FOLDERS += (".ci",)


def paths_in(text):
    """Paths of this repository that a document names, as code, link or in a command.

    A name in capitals stands for something the reader chooses: ``decent_jax/tasks/NAME.py``.
    """
    names = rf"(?<![\w./~-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*\w"
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    found = {*re.findall(names, text), *re.findall(r"(?<![\w./-])[A-Z]+\.md\b", text), *links}
    return sorted(path for path in found if not re.search(r"\b[A-Z_]*NAME\b", path))


def python_blocks(text):
    """The ``python`` blocks, each after as many newlines as stand before it."""
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield "\n" * text.count("\n", 0, match.start(1)) + textwrap.dedent(match[1])


def run(name, *blocks):
    """The names that blocks of a document, as one program, leave."""
    names = {"__name__": Path(name).stem}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return names


# What the programs of each page print, as one; library.md has tests of its own.
PRINTED = {
    "README.md": lambda printed: float(printed) < 0.05,
    "docs/topologies.md": lambda printed: "'exact_after': 3" in printed,
    "docs/algorithms.md": lambda printed: printed == "0.5337\n0.0000\n",
    "docs/from_ddp.md": lambda printed: float(printed.removeprefix("loss ")) < 0.05,
    "docs/loop_details.md": lambda printed: (
        float(re.search(r"^loss ([^ ,]+)", printed, re.M)[1]) < 0.05
        and 0 < float(re.search(r"^loss .*distance (\S+) ", printed, re.M)[1]) < 0.2
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_code_of_a_page_runs(name, capsys, compile_once):
    run(name, *python_blocks((ROOT / name).read_text()))
    printed = capsys.readouterr().out
    assert PRINTED[name](printed), printed


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_exist(name):
    document = ROOT / name
    text = document.read_text()
    missing = [
        path
        for path in paths_in(text)
        if not (ROOT / path).exists() and not (document.parent / path).exists()
    ]
    assert not missing


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if "docs/log" not in name])
def test_fields_that_are_named_exist(name):
    fields = {field for task in TASKS for field in flat(train.default_config(task))}
    sections = {field.partition(".")[0] for field in fields if "." in field}
    named = re.findall(r"`([a-z_]+\.[a-z_0-9]+)(?:=[^`\s]*)?`", (ROOT / name).read_text())
    assert {x for x in named if x.partition(".")[0] in sections} <= fields | FILES


def is_there(name):
    """Whether this dotted name of the package is a module, or something in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            there = importlib.import_module(".".join(parts[:count]))
            break
    for part in parts[count:]:
        documented = re.search(rf"\b{part}\b", getattr(there, "__doc__", None) or "")
        if not hasattr(there, part):  # an attribute of instances, which ends a name
            return bool(documented or part in getattr(there, "__annotations__", ()))
        there = getattr(there, part)
    return True


def test_names_in_docstrings_and_pages_exist():
    assert is_there("decent_jax.train.rows.Rows.add") and is_there(
        "decent_jax.train.rows.Rows.done"
    )
    assert not is_there("decent_jax.train.rows.Report") and not is_there("decent_jax.trains")
    files = [*ROOT.glob("decent_jax/**/*.py"), *map(ROOT.joinpath, DOCUMENTS)]
    named = {
        (name, path.name)
        for path in files
        if "log" not in path.parts
        for name in re.findall(r"`(decent_jax(?:\.\w+)+)`", path.read_text())
    }
    assert len(named) > 100
    assert not {row for row in named if "KIND" not in row[0] and not is_there(row[0])}


FILES = {"model.safetensors", "log.txt", "peers.json"}  # with names like fields

# --- Commands -------------------------------------------------------------------------------------

PLACES = "*.md docs/*.md docs/log/*.md launch/* configs/*.py decent_jax/**/*.py notebooks/*.ipynb"


def configs_in(path):
    """Every ``--config NAME --config.FIELD=VALUE ...``: the name, and the list of fields."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join(cell.source for cell in nbformat.reads(text, as_version=4).cells)
    for line in re.sub(r"\\+\n\s*", " ", text).splitlines():
        for name, rest in re.findall(r"--config ([\w/.]+(?::[\w,]+)?)([^`]*)", line):
            yield name, re.findall(r"--config\.\w\w[\w.]*=[^\s`\"')\\$]+", rest)


NAMING = {
    path.relative_to(ROOT): list(configs_in(path))
    for place in PLACES.split()
    for path in sorted(ROOT.glob(place))
    if path.is_file()
}


@pytest.mark.parametrize("path", [path for path, found in NAMING.items() if found], ids=str)
def test_the_trainer_takes_the_config_of_every_command(path, monkeypatch):
    """Apart from data and plans, which need not be here."""
    monkeypatch.chdir(ROOT)
    for name, fields in NAMING[path]:
        known = name.partition(":")[0].removeprefix("configs/").removesuffix(".py") in CONFIGS
        config = flags.load(name if known else "quickstart")
        if not known:  # it stands for any
            assert not name.startswith("configs/")
        try:
            config_lib.validate(flags.override_all(config, fields))
        except ConfigError as error:
            absent = error.field in ("data.path", "cluster.plan") or str(error.value).isupper()
            assert absent, (name, fields, error)


def test_documents_name_paths_and_configs():
    """Or the tests above look at nothing."""
    assert sum(len(paths_in((ROOT / name).read_text())) for name in DOCUMENTS) > 300
    assert sum(len(fields) for pairs in NAMING.values() for _, fields in pairs) > 30


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "notebooks").glob("*.md")), ids=lambda p: p.stem
)
def test_pages_of_notebooks_are_of_today(page):
    """benchmarks/render_notebooks.py writes them; every figure that a page shows is there."""
    path, text = ROOT / "notebooks" / f"{page.stem}.ipynb", page.read_text()
    for cell in nbformat.read(path, as_version=4).cells:
        command = f"python benchmarks/render_notebooks.py notebooks/{path.name}"
        assert cell.source in text, f"run {command}"
    shown = re.findall(r"!\[.*\]\((\S+\.png)\)", text)
    assert shown
    assert sorted(shown) == sorted(p.name for p in page.parent.glob(f"{page.stem}_*.png"))


def test_the_site_and_the_log_have_every_page():
    """`mkdocs build --strict` says the first, too, at the end of CI; docs/site.py adds the log."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in navigation, page.name
    log = ROOT / "docs" / "log"
    rows = re.findall(r"\| \[(.*)\]\((.*)\) \|", (log / "index.md").read_text())
    heads = {page.name: page.read_text().split("\n")[0] for page in log.glob("[0-9]*.md")}
    assert {name: f"# {words}" for words, name in rows} == heads


# --- docs/topologies.md ---------------------------------------------------------------------------


def of_size(name, n):
    try:
        return topology.make(name, n, replicas_per_node=4)
    except ValueError:
        return None


def summary_row(name):
    schedule = of_size(name, 24)
    numbers, by_node = schedule.summary(), schedule.bytes_sent(1, replicas_per_node=4)
    cells = [f"{numbers['models_sent']:.3g}", f"{by_node:.3g}", f"{numbers['spectral_gap']:.3f}"]
    cells = [numbers["period"], numbers["degree"], *cells, f"{numbers['consensus_rate']:.3f}"]
    return [*cells, numbers["exact_after"] or ""]


def rounds_row(name):
    sizes = [of_size(name, n) for n in (8, 16, 24, 32, 64)]
    return ["" if one is None else one.rounds_to_consensus(1e-6) for one in sizes]


@pytest.mark.parametrize(("head", "row"), [("period", summary_row), ("n = 8", rounds_row)])
def test_tables_of_topologies(head, row):
    """If a number is meant to change, paste what this prints."""
    text = (ROOT / "docs" / "topologies.md").read_text()
    table = text.split(f"\n| name | {head} |")[1].split("|---|\n")[1].split("\n\n")[0]
    names = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    computed = "\n".join(f"| `{name}` | {' | '.join(map(str, row(name)))} |" for name in names)
    assert len(names) > 15 and table == computed, computed


def test_the_table_of_names_has_every_schedule_with_its_parameters():
    text = (ROOT / "docs" / "topologies.md").read_text()
    table = text.split("\n| name | replicas n |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)(?:\((.*?)\))?` \|", table, re.MULTILINE))
    module = importlib.import_module("decent_jax.topology.make")
    assert rows.keys() == {*topology.NAMES, *module.COLUMN_STOCHASTIC}
    for name, written in rows.items():
        values = dict(part.partition("=")[::2] for part in written.split(", ") if part)
        builder = getattr(graphs, name, None) or getattr(module, name)
        parameters = {*inspect.signature(builder).parameters} - {"n", "replicas_per_node"}
        assert values.keys() == parameters, name
        given = ", ".join(f"{k}={v}" for k, v in values.items() if v and v != "...")
        made, default = (
            [rnd.matrix for rnd in topology.make(written, 8, replicas_per_node=4).rounds]
            for written in (f"{name}({given})", name)
        )
        np.testing.assert_array_equal(made, default, name)


# --- docs/algorithms.md ---------------------------------------------------------------------------


def test_every_algorithm_is_in_the_table_with_what_it_declares():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    for name, method in METHODS.items():
        row = re.search(rf"^\| `{name}` \|(.*)\|$", text, re.MULTILINE)
        assert row, name
        _, optimizers, _, messages, memory = (cell.strip() for cell in row[1].split("|"))
        assert optimizers == ", ".join(method.optimizers), name
        if messages.isdigit():
            assert int(messages) == method.messages, name
        assert int(memory.split()[0]) == method.copies, name


# --- docs/library.md, docs/loop_details.md --------------------------------------------------------


# The sections of library.md, and where each program keeps the parameters of its replicas.
PROGRAMS = {
    "Flax NNX": lambda names: nnx.state(names["model"], nnx.Param),
    "Flax Linen": lambda names: names["state"].params,
    "Equinox": lambda names: names["params"],
    "Haiku, or functions of your own": lambda names: names["params"],
}


def blocks_of(section):
    text = (ROOT / "docs" / "library.md").read_text()
    return list(python_blocks(text.split(f"\n## {section}\n")[1].split("\n## ")[0]))


def all_reduce(program):
    """The program without gossip, of which the marks of library.md speak."""
    program = re.sub(r"^( *)# was: (.*)\n.*\n", r"\1\2\n", program, flags=re.MULTILINE)
    return re.sub(r"^.*  # new\n", "", program, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("section", PROGRAMS)
def test_the_programs_of_library_md_learn(section, capsys, compile_once):
    """With gossip and by all-reduce; without either, replicas of the last are further apart."""
    program, distances = blocks_of(section)[0], []
    assert sum(bool(line) for line in program.splitlines()) <= 40
    assert "decent_jax" not in all_reduce(program)
    programs = [program, all_reduce(program)]
    if section == [*PROGRAMS][-1]:
        programs.append(program.replace("schedule.round_at(t)", "None"))
    for code in programs:
        names = run("docs/library.md", code)
        loss = float(capsys.readouterr().out.removeprefix("loss "))
        assert loss < 0.05 or code is programs[2]
        if code is not programs[1]:
            distances.append(replicas.consensus_distance(PROGRAMS[section](names)).distance)
    assert 0 < distances[0] < distances[-1] / 3 or len(distances) == 1


@pytest.mark.slow
def test_the_optimizer_of_library_md_brings_a_lost_replica_of_nnx_back(compile_once):
    program, optimizer = blocks_of("Flax NNX")
    gossip = program.replace("nnx.Optimizer(model", "GossipOptimizer(model").replace("100):", "1):")
    head = program[: program.index("def loss")]  # the imports, which the class needs
    names = run("docs/library.md", head, optimizer, gossip)
    bias = names["model"].layers[0].bias
    bias[...] = bias[...].at[3].set(np.nan)
    model, _, _ = names["train_step"](names["model"], names["optimizer"], names["x"], round=0)
    assert replicas.finite(nnx.as_pure(nnx.state(model, nnx.Param))).all()


def test_the_code_of_coming_from_md_runs():
    """The blocks called "here"; those of others have a title, and are not run."""
    names = run("docs/coming_from.md", *python_blocks((ROOT / "docs/coming_from.md").read_text()))
    for name in ("decent_dp", "bluefog", "swarm", "diloco", "streaming"):
        step = functools.partial(names[name].update, round=0)
        each = jnp.arange(4.0 if name == "streaming" else 8.0)
        params = {"a": each, "b": -each}
        state = jax.jit(jax.vmap(names[name].init))(params)
        updates, _ = jax.jit(jax.vmap(step, axis_name="replica"))(params, state, params)
        assert replicas.finite(updates).all(), name


def test_the_launcher_of_trainers_md_is_what_the_benchmark_runs():
    """MaxText is too large to install for a test; the benchmark ran this code."""
    page, script = (
        (ROOT / p).read_text()
        for p in ("docs/trainers.md", "benchmarks/evidence/maxtext_gossip.py")
    )
    (build,) = re.findall(r"^def build.*?^    return step$", page, re.MULTILINE | re.DOTALL)
    assert re.sub(r"\n+", "\n", textwrap.indent(build, "    ")) in re.sub(r"\n+", "\n", script)
