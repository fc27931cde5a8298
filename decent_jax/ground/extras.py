"""Packages of pip extras, and modules that configs name."""

import importlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable
from types import ModuleType

from decent_jax.ground.errors import ConfigError


class Unavailable(ImportError):
    """A missing package or an unsupported system; the message is one sentence with the remedy."""

    code = 2


def need_system(what: str, *systems: str) -> None:
    """Checks that the operating system is one of ``systems``, before imports that need it.

    Args:
      what: the feature that needs such a system.
      systems: names from `platform.system`.

    Raises:
      Unavailable: this is another system.
    """
    here = platform.system()
    if here not in systems:
        raise Unavailable(
            f"{what} needs {' or '.join(systems)}, and this is {here}: use another machine, or WSL "
            "on Windows; topology, gossip, replicas and optim work everywhere"
        )


def need(extra: str, *packages: str) -> None:
    """Checks for packages that ``pip install decent_jax`` does not install, before importing them.

    Args:
      extra: the extra in pyproject.toml that lists the packages.
      packages: their top-level names; nothing is imported.

    Raises:
      Unavailable: some are not installed; the message names them.
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
    """Imports the module whose dotted path a config ``field`` holds.

    Raises:
      ConfigError: there is no such module, or its import fails.
    """
    if not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError.about(field, path, "must be the dotted path of a module")
    try:
        return importlib.import_module(path)
    except Unavailable:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{path}.".startswith(f"{missing}."):
            raise ConfigError.about(field, path, "must be a module that exists") from None
        why = f"must be a module that can be imported ({type(error).__name__}: {error})"
        raise ConfigError.about(field, path, why) from error


def same_name(function: Callable[..., object], other: Callable[..., object]) -> bool:
    """Whether both have the same name and module, for example after a notebook cell reruns."""
    return (function.__module__, function.__qualname__) == (other.__module__, other.__qualname__)
