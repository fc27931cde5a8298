"""The secret of a run, by which its processes tell each other from strangers.

A launcher hands it over in the variable `VARIABLE`. Without one, process 0 writes a new one into a
folder that all processes see, readable by its owner only, and removes it when all have come.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from decent_jax.ground.errors import ConfigError

VARIABLE = "DECENT_JAX_SECRET"
FILE = ".start_secret-{port}"  # runs that share a folder have ports of their own
_SHORTEST = 16  # characters


@contextlib.contextmanager
def offered(folder: Path, port: int) -> Iterator[bytes]:
    """The secret as process 0 has it; in this context the others find it in ``folder``.

    Raises:
      ConfigError: the variable holds too short a one, or the folder cannot be written.
    """
    given = _given()
    if given:
        yield given
        return
    path, own = file_in(folder, port), secrets.token_hex(32).encode()
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(own)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}), so that the processes have no secret "
            f"in common; mend that, or set {VARIABLE} for all of them",
            field=VARIABLE,
        ) from None
    try:
        yield own
    finally:
        with contextlib.suppress(OSError):
            if path.read_bytes() == own:  # nobody has started the same run once more
                path.unlink()
            for parent in made:
                parent.rmdir()


def find(folder: Path, port: int) -> bytes | None:
    """The secret as another process finds it; None: process 0 has not written it yet.

    Raises:
      ConfigError: the variable holds too short a one, or the file may not be read.
    """
    given = _given()
    if given:
        return given
    try:
        return file_in(folder, port).read_bytes() or None
    except PermissionError:
        raise ConfigError(
            f"{file_in(folder, port)} belongs to another user; start all processes as one user, "
            f"or set {VARIABLE} for all of them",
            field=VARIABLE,
        ) from None
    except OSError:
        return None


def file_in(folder: Path, port: int) -> Path:
    """Where the secret of the run whose process 0 listens at ``port`` is."""
    return folder / FILE.format(port=port)


def _given() -> bytes | None:
    text = os.environ.get(VARIABLE, "")
    if 0 < len(text) < _SHORTEST:
        raise ConfigError(
            f"{VARIABLE} has {len(text)} characters; it needs at least {_SHORTEST}", field=VARIABLE
        )
    return text.encode(errors="surrogateescape") or None
