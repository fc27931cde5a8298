"""What can go wrong while data are read, as one sentence."""

import contextlib
import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from decent_jax.errors import DataError


@contextlib.contextmanager
def one_sentence(place: str | Path) -> Iterator[None]:
    """Context that turns what reading a file raises into a DataError naming `place`."""
    try:
        yield
    except EOFError:
        raise DataError(
            f"{place}: the compressed file is cut short; fetch or compress it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{place}: not a valid gzip file ({error})") from None
    except tarfile.TarError as error:
        raise DataError(f"{place}: the archive is cut short or damaged ({error})") from None
    except OSError as error:
        where = error.filename or place
        raise DataError(f"{where}: cannot be read ({error.strerror or error})") from None


def short(error: Exception) -> str:
    """The first line of an error's message, at most 200 characters, or the error's type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
