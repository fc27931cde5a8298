"""The config files that come with the package, by name."""

from pathlib import Path

_PACKAGE = Path(__file__).parent
# A wheel has them inside the package, a checkout beside it.
_FOLDER = next((p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir()), None)

_FILES = {path.stem: path for path in sorted(_FOLDER.glob("*.py"))} if _FOLDER else {}
NAMES = tuple(_FILES)


def find(name: str) -> Path | None:
    """The file of a config that comes with the package, such as ``"quickstart"``, or None."""
    return _FILES.get(name)
