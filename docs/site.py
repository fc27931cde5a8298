"""Generated pages of the site: the README and its neighbours, the config's fields, the API.

mkdocs runs this (`hooks` of mkdocs.yml). Each page is built from its source, so nothing is written
twice.
"""

import html
import importlib
import pkgutil
import posixpath
import re
from pathlib import Path
from types import ModuleType

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

from decent_jax import tasks
from decent_jax.ground import fields
from decent_jax.ground.fields import Field
from decent_jax.optim import METHODS
from decent_jax.train.config import fields_of

ROOT = Path(__file__).resolve().parents[1]

# Files of the repository's root that are pages, and their names on the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}

# Pages of the API: the rooms in reading order, with the first line of each page.
API = {
    "topology": "Communication graphs: schedules of mixing matrices; NumPy only.",
    "gossip": "A round as messages between replicas.",
    "replicas": "The parameters of n replicas in one pytree.",
    "optim": "Methods as optax transformations.",
    "optim.contrib": "Rarely used methods.",
    "train": "A run: config, step, loop, evaluation, checkpoints.",
    "tasks": "What is trained: the interface of a task.",
    "models": "Flax NNX models behind functions.",
    "data": "Sources, loaders, and data preparation.",
    "cluster": "Processes of one program: start-up barrier, watch, supervisor.",
    "actors": "Processes started by Ray.",
    "peers": "Asynchronous replicas (experimental).",
    "pipelines": "Replicas cut into stages (experimental).",
    "planner": "Predict step times, recommend a schedule, place replicas (experimental).",
    "plan": "The plan file: written by the planner, read by runs.",
    "plots": "Every picture, in one style.",
    "ground": "Errors, formats, files, fields of a config, progress.",
    "commands": "The commands of `decent-jax`.",
}


def on_config(config):
    """The pages of the API and of the log, newest first, come into the navigation."""
    log = sorted((ROOT / "docs" / "log").glob("[0-9]*.md"), reverse=True)
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = [{room: f"api/{room}.md"} for room in API]
        if "Results" in entry:
            entry["Results"].append({"Log": ["log/index.md", *(f"log/{p.name}" for p in log)]})
    return config


def on_files(files: Files, config) -> Files:
    """Add the pages that are not in docs/."""
    for name, page in PAGES.items():
        text = _links_of_site((ROOT / name).read_text(), "")
        files.append(File.generated(config, page, content=text))
    for room, first in API.items():
        text = "\n".join([f"# {room}\n\n{first}\n", *map(_api, _modules(room))])
        files.append(File.generated(config, f"api/{room}.md", content=text))
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


def _modules(room: str) -> list[str]:
    """The room itself where it exports names, otherwise its modules."""
    package = importlib.import_module(f"decent_jax.{room}")
    if _public(package):
        return [package.__name__]
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [module.name for module in found if not module.name.endswith("__main__")]


def _public(module: ModuleType) -> list[str]:
    """Where the public names of a module are defined: a module may have the name of a function."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    values = [v for v in (getattr(module, n) for n in names) if hasattr(v, "__qualname__")]
    if not hasattr(module, "__path__"):  # a room exports what its modules define
        values = [v for v in values if getattr(v, "__module__", "") == module.__name__]
    return [
        f"{value.__module__}.{value.__qualname__}"
        for value in values
        if value.__module__.startswith("decent_jax") and "<" not in value.__qualname__
    ]


def _api(path: str) -> str:
    """The module's own docstring, then each of its public names."""
    head = f"::: {path}\n    options:\n      members: false\n      show_root_heading: false\n"
    public = _public(importlib.import_module(path))
    title = [] if path.count(".") == 1 else [f"## {path.removeprefix('decent_jax.')}\n"]
    return "\n".join([*title, head, *(f"::: {name}\n" for name in public)])


# --- Links ----------------------------------------------------------------------------------------


def _links_of_site(text: str, folder: str) -> str:
    """The text of a page in this folder of the repository, with links to the pages of this site.

    A link to a file that is not a page, such as a config, keeps its words only.
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
    """Tables of all fields, as the sections of `decent_jax.train.settings` and tasks have them."""
    sections: dict[str, dict[str, Field]] = {"": {}}
    everything = fields_of(next(iter(tasks.TASKS)))
    methods = {m.config_section: name for name, m in METHODS.items() if m.config_section}
    common = fields.table(tasks.TaskData, "data.")
    for name, field in everything.items():
        section = name.rpartition(".")[0]
        if section not in methods and (section not in ("model", "data") or name in common):
            sections.setdefault(section, {})[name] = field
    parts = []
    for section, members in sections.items():
        parts += [f"## {section}" if section else "## The run", _table(members)]
    for task in tasks.TASKS:
        own = fields_of(task).items()
        own = {k: v for k, v in own if k.startswith(("model.", "data.")) and k not in common}
        parts += [f"## task = {task}", _table(own)]
    for section, name in methods.items():
        own = {k: v for k, v in everything.items() if k.startswith(f"{section}.")}
        if own:
            parts += [f"## algorithm = {name}", _table(own)]
    return "\n\n".join(parts)


def _table(members: dict[str, Field]) -> str:
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for name, field in members.items():
        meaning = field.doc.replace("|", "\\|").replace("<", "&lt;")
        aside = field.aside()
        rows.append(f"| `{name}` | `{field.default!r}` | {meaning}{aside and f' *({aside})*'} |")
    return "\n".join(rows)
