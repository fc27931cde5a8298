"""Worker processes of the ``prepare`` commands, and how those commands are interrupted."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection

from decent_jax.errors import DataError


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@contextlib.contextmanager
def open_pool(
    workers: int, start: Callable | None = None, *arguments
) -> Iterator[ProcessPoolExecutor]:
    """Spawned processes that die with this one and leave Ctrl-C to it.

    Args:
      workers: how many.
      start: called in each with ``arguments``, before any work; None: nothing is.

    Raises:
      DataError: one of them died.
    """
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(start, arguments),
    )
    try:
        with _interrupts_ignored():  # inherited: a worker that is still starting stays silent
            for _ in range(workers):
                pool.submit(os.getpid)
        yield pool
    except BrokenProcessPool:
        raise DataError("a worker process died, perhaps out of memory; try fewer workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(start, arguments) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if start is not None:
        start(*arguments)


def _die_with_parent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def terminated_politely() -> Iterator[None]:
    """A context in which SIGTERM, a scheduler's word, cleans up as Ctrl-C does."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
