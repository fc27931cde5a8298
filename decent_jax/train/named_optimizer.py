"""A local optimizer by its dotted name, with arguments: ``"optax.contrib.muon(beta=0.9)"``.

>>> parse("optax.lion")
('optax.lion', {})
>>> parse("optax.contrib.muon(beta=0.9, ns_steps=3)")
('optax.contrib.muon', {'beta': 0.9, 'ns_steps': 3})
"""

import ast
import difflib
import inspect
from collections.abc import Callable
from typing import Any

import optax

from decent_jax.named_modules import module_named
from decent_jax.text import shown


def is_dotted(name: str) -> bool:
    """Whether ``optimizer.name`` is a dotted name, not one of the project's own."""
    return "." in name.partition("(")[0]


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """The dotted name, and the arguments, which are Python literals.

    Raises:
      ValueError: it cannot be read.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return ast.unparse(call.func), given
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            f"optimizer.name {shown(text)} cannot be read: write a dotted name, and arguments by "
            "name as Python literals, such as 'optax.contrib.muon(beta=0.9)'"
        ) from None


def make(
    text: str, rate: optax.ScalarOrSchedule, weight_decay: float, decay_mask: Any
) -> optax.GradientTransformation:
    """Calls the function that ``text`` names.

    Args:
      text: see `parse`; the function takes ``learning_rate``.
      rate: the run's learning rate.
      weight_decay: decoupled; given to the function if it takes ``weight_decay``.
      decay_mask: of the parameters that decay, where the function takes a mask.

    Raises:
      ValueError: there is no such function, or it does not take these arguments.
    """
    path, given = parse(text)
    factory = _find(path)
    takes = inspect.signature(factory).parameters
    if "learning_rate" not in takes:
        raise ValueError(f"optimizer.name {path} takes no learning_rate, so it is no optimizer")
    if "learning_rate" in given:
        raise ValueError(f"optimizer.name {path}: set learning_rate of the config instead")
    unknown = sorted(given.keys() - takes.keys())
    if unknown:
        raise ValueError(f"{path} has no argument {unknown[0]!r}; it takes {', '.join(takes)}")
    if weight_decay and ("weight_decay" in given or "weight_decay" not in takes):
        has = "is given its weight_decay twice" if "weight_decay" in given else "has none"
        raise ValueError(f"{path} {has}: set optimizer.weight_decay=0")
    if "weight_decay" in takes:  # optax's own default is often not 0
        given.setdefault("weight_decay", weight_decay)
        for mask in ("mask", "weight_decay_mask"):
            if mask in takes and decay_mask is not None:
                given.setdefault(mask, decay_mask)
    try:
        made = factory(learning_rate=rate, **given)
    except Exception as error:  # of anybody's code
        raise ValueError(f"optimizer.name {shown(text)}: {error}") from None
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(f"optimizer.name {path} makes no optax.GradientTransformation")
    return made


def _find(path: str) -> Callable[..., Any]:
    module_path, _, name = path.rpartition(".")
    module = module_named(module_path, "optimizer.name")
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"optimizer.name: {module_path} has no function {name!r}{hint}")
    return found
