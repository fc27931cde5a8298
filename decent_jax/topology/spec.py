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

from decent_jax.text import shown

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<mark>[(),=]))"
)

_LONGEST = 300  # characters, and so a bound on how deep schedules are nested

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
    if len(text) > _LONGEST:
        raise ValueError(
            f"schedule {shown(text)} has {len(text)} characters; write at most {_LONGEST}"
        )
    tokens, end = [], 0  # (kind, token, where it begins)
    while match := _TOKEN.match(text, end):
        token = match[0].strip()
        tokens.append((token if match["mark"] else match.lastgroup, token, end))
        end = match.end()
    tokens = [("end", "", end), *reversed(tokens)]

    def take(kind: str) -> str | None:
        return tokens.pop()[1] if tokens[-1][0] == kind else None

    def error() -> ValueError:
        rest = text[tokens[-1][2] :].strip()
        where = f"at {shown(rest)}" if rest else "where it ends"
        return ValueError(
            f"schedule {shown(text)} cannot be read {where}; write a name, or name(parameter=value,"
            " ...), such as base_k(max_degree=2) or hierarchical(complete, one_peer_exp)"
        )

    def spec() -> Spec:
        name, arguments = take("name"), []
        if not name:
            raise error()
        if take("("):
            while not take(")"):
                if arguments and not take(","):
                    raise error()
                arguments.append(argument())
        return Spec(name, tuple(arguments))

    def argument() -> tuple[str | None, Value]:
        first = value()
        if isinstance(first, Spec) and not first.arguments and take("="):
            return first.name, value()
        return None, first

    def value() -> Value:
        number = take("number")
        if number is None:
            return spec()
        return int(number) if re.fullmatch(r"[-+]?\d+", number) else float(number)

    found = spec()
    if text[tokens[-1][2] :].strip():
        raise error()
    return found


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


def _read(name: str, key: str, value: Any, annotation: Any) -> Value:
    """``value`` in the type of the parameter; scalars of NumPy are accepted."""
    kinds = getattr(annotation, "__args__", (annotation,))
    value = value.item() if isinstance(value, np.generic) else value
    if Spec in kinds:
        value = parse(value) if isinstance(value, str) else value
        accepted, wanted = Spec, "a schedule"
    elif float in kinds:
        accepted, wanted = int | float, "a number"
    else:
        accepted, wanted = int, "a whole number"
    if isinstance(value, accepted) and not isinstance(value, bool):
        return value
    got = value if isinstance(value, Spec) else repr(value)
    raise ValueError(f"{name}: {key} must be {wanted}, got {got}")
