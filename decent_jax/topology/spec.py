"""How a schedule is written in one string: ``NAME`` or ``NAME(parameter=value, ...)``.

    spec      =  NAME [ "(" [ argument { "," argument } ] ")" ]
    argument  =  [ NAME "=" ] value
    value     =  whole number | decimal number | spec

A parameter that is a schedule may stand without its name, in order: ``hierarchical(complete,
one_peer_exp)``; a number always has one: ``base_k(max_degree=2)``. Nothing is evaluated.
"""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Union

import numpy as np

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<mark>[(),=]))"
)

Value = Union[int, float, "Spec"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """A schedule's name, and its arguments: (name of the parameter or None, value)."""

    name: str
    arguments: tuple[tuple[str | None, Value], ...] = ()

    def __str__(self) -> str:
        if not self.arguments:
            return self.name
        given = (f"{key}={value}" if key else str(value) for key, value in self.arguments)
        return f"{self.name}({', '.join(given)})"


def parse(text: str) -> Spec:
    """The one schedule that ``text`` names.

    Raises:
      ValueError: a sentence that says where it cannot be read.

    >>> parse("hierarchical(complete, base_k(max_degree=2))").arguments
    ((None, Spec(name='complete', arguments=())),
     (None, Spec(name='base_k', arguments=(('max_degree', 2),))))
    """
    reader = _Reader(text)
    spec = reader.spec()
    if reader.kind != "end":
        raise reader.error()
    return spec


class _Reader:
    """One token ahead of a text."""

    def __init__(self, text: str):
        self.text, self.end = text, 0
        self.advance()

    def advance(self) -> None:
        self.start = self.end
        match = _TOKEN.match(self.text, self.start)
        if match:
            self.end, self.kind, self.token = match.end(), match.lastgroup, match[0].strip()
        else:
            self.kind, self.token = "other" if self.text[self.start :].strip() else "end", ""

    def take(self, mark: str) -> bool:
        found = (self.kind, self.token) == ("mark", mark)
        if found:
            self.advance()
        return found

    def spec(self) -> Spec:
        if self.kind != "name":
            raise self.error()
        name = self.token
        self.advance()
        return Spec(name, self.arguments() if self.take("(") else ())

    def arguments(self) -> tuple[tuple[str | None, Value], ...]:
        found = []
        while not self.take(")"):
            if found and not self.take(","):
                raise self.error()
            found.append(self.argument())
        return tuple(found)

    def argument(self) -> tuple[str | None, Value]:
        if self.kind == "number":
            return None, self.number()
        value = self.spec()
        if value.arguments or not self.take("="):
            return None, value
        return value.name, self.number() if self.kind == "number" else self.spec()

    def number(self) -> int | float:
        token = self.token
        self.advance()
        return int(token) if re.fullmatch(r"[-+]?\d+", token) else float(token)

    def error(self) -> ValueError:
        rest = self.text[self.start :].strip()
        where = f"at {rest!r}" if rest else "where it ends"
        return ValueError(
            f"schedule {self.text!r} cannot be read {where}; write a name, or name(parameter=value,"
            " ...), such as base_k(max_degree=2) or hierarchical(complete, one_peer_exp)"
        )


def bind(
    spec: Spec, parameters: Mapping[str, inspect.Parameter], keywords: Mapping[str, object]
) -> dict[str, Value]:
    """The values that ``spec`` and ``keywords`` give to ``parameters``, checked, in their order.

    Raises:
      ValueError: a parameter that is unknown, given twice, unnamed or of another type.
    """
    schedules = [key for key, parameter in parameters.items() if parameter.annotation is Spec]
    given = {}
    for key, value in [*spec.arguments, *keywords.items()]:
        if key is None:
            if not isinstance(value, Spec) or not schedules:
                raise ValueError(
                    f"{spec.name}: write the name of the parameter that is {value}; {spec.name} "
                    f"{_takes(parameters)}"
                )
            key = schedules.pop(0)
        if key not in parameters:
            raise ValueError(f"{spec.name} has no parameter {key!r}; it {_takes(parameters)}")
        if key in given:
            raise ValueError(f"{spec.name}: {key} is given twice")
        given[key] = _read(spec.name, key, value, parameters[key].annotation)
    return {key: given[key] for key in parameters if key in given}


def unnamed(given: Mapping[str, Value], order: Iterable[str]) -> tuple:
    """The given values as the arguments of a `Spec`: the first schedules without their names."""
    first = list(itertools.takewhile(lambda key: isinstance(given.get(key), Spec), order))
    return tuple((None if key in first else key, value) for key, value in given.items())


def _takes(parameters: Mapping[str, inspect.Parameter]) -> str:
    return f"takes {', '.join(parameters)}" if parameters else "takes no parameters"


def _read(name: str, key: str, value: object, annotation: Any) -> Value:
    """``value`` in the type of the parameter; scalars of NumPy are accepted."""
    if annotation is Spec:
        value = parse(value) if isinstance(value, str) else value
        if isinstance(value, Spec):
            return value
        wanted = "a schedule"
    else:
        wanted = "a number" if float in _union(annotation) else "a whole number"
        number = value.item() if isinstance(value, np.generic) else value
        if isinstance(number, int) and not isinstance(number, bool):
            return number
        if isinstance(number, float) and float in _union(annotation):
            return number
    got = value if isinstance(value, Spec) else repr(value)
    raise ValueError(f"{name}: {key} must be {wanted}, got {got}")


def _union(annotation: Any) -> tuple:
    return getattr(annotation, "__args__", (annotation,))
