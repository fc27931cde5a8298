"""Every notebook runs from top to bottom, from its own folder, and is committed without outputs.

Here with a tenth of a reader's steps, by ``STEPS = int(os.environ.get("STEPS", 600))``.
"""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_cleared(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, monkeypatch, compile_once):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for name, value in compile_once.items():
        monkeypatch.setenv(name, value)
    sizes = re.findall(r'os\.environ\.get\(\\"STEPS\\", (\d+)\)', path.read_text())
    if sizes:
        monkeypatch.setenv("STEPS", str(int(sizes[0]) // 10))
    else:
        assert "train.run" not in path.read_text(), "give it STEPS, as the other notebooks have"
    notebook = nbformat.read(path, as_version=4)
    before = sorted(FOLDER.iterdir())
    nbclient.NotebookClient(
        notebook,
        timeout=300,  # seconds per cell: against hanging
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    pictures = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 4
    assert sorted(FOLDER.iterdir()) == before
