"""Who wrote a file: a command replaces files that this package wrote, and no others."""

import re
from pathlib import Path

from decent_jax.ground.errors import ConfigError

MARK = "decent_jax"  # in the metadata of pictures, and in the format of JSON files
_OURS = re.compile(
    rb"(\{|\x89PNG|%PDF|<\?xml).*"
    + MARK.encode()
    # Plain columns leave no room for a mark: `plot --csv`, and the table of `sweep`.
    + rb"|runs_of,runs,metric,step,|[^\n]*,state,steps,validation_loss,"
    + rb"|#!/bin/bash\n# \d+ runs of `decent-jax sweep`",
    re.DOTALL,
)


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
    if content and not _OURS.match(content):
        raise ConfigError(
            f"{flag} {path} exists and was not written by this command; name another file, or move "
            "that one away"
        )
