"""SIGTERM, Ctrl-C, and the closing of a run's terminal."""

import contextlib
import math
import os
import signal
import time
from typing import Any

PATIENCE_S = 2.0  # after Ctrl-C, until another one means "exit at once"


class Halted(Exception):
    """A signal ended an evaluation, in all processes between the same two batches."""


class Signals:
    """Remembers SIGTERM and Ctrl-C for the loop to act on.

    SIGHUP, which a terminal sends when it is closed, counts as SIGTERM unless nohup ignores it.
    Launchers may send several of these signals, or one of them twice. Only a second Ctrl-C after
    `PATIENCE_S` makes the process exit at once, without a checkpoint and therefore with code 1.

    Attributes:
      received: the number of the first signal, or None.
    """

    def __init__(self):
        self.received: int | None = None
        self._pressed = math.inf  # when Ctrl-C came first
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        with contextlib.suppress(ValueError):  # not in the main thread: leave signals alone
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: object):
        if self.received is None:
            self.received = signal.SIGTERM if number == signal.SIGHUP else number
        if number == signal.SIGINT:
            now = time.monotonic()
            if now >= self._pressed + PATIENCE_S:
                os.write(2, b"\nended at once, without a checkpoint\n")
                os._exit(1)
            self._pressed = min(self._pressed, now)
