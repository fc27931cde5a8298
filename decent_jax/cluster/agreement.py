"""Agreement of all processes on the step after which they save or stop, without collectives.

A process that receives a signal may be steps ahead of the others, or block in a collective. All
processes therefore number the **boundaries** between their steps. A process that wants to save or
stop publishes the number of its next boundary in jax's key-value store and waits there. A thread of
every other process notices that within `_TICK_S` and publishes its own next boundary, even while
its loop blocks in a collective. Once all have published, they continue to the boundary with the
largest of these numbers, and all save or stop there.
"""

import contextlib
import itertools
import json
import math
import threading
from typing import Any

import jax
from jax._src.distributed import global_state  # see `decent_jax.cluster.watch`

_TICK_S = 0.25  # between two polls
_SOON_S = 0.02  # between two polls while an agreement is in progress

_loops = itertools.count()


class Agreement:
    """A context for a loop that all processes run; a process that runs alone never waits."""

    def __init__(self):
        self._client: Any = global_state.client  # None: a single process
        self._process = global_state.process_id
        self._count = global_state.num_processes
        self._folder = f"decent_jax/agreed/{next(_loops)}"
        self._changed = threading.Condition()  # guards all attributes below
        self._wish = False, False
        self._passed = self._topic = 0  # boundaries; agreements
        self._published = math.inf  # the boundary at which this process waits for the others
        self._agreed: tuple[float, bool, bool] | None = None  # of this topic
        self._over = False
        self._thread = threading.Thread(target=self._listen, name="agreement", daemon=True)

    def at_boundary(self, saves: bool, stops: bool) -> tuple[bool, bool]:
        """Whether all processes save, and whether all stop, at this boundary between two steps.

        Args:
          saves: whether this process wants to save soon.
          stops: whether this process wants to stop soon.
        """
        if self._client is None:
            return saves, stops
        with self._changed:
            here, agreed = self._passed + 1, (False, False)
            self._wish = saves, stops
            self._changed.notify_all()
            if here >= self._published:
                self._changed.wait_for(lambda: self._agreed or not self._thread.is_alive())
            if self._agreed and here == self._agreed[0]:
                agreed = self._agreed[1:]
                self._published, self._agreed, self._wish = math.inf, None, (False, False)
                self._topic += 1
            self._passed = here
            return agreed

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
                    waits = self._published < math.inf and not self._agreed
                    self._changed.wait_for(self._begins, _SOON_S if waits else _TICK_S)
                    topic = self._topic
                wishes = self._client.key_value_dir_get(f"{self._folder}/{topic}/")
                self._take(topic, [json.loads(text) for _, text in wishes])
            # No process may wait for a loop that has ended.
            for topic in (self._topic, self._topic + 1):
                self._publish(topic, math.inf)
        with self._changed:
            self._changed.notify_all()

    def _begins(self) -> bool:
        return self._over or (any(self._wish) and self._published == math.inf)

    def _take(self, topic: int, wishes: list) -> None:
        """Join an agreement that another process began, and finish it once all have joined."""
        with self._changed:
            if topic != self._topic or self._agreed or self._over:
                return
            if self._published == math.inf and (wishes or any(self._wish)):
                self._published = self._passed + 1
                self._publish(topic, self._published)
            elif len(wishes) == self._count:
                boundaries, saves, stops = zip(*wishes, strict=True)
                self._agreed = max(boundaries), any(saves), any(stops)
                self._changed.notify_all()

    def _publish(self, topic: int, boundary: float) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it has published before
            text = json.dumps([boundary, *self._wish])
            self._client.key_value_set(f"{self._folder}/{topic}/{self._process:06}", text)
