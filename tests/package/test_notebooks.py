"""A notebook runs from top to bottom, from its own folder, and is committed without outputs.

One of them, or all with NOTEBOOKS=all, as in .ci/run. Here with a tenth of a reader's sizes, by
``STEPS = int(os.environ.get("STEPS", 600))``, and without the cells of the tag `processes`, which
start some by Ray, as test_peers and test_pipelines_ray do. benchmarks/render_notebooks.py runs all
of it at full size, every week in CI.
"""

import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
RUN = NOTEBOOKS if os.environ.get("NOTEBOOKS") == "all" else [FOLDER / "05_planner.ipynb"]
SIZE = re.compile(r'^(\w+) = int\(os\.environ\.get\("\1", ([\d_]+)\)\)', re.MULTILINE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_cleared(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.fixture(scope="module")
def kernel(compile_once):
    """One process for all of them: in each new one it takes seconds to import jax and to draw."""
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=300,  # seconds per cell: against hanging
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    with client.setup_kernel(env=os.environ | compile_once | inline):
        yield client


AFRESH = """\
import gc, os, sys, jax, matplotlib
gc.set_threshold(50_000)  # as for the tests, see conftest
sys.modules["ipywidgets"] = None  # the plain figures; the sliders have a test of their own
os.environ |= {sizes}
matplotlib.rcdefaults()
jax.config.update("jax_enable_x64", False)
# "tight" would draw twice.
%config InlineBackend.print_figure_kwargs = {{"bbox_inches": None, "dpi": 20}}
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
%reset -f"""


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_runs(path, kernel):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells = [cell for cell in cells if "processes" not in cell.metadata.get("tags", ())]
    code = "\n".join(cell.source for cell in cells)
    sizes = {name: str(max(2, int(size) // 10)) for name, size in SIZE.findall(code)}
    assert "STEPS" in sizes or "train.run" not in code, "give it STEPS, as the others have"
    before = sorted(FOLDER.iterdir())
    afresh = nbformat.v4.new_code_cell(AFRESH.format(sizes=sizes))
    kernel.nb = nbformat.v4.new_notebook(cells=[afresh, *cells])
    for index, cell in enumerate(kernel.nb.cells):
        kernel.execute_cell(cell, index)
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert sorted(FOLDER.iterdir()) == before


def test_a_slider_draws_again_with_its_value(monkeypatch):
    widgets = pytest.importorskip("ipywidgets")
    notebook = nbformat.read(FOLDER / "01_decentralized_training.ipynb", as_version=4)
    (cell,) = [cell for cell in notebook.cells if cell.source.startswith("def explore(")]
    space = {}
    exec(cell.source.split("\n\n\n")[0], space)
    made, drawn = [], []

    def interact(draw, **controls):
        made.append(widgets.interactive(draw, **controls))

    monkeypatch.setattr(widgets, "interact", interact)
    space["explore"](
        lambda n, graph: drawn.append((n, graph)), n=(2, [1, 2, 4]), graph=("a", ["a", "b"])
    )
    slider, dropdown = made[0].children[:2]
    slider.value = 4
    dropdown.value = "b"
    assert drawn == [(2, "a"), (4, "a"), (4, "b")]
