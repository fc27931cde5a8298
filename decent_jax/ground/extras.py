"""Packages that only a part of this project needs; an extra of pip installs them."""

import importlib.metadata
import importlib.util


class MissingExtra(ImportError):
    """A package is not installed; the message is one sentence with the command that installs it."""


def need(extra: str, *packages: str) -> None:
    """Check for packages that ``pip install decent_jax`` does not bring, before their first import.

    Args:
      extra: of pyproject.toml, which lists the packages.
      packages: their top-level names; nothing is imported.

    Raises:
      MissingExtra: naming those that are not installed.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        others, last = ", ".join(missing[:-1]), missing[-1]
        names = f"{others} and {last}" if others else last
        are = "is" if len(missing) == 1 else "are"
        raise MissingExtra(f"{names} {are} not installed: pip install 'decent_jax[{extra}]'")


def version(package: str) -> str:
    """The version of a distribution, or ``"not installed"``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
