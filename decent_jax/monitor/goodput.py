"""Goodput: the clock of a run, the file that survives a kill, and peak FLOP/s of devices.

*Goodput* is the fraction of wall-clock time, over all sessions of a run, spent on steps that were
not rolled back. *Model FLOPs utilization* (mfu) relates the speed of steps to the devices' peak.

>>> from decent_jax.monitor.goodput_file import describe
>>> now = 0.0
>>> clock = Clock(lambda: now)
>>> now = 20.0
>>> with clock.of("compiling"):
...     now = 50.0
>>> now = 90.0
>>> with clock.of("evaluation"):
...     now = 100.0
>>> describe(clock.spent())
'goodput 40% of 1 min 40 s: 30% compiling, 20% start, 10% evaluation'
"""

import contextlib
import contextvars
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax

from decent_jax.ground.errors import Interrupted
from decent_jax.ground.json_files import Json, check_regular, overwrite_json
from decent_jax.monitor.goodput_file import CAUSES, FILE, Record, read, shares

_KEPT_EVERY_S = 1.0
_PATIENCE_S = 5.0  # if a step failed in another process and never ends here


class Clock:
    """Seconds per category, in this session of a run and the previous ones.

    The categories are disjoint. Until the first program is compiled, a session is in "start", or in
    "recovery" if it follows a crash. From then on, time that no category claims is "steps".

    Args:
      now: a clock, in seconds.
      date: a clock, in seconds, with the same origin in all sessions.
      began: when the session began, on the clock ``now``; None: now.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        date: Callable[[], float] = time.time,
        began: float | None = None,
    ):
        self.now, self._date = now, date
        self._began = now() if began is None else began
        self._spent: dict[str, float] = dict.fromkeys(("steps", *CAUSES), 0.0)
        self._cause, self._since = "start", self._began
        self.begin_row()

    # --- By cause ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def of(self, cause: str) -> Iterator[None]:
        """A context whose time counts as one of `CAUSES`."""
        before = self._cause
        self._enter("recovery" if before == "recovery" else cause)
        try:
            yield
        finally:
            starts = cause == "compiling" and before in ("start", "recovery")
            self._enter("steps" if starts else before)

    def waited_for_data(self, seconds: float) -> None:
        """Record seconds of the last step that were spent waiting for its batch."""
        if self._cause == "steps":  # the first batch belongs to the start
            self._spent["steps"] -= seconds
            self._spent["data"] += seconds

    def spent(self) -> dict[str, float]:
        """Seconds of the run so far: "steps", and each of `CAUSES`."""
        self._enter(self._cause)
        return dict(self._spent)

    def _enter(self, cause: str) -> None:
        now = self.now()
        self._spent[self._cause] += now - self._since
        self._cause, self._since = cause, now

    # --- Over several sessions --------------------------------------------------------------------

    def record(self, ended: bool = False) -> Record:
        """The record for later sessions; ``ended``: whether this session ends cleanly."""
        return {"seconds": self.spent(), "date": self._date(), "ended": ended}

    def resume(self, saved: Record | None, last: Record | None) -> None:
        """Continue from a checkpoint with the `record` ``saved``; None: from the beginning.

        The time of later steps in ``last``, the newest record of the run, counts as lost. The time
        since ``last`` counts as recovery, unless the session that wrote it ended cleanly.
        """
        known = [record for record in (last, saved) if record is not None]
        if not known:
            return
        newest = max(known, key=lambda record: record["date"])
        session = sum(self.spent().values())  # all of it is the start so far
        self._spent |= newest["seconds"]
        for cause in ("steps", "data"):
            stayed = saved["seconds"][cause] if saved is not None else 0.0
            self._spent["lost"] += self._spent[cause] - stayed
            self._spent[cause] = stayed
        if newest["ended"]:
            self._spent["start"] += session
        else:
            self._spent["recovery"] += max(self._date() - newest["date"], session)
            self._cause = "recovery"

    # --- Of rows ----------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Training seconds of all sessions before this row: kept steps, and waiting for data."""
        return self._row

    @property
    def waited(self) -> float:
        """Seconds of this row in which the devices waited for data."""
        return self._spent["data"] - self._data

    def begin_row(self, seconds: float = 0.0, waited: float = 0.0) -> None:
        """Start a row; an earlier session spent ``seconds`` on it, ``waited`` of them for data."""
        self._row, self._data = self._training() - seconds, self._spent["data"] - waited

    def of_row(self) -> float:
        """Seconds of the row so far."""
        return max(self._training() - self._row, 1e-9)

    def lap(self) -> tuple[float, float]:
        """End the row, start the next; returns its seconds, and those spent waiting for data."""
        times = self.of_row(), self.waited
        self.begin_row()
        return times

    def _training(self) -> float:
        spent = self.spent()
        return spent["steps"] + spent["data"]


