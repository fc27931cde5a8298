"""May a command replace or remove this? It may if this package wrote it, and otherwise not."""

import os
import re
from pathlib import Path

from decent_jax.ground.errors import ConfigError
from decent_jax.ground.json_files import check_regular

MARK = "decent_jax"  # in the metadata of pictures, and in the format of JSON files
_OURS = re.compile(
    rb"(\{|\x89PNG|%PDF|<\?xml).*"
    + MARK.encode()
    # Plain columns leave no room for a mark: `plot --csv`, and the table of `sweep`.
    + rb"|runs_of,runs,metric,step,|[^\n]*,state,steps,validation_loss,"
    + rb"|#!/bin/bash\n# \d+ runs of `decent-jax sweep`",
    re.DOTALL,
)


def check_replaceable(path: str | Path, flag: str, ours: re.Pattern[bytes] = _OURS) -> None:
    """Raises ConfigError where ``path`` is anything but a file that this package wrote.

    Args:
      path: of the file that ``flag`` names.
      flag: for the message, such as ``"--out"``.
      ours: what the content of such a file begins with.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file in it", field=flag, value=path)
    if not os.path.lexists(path):
        return
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = file.read(1 << 24)
    except OSError as error:  # FileNotFoundError: a link to nothing
        why = error.strerror
        raise ConfigError(
            f"{flag} {path}: {why}; name another file", field=flag, value=path
        ) from None
    if content and not ours.match(content):
        raise ConfigError(
            f"{flag} {path} exists and was not written by this command; name another file, or move "
            "that one away",
            field=flag,
            value=path,
        )


def check_removable(
    folder: Path, ours: re.Pattern[str], error: type[Exception] = ConfigError
) -> None:
    """Raises ``error`` where a folder, which is to be removed, holds more than our own files.

    Args:
      folder: that exists.
      ours: the names of our files in it, and of our folders with a "/" behind them.
      error: ConfigError or DataError.
    """
    for path in sorted(folder.iterdir()):
        if not ours.fullmatch(path.name + "/" * path.is_dir()):
            raise error(
                f"{path}: was not made by this package, and would be lost; move it elsewhere"
            )
