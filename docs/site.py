"""What the site has besides `docs/`: the README and its neighbours, the config's fields, the API.

mkdocs runs this (`hooks` of mkdocs.yml). Each page comes from where its content is kept, so that
nothing is written twice.
"""

import html
import importlib
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

from decent_jax import tasks
from decent_jax.ground.fields import Field
from decent_jax.optim import METHODS
from decent_jax.train.config import fields_of
from decent_jax.train.config_table import FIELDS

ROOT = Path(__file__).resolve().parents[1]

# Files of the repository's root that are pages, and their names on the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}

# Pages of the API: the modules on each, with what it says first.
API = {
    "topology": ("Who averages with whom; NumPy only.", ["topology"]),
    "gossip": ("A round as messages between replicas.", ["gossip"]),
    "replicas": ("n copies of the parameters in one pytree.", ["replicas"]),
    "optim": ("Methods as optax transformations.", ["optim"]),
    "train": ("What `train.py` calls.", ["train", "ground.fields"]),
    "tasks": ("What is trained: the interface of a task.", ["tasks"]),
    "runs": (
        "What a run leaves behind, read in Python.",
        ["ground.run_folder", "commands.saved_model", "plots.runs", "plots.style"],
    ),
    "simulate": ("Gossip in NumPy, event by event.", ["simulate"]),
}


def on_files(files: Files, config) -> Files:
    """Add the pages that are not in docs/."""
    for name, page in PAGES.items():
        text = _links_of_site((ROOT / name).read_text(), "")
        files.append(File.generated(config, page, content=text))
    for page, (first, modules) in API.items():
        text = "\n".join([f"# {page}\n\n{first}\n", *map(_api, modules)])
        files.append(File.generated(config, f"api/{page}.md", content=text))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Point links out of docs/ at the pages of this site; write the table of fields."""
    if page.file.src_uri in PAGES.values() or page.file.src_uri.startswith("api/"):
        return markdown
    if page.file.src_uri == "config.md":
        return markdown.replace("<!-- fields -->", _fields())
    return _links_of_site(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)))


def on_page_content(content: str, **_) -> str:
    """Write formulas as MathML, which browsers show without a script."""
    formula = r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>'
    return re.sub(formula, _mathml, content, flags=re.DOTALL)


def _mathml(match: re.Match) -> str:
    tag, formula = match.groups()
    formula = formula.replace("{aligned}", "{split}")  # the same; latex2mathml has no aligned
    return convert(html.unescape(formula).strip(), display="block" if tag == "div" else "inline")


def _api(module: str) -> str:
    """The module's own docstring, then each of its public names."""
    path = f"decent_jax.{module}"
    loaded = importlib.import_module(path)
    names = getattr(loaded, "__all__", None) or [n for n in vars(loaded) if n[0] != "_"]
    values = [getattr(loaded, name) for name in names]
    # The path of the definition: a module may have the name of a function in it.
    defined = [
        f"{value.__module__}.{value.__qualname__}"
        for value in values
        if hasattr(value, "__qualname__") and value.__module__.startswith("decent_jax")
    ]
    head = f"::: {path}\n    options:\n      members: false\n      show_root_heading: false\n"
    return "\n".join([head, *(f"::: {name}\n" for name in defined)])


# --- Links ----------------------------------------------------------------------------------------


def _links_of_site(text: str, folder: str) -> str:
    """The text of a page in this folder of the repository, with links to the pages of this site.

    A link to a file that is no page, such as a config, keeps its words only.
    """

    def replaced(match: re.Match) -> str:
        image, words, path, anchor = match.groups()
        target = _page_of(posixpath.normpath(posixpath.join(folder, path)))
        if target is None:
            return match[0] if image else words
        here = folder.removeprefix("docs").lstrip("/") or "."
        return f"{image}[{words}]({posixpath.relpath(target, here)}{anchor or ''})"

    link = r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)"
    return re.sub(link, replaced, text)


def _page_of(path: str) -> str | None:
    """The page or figure that shows a file of the repository, relative to docs/; None: no page."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("notebooks/"):
        path = f"docs/{path.removesuffix('.ipynb')}.md"
    there = path.startswith("docs/") and (ROOT / path).is_file()
    return path.removeprefix("docs/") if there else None


# --- The fields of a config -----------------------------------------------------------------------


def _fields() -> str:
    """Tables of all fields, as `decent_jax.train.config` and the tasks declare them."""
    sections: dict[str, dict[str, Field]] = {"": {}}
    for name, field in FIELDS.items():
        section = name.rpartition(".")[0]
        sections.setdefault(section, {})[name] = field
    parts = []
    for section, members in sections.items():
        parts += [f"## {section}" if section else "## The run", _table(members)]
    for task in tasks.TASKS:
        own = {k: v for k, v in tasks.find(task).FIELDS.items() if k not in FIELDS}
        parts += [f"## task = {task}", _table(own)]
    everything = fields_of(next(iter(tasks.TASKS)))
    for name, method in METHODS.items():
        section = method.config_section
        own = {k: v for k, v in everything.items() if section and k.startswith(f"{section}.")}
        if own:
            parts += [f"## algorithm = {name}", _table(own)]
    return "\n\n".join(parts)


def _table(members: dict[str, Field]) -> str:
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for name, field in members.items():
        meaning = field.doc.replace("|", "\\|").replace("<", "&lt;")
        more = [_bounds(field), "a resumed run may change it" if field.may_change else ""]
        aside = "; ".join(filter(None, more))
        rows.append(f"| `{name}` | `{field.default!r}` | {meaning}{aside and f' *({aside})*'} |")
    return "\n".join(rows)


def _bounds(field: Field) -> str:
    """Which values it may have, beyond its type."""
    if field.choices is not None:
        return ", ".join(f"`{choice!r}`" for choice in field.choices)
    if field.duration:
        return 'steps, `"2 epochs"` or `"5%"`'
    bounds = (("at least", field.at_least), ("at most", field.at_most))
    bounds += (("above", field.above), ("below", field.below))
    return ", ".join(f"{words} {value:,}" for words, value in bounds if value is not None)
