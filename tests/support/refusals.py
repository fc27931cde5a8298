"""What tests assert of a refusal: which field is wrong, and what it was given; not the words."""

import contextlib
from collections.abc import Iterator

import pytest

from decent_jax.ground.errors import ConfigError

ANY = object()


@contextlib.contextmanager
def refused(field: str, value: object = ANY) -> Iterator[None]:
    """The block raises a ConfigError about ``field``; its sentence names field and value."""
    with pytest.raises(ConfigError) as caught:
        yield
    error = caught.value
    assert error.field == field, f"{error.field!r} is refused: {error}"
    assert field in str(error), str(error)
    if value is not ANY:
        assert error.value == value and str(value)[:40] in str(error), (error.value, str(error))


@contextlib.contextmanager
def refuses(
    *named: object, error: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """The block raises this error (or one of these), in one line that names these values."""
    with pytest.raises(error) as caught:
        yield
    said = str(caught.value)
    assert "\n" not in said, said
    for value in named:
        assert str(value) in said, (value, said)
