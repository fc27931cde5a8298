"""The config files that come with the package, by name, and what follows a file's colon."""

from collections.abc import Sequence
from pathlib import Path

from decent_jax.ground.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
# A wheel has them inside the package, a checkout beside it.
_FOLDER = next((p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir()), None)

_FILES = {path.stem: path for path in sorted(_FOLDER.glob("*.py"))} if _FOLDER else {}
NAMES = tuple(_FILES)


def find(name: str) -> Path | None:
    """The file of a config that comes with the package, such as ``"quickstart"``, or None."""
    return _FILES.get(name)


def chosen(arguments: str, *kinds: Sequence[str]) -> list[str]:
    """One name of each kind, out of the ``arguments`` that `get_config` of a config file gets.

    They come in any order, and the first name of a kind is chosen where there is none of it.

    Raises:
      ConfigError: a name is of no kind, or two are of one.

    >>> chosen("runlocal,ring", ("complete", "ring"), ("", "runlocal"))
    ['ring', 'runlocal']
    """
    names = arguments.split(",")
    found = [[name for name in names if name and name in kind] for kind in kinds]
    if sum(map(len, found)) < len(names) or max(map(len, found)) > 1:
        known = "; ".join(", ".join(filter(None, kind)) for kind in kinds)
        raise ConfigError.about("--config FILE:ARGUMENTS", arguments, f"takes one each of {known}")
    return [of[0] if of else kind[0] for of, kind in zip(found, kinds, strict=True)]
