"""Worker processes for `decent-jax prepare`, and how they and a trainer's readers handle signals.

All kinds of `prepare` use `encode`: worker processes encode pieces of the input while this process
writes the results in order. The output is the same, byte for byte, for any number of workers.
"""

import collections
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, resource_tracker
from typing import Any, TypeVar

from decent_jax.ground.errors import DataError
from decent_jax.ground.progress import progress_bar

_MOST = 32  # processes per core
SMALL_BYTES = 8 << 20  # starting workers takes longer than processing less than this

Task = TypeVar("Task")
Result = TypeVar("Result")

_work: Callable[..., object]  # in a worker process: the function to call for each task


def how_many(workers: int | None, *, small: bool) -> int:
    """The number of processes to use.

    Args:
      workers: the user's choice; None means one per core that this process may use.
      small: whether there is too little work to share.

    Raises:
      DataError: `workers` is less than 1, or more than this machine should run.
    """
    if workers is None:
        here = hasattr(os, "sched_getaffinity")  # not on macOS
        cores = len(os.sched_getaffinity(0)) if here else os.cpu_count() or 1
        return 1 if small else cores
    most = _MOST * (os.cpu_count() or 1)
    if not 1 <= workers <= most:
        raise DataError(
            f"workers must be at least 1 and at most {_MOST} per core, {most} here, got {workers}"
        )
    return workers


def encode(
    tasks: Iterable[Task],
    work: Callable[[Task], Result],
    add: Callable[[Task, Result], int],
    *,
    workers: int,
    total: int,
    desc: str,
    unit: str = "B",
) -> None:
    """Calls ``add(task, work(task))`` for all tasks in order; processes compute results ahead.

    Args:
      tasks, work, workers: as for `results`.
      add: function that handles a result in this process and returns how much of `total` it covers.
      total: the total of the progress bar on stderr, in `unit`.
      desc: the label of the bar.
    """
    with (
        results(work, tasks, workers) as pairs,
        progress_bar(total, True, desc=desc, unit=unit, unit_scale=unit == "B") as bar,
    ):
        for task, result in pairs:
            bar.update(add(task, result))


@contextlib.contextmanager
def results(
    work: Callable[[Task], Result], tasks: Iterable[Task], workers: int
) -> Iterator[Iterator[tuple[Task, Result]]]:
    """A context with an iterator of `(task, work(task))` in the order of `tasks`.

    At most `2 * workers` tasks are taken ahead of the next result. The processes are spawned, die
    with this one and ignore Ctrl-C, which this one handles. With one worker, this process does the
    work itself.

    Args:
      work: function that is pickled once for each process, so it may carry large keyword arguments.
      tasks: arguments of `work`, pickled one at a time.
      workers: number of processes.

    Raises:
      DataError: a worker process died.
    """
    if workers == 1:
        yield ((task, work(task)) for task in tasks)
        return
    _start_tracker()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(work,))
    try:
        with handled(signal.SIGINT, signal.SIG_IGN), handled(signal.SIGHUP, signal.SIG_IGN):
            for _ in range(workers):
                pool.submit(os.getpid)
        yield _in_order(pool, tasks, 2 * workers)
    except BrokenProcessPool:
        raise DataError("a worker process died, perhaps out of memory; try fewer workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, tasks: Iterable[Task], ahead: int
) -> Iterator[tuple[Task, Any]]:
    pending = collections.deque()
    for task in tasks:
        pending.append((task, pool.submit(_call, task)))
        if len(pending) == ahead:
            task, future = pending.popleft()
            yield task, future.result()
    for task, future in pending:
        yield task, future.result()


def _start(work: Callable[[Task], Result]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    of_its_parent()


def _call(task: object) -> object:
    return _work(task)


def of_its_parent(*_: int) -> None:
    """Makes this process end as soon as the process that started it has ended."""
    threading.Thread(target=_die_with_parent, daemon=True).start()


@contextlib.contextmanager
def deaf_to_signals() -> Iterator[None]:
    """A context for starting processes that Ctrl-C, SIGTERM and SIGHUP do not end.

    The processes inherit this thread's signal mask. A signal to this process arrives after the
    context.
    """
    _start_tracker()  # if started within the context, it would unblock SIGINT and SIGTERM
    signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker() -> None:
    """Starts multiprocessing's resource tracker with its warnings off and SIGHUP ignored.

    The tracker already ignores SIGINT and SIGTERM. It removes batches that a stopped reader left in
    shared memory. That is expected, so its warnings are off.
    """
    sys.warnoptions.append(quiet := "ignore:resource_tracker")  # multiprocessing passes them on
    with handled(signal.SIGHUP, signal.SIG_IGN):
        resource_tracker.ensure_running()
    sys.warnoptions.remove(quiet)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def handled(number: int, handler: Callable[..., object] | signal.Handlers) -> Iterator[None]:
    """A context in which a signal has another handler; processes started in it inherit SIG_IGN."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
