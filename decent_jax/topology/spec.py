"""The string form of a schedule: ``NAME`` or ``NAME(parameter=value, ...)``.

    spec      =  NAME [ "(" [ argument { "," argument } ] ")" ]
    argument  =  [ NAME "=" ] value
    value     =  whole number | decimal number | spec

A parameter that is a schedule may be positional: ``hierarchical(complete, one_peer_exp)``; a
number always needs its name: ``base_k(max_degree=2)``. The string is parsed as a Python
expression and never evaluated.
"""

import ast
import dataclasses
import inspect
import itertools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Union

import numpy as np

from decent_jax.ground.format import shown

_LONGEST = 300  # characters; this also bounds how deeply schedules are nested

_NUMPY_SCALAR: Any = np.generic  # a NumPy scalar of any type

Value = Union[int, float, "Spec"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """A schedule's name and its arguments as pairs: the parameter (None: positional), the value."""

    name: str
    arguments: tuple[tuple[str | None, Value], ...] = ()

    def __str__(self) -> str:
        if not self.arguments:
            return self.name
        arguments = (f"{key}={value}" if key else str(value) for key, value in self.arguments)
        return f"{self.name}({', '.join(arguments)})"


def parse(text: str) -> Spec:
    """Parses the name of a schedule, with its parameters.

    Raises:
      ValueError: the text cannot be parsed, or is too long.

    >>> parse("hierarchical(complete, base_k(max_degree=2))").arguments
    ((None, Spec(name='complete', arguments=())),
     (None, Spec(name='base_k', arguments=(('max_degree', 2),))))
    """
    if len(text) > _LONGEST:
        raise ValueError(
            f"schedule {shown(text)} has {len(text)} characters; write at most {_LONGEST}"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # the parser warns about texts like "1and"
            return _spec(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(
            f"schedule {shown(text)} cannot be read; write a name, or name(parameter=value, ...), "
            "such as base_k(max_degree=2) or hierarchical(complete, one_peer_exp)"
        ) from None


def _spec(node: ast.expr) -> Spec:
    match node:
        case ast.Name(name):
            return Spec(name)
        case ast.Call(ast.Name(name), unnamed, named):
            arguments = [(None, value) for value in unnamed] + [(k.arg, k.value) for k in named]
            return Spec(name, tuple((key, _value(value)) for key, value in arguments))
        case _:
            raise ValueError


def _value(node: ast.expr) -> Value:
    if isinstance(node, ast.Name | ast.Call):
        return _spec(node)
    number = ast.literal_eval(node)
    if type(number) not in (int, float):
        raise ValueError
    return number


def bind(
    spec: Spec, parameters: Mapping[str, inspect.Parameter], keywords: Mapping[str, object]
) -> dict[str, Value]:
    """The checked values that ``spec`` and ``keywords`` give, in the order of ``parameters``.

    Raises:
      ValueError: a parameter is unknown, given twice, unnamed or of the wrong type.
    """
    schedules = [key for key, parameter in parameters.items() if parameter.annotation is Spec]
    arguments = {}
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
        if key in arguments:
            raise ValueError(f"{spec.name}: {key} is given twice")
        arguments[key] = _read(spec.name, key, value, parameters[key].annotation)
    return {key: arguments[key] for key in parameters if key in arguments}


def unnamed(
    arguments: Mapping[str, Value], order: Iterable[str]
) -> tuple[tuple[str | None, Value], ...]:
    """The values as arguments of a `Spec`; schedules that are first in ``order`` are positional."""
    first = list(itertools.takewhile(lambda key: isinstance(arguments.get(key), Spec), order))
    return tuple((None if key in first else key, value) for key, value in arguments.items())


def _takes(parameters: Mapping[str, inspect.Parameter]) -> str:
    return f"takes {', '.join(parameters)}" if parameters else "takes no parameters"


def _read(name: str, key: str, value: Any, annotation: object) -> Value:
    """``value`` converted to the parameter's type; NumPy scalars are accepted."""
    kinds = getattr(annotation, "__args__", (annotation,))
    value = value.item() if isinstance(value, _NUMPY_SCALAR) else value
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
