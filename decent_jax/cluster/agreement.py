"""Processes agree after which step all of them save or stop, without an exchange in any step.

A process that gets a signal may be steps ahead of the others, or wait for them in an exchange. So
all count the **boundaries** between their steps, which are the same. A process that wants something
tells the number of its next boundary through jax's key-value store, and does not pass it. A thread
of each other process sees that within `_TICK_S` and does likewise, also while its loop waits in an
exchange. When all have told, they go on to the largest of these numbers, and do there what any of
them wants.
"""

import contextlib
import itertools
import json
import math
import threading
from typing import Any

import jax
from jax._src.distributed import global_state  # see `decent_jax.cluster.watch`

_TICK_S = 0.25  # between two looks at whether anybody wants something
_SOON_S = 0.02  # between two where somebody does

_loops = itertools.count()


class Agreement:
    """A context for a loop that all processes run alike; alone, a process agrees with itself."""

    def __init__(self):
        self._client: Any = global_state.client  # None: alone
        self._own = global_state.process_id
        self._count = global_state.num_processes
        self._folder = f"decent_jax/agreed/{next(_loops)}"
        self._changed = threading.Condition()  # guards all below
        self._wish = False, False
        self._passed = self._topic = 0  # boundaries; agreements
        self._told = math.inf  # the boundary at which this process waits for the others
        self._agreed: tuple[float, bool, bool] | None = None  # of this topic
        self._over = False
        self._thread = threading.Thread(target=self._listen, name="agreement", daemon=True)

    def at_boundary(self, saves: bool, stops: bool) -> tuple[bool, bool]:
        """Whether all processes save, and whether all stop, at this boundary between two steps.

        Args:
          saves: whether this process wants to save, here or soon.
          stops: whether it wants to stop.
        """
        if self._client is None:
            return saves, stops
        with self._changed:
            here, found = self._passed + 1, (False, False)
            self._wish = saves, stops
            self._changed.notify_all()
            if here >= self._told:
                self._changed.wait_for(lambda: self._agreed or not self._thread.is_alive())
            if self._agreed and here == self._agreed[0]:
                found = self._agreed[1:]
                self._told, self._agreed, self._wish = math.inf, None, (False, False)
                self._topic += 1
            self._passed = here
            return found

    def __enter__(self) -> "Agreement":
        if self._client is not None:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if self._client is not None:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            self._thread.join()

    def _listen(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the others are gone, see `watch`
            while not self._over:
                with self._changed:
                    waits = self._told < math.inf and not self._agreed
                    self._changed.wait_for(self._begins, _SOON_S if waits else _TICK_S)
                    topic = self._topic
                told = self._client.key_value_dir_get(f"{self._folder}/{topic}/")
                self._take(topic, [json.loads(words) for _, words in told])
            for topic in (self._topic, self._topic + 1):  # nobody waits for a loop that has ended
                self._tell(topic, math.inf)
        with self._changed:
            self._changed.notify_all()

    def _begins(self) -> bool:
        return self._over or (any(self._wish) and self._told == math.inf)

    def _take(self, topic: int, told: list) -> None:
        """Do as those who have told something about this topic, and see whether all have."""
        with self._changed:
            if topic != self._topic or self._agreed or self._over:
                return
            if self._told == math.inf and (told or any(self._wish)):
                self._told = self._passed + 1
                self._tell(topic, self._told)
            elif len(told) == self._count:
                boundaries, saves, stops = zip(*told, strict=True)
                self._agreed = max(boundaries), any(saves), any(stops)
                self._changed.notify_all()

    def _tell(self, topic: int, boundary: float) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it has told this before
            words = json.dumps([boundary, *self._wish])
            self._client.key_value_set(f"{self._folder}/{topic}/{self._own:06}", words)
