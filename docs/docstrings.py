"""The mathematics, links and examples of docstrings, which are reStructuredText, as Markdown."""

import re

from griffe import Extension, Object


class Docstrings(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """The same text with Markdown's formulas, links and section of examples."""
    text = re.sub(r":math:`([^`]*)`", lambda m: rf"\({m[1]}\)", text)
    text = re.sub(r"^( *)\.\. math:: +(\S.*)$", r"\1$$\n\1\2\n\1$$", text, flags=re.M)
    text = re.sub(r"^( *)\.\. math::\n\n?((?:\1 +.*\n|\n(?=\1 +))+)", _display, text, flags=re.M)
    text = re.sub(r"`([^`<]+?)\s*<(https?://[^>]+)>`_+", r"[\1](\2)", text)
    text = re.sub(r"^(>>> (?:.+\n)*.+)", r"```pycon\n\1\n```", text, flags=re.M)
    return re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)


def _display(match: re.Match) -> str:
    indent, body = match[1], match[2]
    lines = ("$$", r"\begin{aligned}", *body.strip().splitlines(), r"\end{aligned}", "$$")
    return "".join(f"{indent}{line.strip()}\n" for line in lines)
