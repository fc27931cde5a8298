"""Messages between the stages of a replica: sent as soon as they are computed, kept until taken."""

import threading
from typing import Any, NamedTuple

from decent_jax.errors import PeerLost


class Key(NamedTuple):
    """What a message is, the same at its sender and its receiver."""

    kind: str
    t: int  # step
    k: int  # micro-batch
    sender: int  # stage


class Mailbox:
    """Messages for one stage; put and taken by different threads."""

    def __init__(self):
        self._messages: dict[Key, Any] = {}
        self._changed = threading.Condition()

    def put(self, key: Key, value: Any) -> None:
        """Keep a message until it is taken."""
        with self._changed:
            self._messages[key] = value
            self._changed.notify_all()

    def take(self, key: Key, seconds: float) -> Any:
        """Wait for a message, and forget it.

        Raises:
          PeerLost: it has not come within ``seconds``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._messages, seconds):
                raise PeerLost(
                    f"stage {key.sender} has sent no {key.kind} of step {key.t} within "
                    f"cluster.exchange_s ({seconds:g} s)"
                )
            return self._messages.pop(key)
