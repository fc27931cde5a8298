"""Messages between two actors: values of arrays over connections that both have authenticated.

If messages travelled as arguments of calls of Ray, those to one actor would share its link: all
would arrive late, instead of the first one early.
"""

import contextlib
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from decent_jax.ground import connections

Address = tuple[str, int]  # IP address and port


def listen(
    host: str, secret: bytes, serve: Callable[[Connection], None]
) -> tuple[connections.Listener, Address]:
    """Accept connections of those who know the secret, at a free port of this machine.

    Args:
      host: IP address of this machine.
      serve: gets each connection in a thread of its own, until it closes it or the other side does.
    """

    def serve_until_the_end(connection: Connection, _: str) -> None:
        with connection, contextlib.suppress(EOFError, OSError):  # others say who has died
            serve(connection)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family, backlog=64)
    address: Any = server.getsockname()[:2]
    return connections.Listener(server, secret, serve_until_the_end), address


def send(connection: Connection, header: Any, value: Any = None) -> None:
    """Send a header that JSON can hold, and a value: None or arrays, in tuples, lists and dicts.

    Raises:
      OSError: the other side is gone.
    """
    arrays: list[np.ndarray] = []
    connections.send(connection, [header, _form(value, arrays)], arrays)


def receive(connection: Connection) -> tuple[Any, Any]:
    """The header and the value of the next message; lists arrive as tuples, arrays are read-only.

    Raises:
      EOFError, OSError: the other side is gone, or sends what is no message.
    """
    try:
        (header, form), arrays = connections.receive(connection)
        return header, _value(form, arrays)
    except (LookupError, TypeError, ValueError) as error:
        raise OSError(f"the other side sends what is no message ({error})") from None


def _form(value: Any, arrays: list[np.ndarray]) -> Any:
    """The value with a number in the place of each array, which is added to ``arrays``."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: _form(one, arrays) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_form(one, arrays) for one in value]
    arrays.append(np.asarray(value))
    return len(arrays) - 1


def _value(form: Any, arrays: list[np.ndarray]) -> Any:
    """The value of a form."""
    if isinstance(form, dict):
        return {key: _value(one, arrays) for key, one in form.items()}
    if isinstance(form, list):
        return tuple(_value(one, arrays) for one in form)
    return None if form is None else arrays[form]
