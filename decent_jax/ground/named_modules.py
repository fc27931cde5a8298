"""Modules and functions by their names: of a config, and of a notebook's cell that runs again."""

import importlib
from collections.abc import Callable
from types import ModuleType

from decent_jax.ground.errors import ConfigError
from decent_jax.ground.extras import MissingExtra
from decent_jax.ground.format import shown


def module_named(path: str, field: str) -> ModuleType:
    """Imports ``path``, which the field of a config names.

    Raises:
      ConfigError: there is no such module, or it fails while it is imported.
    """
    if not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"{field}: {shown(path)} is not the dotted path of a module", field=field, value=path
        )
    try:
        return importlib.import_module(path)
    except MissingExtra:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{path}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{field}: there is no module {shown(path)}", field=field, value=path
            ) from None
        raise ConfigError(
            f"{field}: the module {shown(path)} cannot be imported: {type(error).__name__}: "
            f"{error}",
            field=field,
            value=path,
        ) from error


def same_name(function: Callable, other: Callable) -> bool:
    """Whether both were defined under one name in one module, such as by a cell that runs again."""
    return (function.__module__, function.__qualname__) == (other.__module__, other.__qualname__)
