"""Packages and modules by name: those that an extra of pip installs, those that a config names."""

import importlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable
from types import ModuleType

from decent_jax.ground.errors import ConfigError
from decent_jax.ground.format import shown


class Unavailable(ImportError):
    """A package is not installed, or the system is another one; one sentence says what to do."""

    code = 2


def need_system(what: str, *systems: str) -> None:
    """Check, before the first import of what only they have, that this is one of these systems.

    Args:
      what: needs them.
      systems: of `platform.system`.

    Raises:
      Unavailable: this is another one.
    """
    here = platform.system()
    if here not in systems:
        raise Unavailable(
            f"{what} needs {' or '.join(systems)}, and this is {here}: use another machine, or WSL "
            "on Windows; topology, gossip, replicas and optim work everywhere"
        )


def need(extra: str, *packages: str) -> None:
    """Check for packages that ``pip install decent_jax`` does not bring, before their first import.

    Args:
      extra: of pyproject.toml, which lists the packages.
      packages: their top-level names; nothing is imported.

    Raises:
      Unavailable: naming those that are not installed.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        others, last = ", ".join(missing[:-1]), missing[-1]
        names = f"{others} and {last}" if others else last
        are = "is" if len(missing) == 1 else "are"
        raise Unavailable(f"{names} {are} not installed: pip install 'decent_jax[{extra}]'")


def version(package: str) -> str:
    """The version of a distribution, or ``"not installed"``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


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
    except Unavailable:
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
