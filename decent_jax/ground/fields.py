"""Settings: fields of frozen dataclasses, each with a default, a meaning, and bounds.

A section of a config is a frozen dataclass next to the code that owns it. Its fields are made by
`setting`, by `changeable`, or by `section` if they are sections themselves.

>>> @dataclass(frozen=True)
... class Log:
...     every: int = changeable(10, "steps per row", at_least=1)
>>> @dataclass(frozen=True)
... class Config:
...     steps: int = setting(1000, "updates", at_least=1)
...     log: Log = section(Log)
>>> build(Config, {"steps": 5, "log.every": 2}).log.every
2
>>> check(table(Config), {"steps": 0, "log.every": 10})
Traceback (most recent call last):
decent_jax.ground.errors.ConfigError: steps must be at least 1, got 0
"""

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ml_collections import ConfigDict, FieldReference

from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import shown
from decent_jax.ground.json_files import Json

# The largest value of a field without ``at_most``.
LARGEST: dict[type, int | float] = {int: 2**31 - 1, float: 1e15}
_SMALLEST = 1.2e-38  # the smallest normal float32; smaller numbers may count as 0
_NOT_TOO_SMALL = f"be 0, or at least {_SMALLEST} in size, as float32 holds it"
_LONGEST_TEXT = 4096  # characters; the longest path of file systems


@dataclass(frozen=True)
class Field:
    """One field of a config.

    Attributes:
      default: the value if none is set; its type is the field's type.
      doc: meaning and unit, in one line.
      at_least: smallest value; None: no bound.
      at_most: largest value; None: `LARGEST` of the type.
      above: the value must be larger than this one.
      below: the value must be smaller than this one.
      choices: the allowed values.
      duration: whether the value is a number of steps or a string such as ``"2 epochs"`` or
        ``"5%"`` (of the run).
      may_change: whether a resumed run may have a different value.
    """

    default: int | float | str | bool
    doc: str
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Sequence[object] | None = None
    duration: bool = False
    may_change: bool = False

    def check(self, name: str, value: object) -> None:
        """Raises ConfigError if ``value`` has the wrong type or is out of bounds."""
        if self.duration:
            parse_duration(name, value)
            return
        kind = type(self.default)
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not kind and not (kind is float and is_int):
            wanted = f"must be of type {kind.__name__} (such as {self.default!r})"
            raise ConfigError.about(name, value, wanted)
        if self.choices is not None and value not in self.choices:
            named = ", ".join(str(choice) for choice in self.choices if choice != "")
            otherwise = " or left empty" if "" in self.choices else ""
            raise ConfigError.about(name, value, f"must be one of {named}{otherwise}")
        wanted = self._missed(value)
        if wanted:
            raise ConfigError.about(name, value, f"must {wanted}")

    def aside(self) -> str:
        """The field's bounds, and whether a resumed run may change it, as text; "" for neither."""
        bounds = [("at least", self.at_least), ("at most", self.at_most)]
        bounds += [("above", self.above), ("below", self.below)]
        words = [f"{label} {bound:,}" for label, bound in bounds if bound is not None]
        if self.choices is not None:
            words = [", ".join(map(repr, self.choices))]
        if self.duration:
            words = ['steps, "2 epochs" or "5%"']
        return "; ".join(words + ["a resumed run may change it"] * self.may_change)

    def _missed(self, value: object) -> str | None:
        """The bound that a value of the right type violates, as text."""
        if isinstance(value, str):
            long = len(value) > _LONGEST_TEXT
            return f"have at most {_LONGEST_TEXT} characters" if long else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if 0 < abs(value) < _SMALLEST:
            return _NOT_TOO_SMALL
        least = -math.inf if self.at_least is None else self.at_least
        if self.below is not None and not least <= value < self.below:
            bounded = self.at_least is not None
            return f"be in [{least}, {self.below})" if bounded else f"be below {self.below}"
        if self.above is not None and not self.above < value < math.inf:
            return f"be above {self.above} and finite"
        if isinstance(value, float) and not math.isfinite(value):
            return "be finite"
        if self.at_least is not None and not value >= self.at_least:
            return f"be at least {self.at_least}" if self.at_least else "not be negative"
        largest = LARGEST[type(self.default)] if self.at_most is None else self.at_most
        if abs(value) > largest:
            return f"be at most {largest}"
        return None


Section = TypeVar("Section")


def setting(default: Any, doc: str, **bounds: Any) -> Any:
    """A field of a section; ``bounds`` are attributes of `Field`."""
    return dataclasses.field(default=default, metadata={"field": Field(default, doc, **bounds)})


changeable = functools.partial(setting, may_change=True)  # a resumed run may have another value


def section(kind: type) -> Any:
    """A field that holds a section."""
    return dataclasses.field(default_factory=kind, metadata={"section": kind})


def dtype_of_activations(doc: str) -> Any:
    """A setting for the type of a model's activations."""
    kinds = ("bfloat16", "float16", "float32", "float64")
    return setting("bfloat16", f"type {doc}", choices=kinds)


