"""Run the notebooks and write them as pages with their figures, for the site and for GitHub.

    python benchmarks/render_notebooks.py [notebooks/01_decentralized_training.ipynb ...]

Each becomes docs/notebooks/NAME.md with NAME_1.png, NAME_2.png, ... beside it. A page has no
sliders, but the figure of their first position. Run it again when a notebook has changed (a test
compares the code).
"""

import base64
import io
import os
import sys
from pathlib import Path

import nbclient
import nbformat
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import commands

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "notebooks"
# A page has no sliders; the notebooks then draw a plain figure.
PLAIN = "import sys\nsys.modules['ipywidgets'] = None"


def render(path: Path) -> Path:
    """Run the notebook as a reader would and write its page."""
    notebook = nbformat.read(path, as_version=4)
    cells = notebook.cells
    notebook.cells = [nbformat.v4.new_code_cell(PLAIN), *cells]
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=1800, resources=resources).execute()
    for old in FOLDER.glob(f"{path.stem}_*.png"):
        old.unlink()
    parts = [f"<!-- Made of notebooks/{path.name} by benchmarks/render_notebooks.py -->"]
    figures = 0
    for cell in cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                figures += 1
                figure = FOLDER / f"{path.stem}_{figures}.png"
                save_small(data["image/png"], figure)
                parts.append(f"![Figure {figures}]({figure.name})")
            elif "text/plain" in data:
                parts.append(f"```text\n{data['text/plain'].rstrip()}\n```")
            elif output.get("name") == "stdout":
                parts.append(f"```text\n{output.text.rstrip()}\n```")
    page = FOLDER / f"{path.stem}.md"
    page.write_text("\n\n".join(parts) + "\n")
    return page


def save_small(encoded: str, path: Path) -> None:
    """Write a PNG of 256 colours, which figures of lines and words do not show."""
    image = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    image.quantize(256, kmeans=1, dither=Image.Dither.NONE).save(path, optimize=True)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = commands.parser(__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="FILE.ipynb", help="or all")
    options = parser.parse_args(arguments)
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in options.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb")):
        print(render(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
