"""What the documents say is there, and the code in them runs."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/library.md")
COMMANDS = (
    "pip install -e . && python train.py --config configs/quickstart.py --workdir runs/quickstart",
    "pip install -e '.[test]' && pytest",
)
# Folders of this repository; a path that begins with one must exist.
FOLDERS = ("benchmarks", "configs", "decent_jax", "docs", "notebooks", "tests", ".ci")


def paths_in(text):
    """Paths of this repository that a document names, as code, link or in a command.

    A name in capitals stands for something the reader chooses: ``decent_jax/tasks/NAME.py``.
    """
    names = rf"(?<![\w./~-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*\w"
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    found = {*re.findall(names, text), *re.findall(r"(?<![\w./-])[A-Z]+\.md\b", text), *links}
    return sorted(path for path in found if not re.search(r"\b[A-Z_]*NAME\b", path))


def modules_in(text):
    """Modules of this project that a document runs with ``python -m``."""
    return sorted(set(re.findall(r"python -m (decent_jax[\w.]*\w)", text)))


def python_blocks(text):
    """The ``python`` blocks, each after as many newlines as stand before it."""
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield "\n" * text.count("\n", 0, match.start(1)) + textwrap.dedent(match[1])


def test_readme_is_short_and_shows_the_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 200
    for command in COMMANDS:
        assert any(line.strip() == command for line in lines), command


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_modules_that_are_named_exist(name):
    document = ROOT / name
    text = document.read_text()
    missing = [
        path
        for path in paths_in(text)
        if not (ROOT / path).exists() and not (document.parent / path).exists()
    ]
    missing += [
        module
        for module in modules_in(text)
        if not (ROOT / (module.replace(".", "/") + ".py")).is_file()
    ]
    assert not missing


def test_the_checks_of_this_file_find_something():
    text = "`docs/a.md`, [b](c/d.png), `tests/NAME.py` and `python -m decent_jax.plot RUN`"
    assert paths_in(text) == ["c/d.png", "docs/a.md"]
    assert modules_in(text) == ["decent_jax.plot"]
    assert list(python_blocks("a\n```python\nb\n```\n```\nc\n```\n")) == ["\n\nb\n"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "figures").glob("*")), ids=lambda p: p.name
)
def test_figures_are_small(path):
    assert path.suffix == ".png"
    assert path.stat().st_size < 200_000


@pytest.mark.slow
def test_the_code_of_library_md_runs(capsys):
    document = ROOT / "docs" / "library.md"
    space = {"__name__": "library"}
    blocks = list(python_blocks(document.read_text()))
    assert len(blocks) > 5
    for block in blocks:  # one program: a block uses the names of those before it
        exec(compile(block, str(document), "exec"), space)
    found = re.search(r"^loss (\S+), consensus distance (\S+) ", capsys.readouterr().out, re.M)
    assert float(found[1]) < 0.05
    assert 0 < float(found[2]) < 0.2