def size_of_preset(doc: str, at_most: int = 2**16) -> Any:
    """A setting for a size of a model; 0, its default, means the preset's size."""
    return setting(0, f"{doc}; 0: the preset's", at_least=0, at_most=at_most)


def table(kind: type, prefix: str = "") -> dict[str, Field]:
    """The fields of a section and of the sections in it, by their dotted names."""
    fields: dict[str, Field] = {}
    for item in dataclasses.fields(kind):
        inner = item.metadata.get("section")
        if inner is None:
            fields[prefix + item.name] = item.metadata["field"]
        else:
            fields |= table(inner, f"{prefix}{item.name}.")
    return fields


def build(kind: type[Section], values: Json, prefix: str = "") -> Section:
    """The section with these values, by their dotted names."""
    arguments: Json = {}
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, inner = prefix + item.name, item.metadata.get("section")
        arguments[item.name] = values[name] if inner is None else build(inner, values, f"{name}.")
    return kind(**arguments)


def value_of(config: object, name: str) -> Any:
    """The value of the field with this dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def defaults(table: Mapping[str, Field]) -> ConfigDict:
    """The defaults of a table as nested ConfigDicts, not locked."""
    config = ConfigDict()
    for name, field in table.items():
        *sections, last = name.split(".")
        group = config
        for section in sections:
            if section not in group:
                group[section] = ConfigDict()
            group = group[section]
        # A duration is an int or a string, whatever the type of its default.
        group[last] = (
            FieldReference(field.default, field_type=object) if field.duration else field.default
        )
    return config


def check(table: Mapping[str, Field], values: Json) -> None:
    """Checks flat ``values`` against a table: the same names, and every value within bounds.

    Raises:
      ConfigError: the message names the field, its value and the requirement.
    """
    for name, value in values.items():
        if name not in table:
            raise ConfigError(unknown_field(name, table), field=name, value=value)
    for name, field in table.items():
        if name not in values:
            raise ConfigError(
                f"the config has no field {name!r}; start from default_config()", field=name
            )
        field.check(name, values[name])


def parse(field: Field, name: str, text: str) -> Any:
    """The value of a field from a command-line ``text``.

    Raises:
      ConfigError: ``text`` is not a value of the field's type.
    """
    kind = type(field.default)
    try:
        if field.duration:
            return int(text) if text.strip().isdecimal() else text
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        value = kind(text)
    except (ValueError, KeyError):
        wanted = f"must be of type {kind.__name__} (such as {field.default!r})"
        raise ConfigError.about(name, text, wanted) from None
    if kind is float and value == 0 and re.match("[^eE]*[1-9]", text):
        raise ConfigError.about(name, text, f"must {_NOT_TOO_SMALL}")
    return value


def unknown_field(name: str, known: Iterable[str]) -> str:
    """The error message for the unknown field ``name``, with a similar known field."""
    own = [other for other in known if other.startswith(f"{name}.")]
    if own:
        return f"{shown(name)} is a section of the config; set one of its fields, as {own[0]!r}"
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "; --show prints them all"
    return f"the config has no field {shown(name)}{hint}"


def parse_duration(name: str, value: object) -> tuple[float, str]:
    """(number, unit) of a duration, with the unit "step", "epoch" or "%"; ConfigError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        number, unit = value, "step"
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(step|epoch|%)?s?\s*", str(value)[:100])
        unit = (match[2] or "step") if match else ""
        if match is None or (unit == "step" and "." in match[1]):
            wanted = (
                "must be a number of steps, or a string such as '2 epochs' or '5%' (of the run)"
            )
            raise ConfigError.about(name, value, wanted)
        number = float(match[1])
    if number > LARGEST[int]:
        raise ConfigError.about(name, value, f"must be at most {LARGEST[int]}")
    return number, unit


def in_steps(name: str, value: int | str, steps_per_epoch: int, steps: int) -> int:
    """A duration in steps, for a run of ``steps``; at least one unless it is 0."""
    number, unit = parse_duration(name, value)
    scale = {"step": 1, "epoch": steps_per_epoch, "%": steps / 100}[unit]
    return max(round(number * scale), 1) if number > 0 else 0


def check_rules(config: object, *rules: tuple[object, str, str]) -> None:
    """Checks that fields are compatible: each rule is ``(holds, field, requirement)``.

    Raises:
      ConfigError: the message names the first field whose rule does not hold.
    """
    for holds, name, wanted in rules:
        if not holds:
            raise ConfigError.about(name, value_of(config, name), wanted)


def check_allowed(config: Any, allowed: Mapping[str, Sequence[object]]) -> None:
    """Checks fields against ``allowed``, the values that the config's ``trainer`` supports.

    Raises:
      ConfigError: the message names the first unsupported value.
    """
    for name, wanted in allowed.items():
        words = f"must be {' or '.join(map(repr, wanted))} with trainer={config.trainer}"
        check_rules(config, (value_of(config, name) in wanted, name, words))