_session: contextvars.ContextVar[float | None] = contextvars.ContextVar("session", default=None)


@contextlib.contextmanager
def session(seconds: float = 0.0) -> Iterator[None]:
    """A context for a session that began ``seconds`` ago, or when the enclosing session did."""
    began = _session.get()
    token = _session.set(time.monotonic() - seconds if began is None else began)
    try:
        yield
    finally:
        _session.reset(token)


def session_clock() -> Clock:
    """A clock for the enclosing `session`."""
    return Clock(began=_session.get())


class Ledger:
    """Writes a clock's record to the run directory; leaving the context writes the last record.

    A written record has reached the operating system, so a killed process loses at most the last
    second.

    Args:
      folder: the run directory.
      clock: the run's clock.
      writes: whether this process represents the run; other processes read and write nothing.
    """

    def __init__(self, folder: Path, clock: Clock, writes: bool):
        self._path, self._clock, self._writes = folder / FILE, clock, writes
        self._due = math.inf  # no record before `resume`

    def resume(self, meta: Json) -> None:
        """Continue from the checkpoint with this ``meta``, if not empty; write records from now on.

        Raises:
          OSError: the file cannot be written.
        """
        saved = meta["row"]["record"] if meta else None
        self._clock.resume(saved, read(self._path) if self._writes else None)
        if self._writes:
            check_regular(self._path)
            self._path.open("ab").close()
            self._due = self._clock.now()

    def keep(self) -> None:
        """Write a record if the last one is a second old; call this after each step."""
        if self._clock.now() >= self._due:
            self._write(ended=False)

    def _write(self, ended: bool) -> None:
        overwrite_json(self._path, self._clock.record(ended))
        self._due = self._clock.now() + _KEPT_EVERY_S

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._due < math.inf:
            with contextlib.suppress(FileNotFoundError):  # the folder was moved away
                self._write(ended=kind is None or issubclass(kind, Interrupted))


# --- Idle devices ---------------------------------------------------------------------------------


class Idle:
    """Measures how long the devices are idle; its context runs a thread that waits for them.

    Args:
      now: a clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]):
        self._now, self._since = now, -math.inf
        self._begun = self._ended = 0
        self._results: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="idle devices", daemon=True)

    def begin(self, result: object) -> None:
        """Note the dispatch of a step that computes the array ``result``."""
        self._begun += 1
        self._results.put(result)

    def seconds(self, began: float, ended: float) -> float:
        """Idle seconds in the interval from ``began`` to ``ended``, which is now."""
        if self._ended < self._begun:
            return 0.0
        return max(0.0, ended - max(began, self._since))

    def _wait(self) -> None:
        with contextlib.suppress(Exception):  # the thread that trains raises it, too
            while (result := self._results.get()) is not None:
                jax.block_until_ready(result)
                self._since = self._now()
                self._ended += 1

    def __enter__(self) -> "Idle":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._results.put(None)
        self._thread.join(_PATIENCE_S)


def summary(clock: Clock) -> Json:
    """The entry of ``summary.json``: goodput, and seconds per category."""
    spent = clock.spent()
    seconds = {cause: round(x, 3) for cause, x in spent.items()}
    return {"share": shares(spent)["goodput"], "seconds": seconds}


# --- Peaks ----------------------------------------------------------------------------------------

# Dense bfloat16 peak of a device in TFLOP/s, from the vendors' data sheets (those of GPUs tend to
# print twice as much, for sparse matrices). The first row whose words all occur in the name of the
# device counts. A chip of TPU7x has two devices.
PEAKS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("A100", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("A10G", 70.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.2),
    ("MI300X", 1307.4),
    ("TPU v4", 275.0),
    ("TPU v5 lite", 197.0),
    ("TPU v5", 459.0),
    ("TPU v5p", 459.0),
    ("TPU v6 lite", 918.0),
    ("TPU7x", 1153.5),
)
_PARTS = {"MIG", "Laptop", "D"}  # words in the names of GPUs slower than `PEAKS` would suggest


def peak(devices: Iterable[jax.Device]) -> float | None:
    """Total bfloat16 FLOP/s of these devices; None if one of them is not in `PEAKS`."""
    peaks = [peak_of(device.device_kind) for device in devices]
    return None if None in peaks else math.fsum(filter(None, peaks))


def peak_of(kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device with this `jax.Device.device_kind`; None if unknown.

    >>> peak_of("NVIDIA H100 PCIe"), peak_of("NVIDIA A100-SXM4-80GB MIG 1g.10gb"), peak_of("cpu")
    (756000000000000.0, None, None)
    """
    words = set(re.split("[ -]", kind))
    if words & _PARTS:
        return None
    fit = (tera for name, tera in PEAKS if set(name.split()) <= words)
    return next((1e12 * tera for tera in fit), None)
