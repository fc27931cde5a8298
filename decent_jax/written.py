"""Whose a file is: a command replaces files that this package wrote, and no others."""

from pathlib import Path

from decent_jax.errors import ConfigError

MARK = "decent_jax"  # in the metadata of pictures, and in the format of JSON files
_BEGINNINGS = (b"{", b"\x89PNG", b"%PDF", b"<?xml")
_TABLE = b"runs_of,runs,metric,step,"  # of `plot --csv`: plain columns leave no room for a mark


def check_replaceable(path: str | Path, flag: str) -> None:
    """Raises ConfigError where ``path`` is a file that this package did not write.

    Args:
      path: of the file that ``flag`` names.
      flag: for the message, such as ``"--out"``.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file in it")
    try:
        with path.open("rb") as file:
            content = file.read(1 << 24)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; name another file") from None
    marked = content.startswith(_BEGINNINGS) and MARK.encode() in content
    if content and not marked and not content.startswith(_TABLE):
        raise ConfigError(
            f"{flag} {path} exists and was not written by this command; name another file, or move "
            "that one away"
        )
