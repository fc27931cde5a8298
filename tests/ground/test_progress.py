"""What the user sees: lines in a file, a bar in a pseudo-terminal, honest times."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios
import threading
import time

import pytest

from decent_jax.ground.progress import Progress, announce


@contextlib.contextmanager
def terminal(columns=100):
    """The standard error is a terminal; a list that holds its lines in the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    chunks, screen = [], []

    def drain():
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(ours, 4096):
                chunks.append(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    with open(theirs, "w", encoding="utf-8") as stream, contextlib.redirect_stderr(stream):
        yield screen
    reader.join()
    os.close(ours)
    screen += [line.split("\r")[-1].rstrip() for line in b"".join(chunks).decode().split("\r\n")]


@contextlib.contextmanager
def file():
    """The standard error is a file; call it for its lines so far."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        yield lambda: stream.getvalue().splitlines()


@pytest.fixture
def clock(monkeypatch):
    """tqdm's clock, which the test moves: clock[0] is now."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def test_the_time_left_counts_neither_earlier_sessions_nor_waits(clock):
    with file() as lines, Progress(1000, start_step=500) as shown:
        for step in (510, 520):
            with shown.announce("compiling"):
                clock[0] += 3000
            clock[0] += 10
            shown.update(step, {"loss": 1.0})
    rows = [line for line in lines() if "step " in line]
    assert [row.rpartition("  ")[2] for row in rows] == ["08:10 left", "08:00 left"]


def test_a_wait_says_what_it_was_for_and_how_it_ended():
    with file() as lines, announce("compiling"):
        pass
    assert lines()[0].startswith("compiling ... done in ")
    with file() as lines, pytest.raises(KeyError), announce("restoring", after_s=0):
        while not lines():  # told while it lasts
            time.sleep(0.001)
        raise KeyError
    assert lines()[0].startswith("restoring ... ended early after ")


def test_quiet_writes_nothing():
    with terminal() as screen, Progress(10, quiet=True) as bar, announce("loading", quiet=True):
        with bar.announce("compiling"):
            bar.update(5, {"loss": 1.0})
        bar.note("hello")
    assert screen == [""]


def test_a_terminal_gets_a_bar_below_the_notes():
    with terminal() as screen, Progress(600, start_step=100) as bar:
        with bar.announce("compiling the step"):
            bar.note("a note in between")
        bar.update(200, {"loss": 2.6})
        bar.note("saved")
        bar.update(600, {"loss": 2.112, "tokens/s": 81234.0})
    between, compiled, note, last, nothing = screen
    assert between == "a note in between" and note == "saved" and nothing == ""
    assert compiled.startswith("compiling the step ... done in ")
    assert all(words in last for words in ("100%", "600/600", "loss 2.112", "81.2k tokens/s"))
