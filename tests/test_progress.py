"""What the user sees: plain lines in a file, a bar in a pseudo-terminal, honest times."""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
from types import SimpleNamespace

import pytest

from decent_jax.ground import progress
from decent_jax.ground.errors import ConfigError
from decent_jax.ground.progress import Progress, announce


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: clock[0] is now."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal():
    """(a text stream that is a terminal of 120 columns, a function that returns what it shows)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    stream = open(theirs, "w", encoding="utf-8")  # noqa: SIM115
    chunks = []

    def drain():
        try:
            while chunk := os.read(ours, 4096):
                chunks.append(chunk)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()

    def shown():
        stream.close()
        reader.join(timeout=10)
        return b"".join(chunks).decode()

    yield stream, shown
    if not stream.closed:
        stream.close()
    reader.join(timeout=10)
    os.close(ours)


def test_plain_lines(clock):
    stream = io.StringIO()
    with Progress(600, stream=stream) as shown:
        shown.update(1, {"loss": 10.82})
        clock[0] += 119 / 6  # six steps a second
        shown.update(60)  # only moves a bar
        shown.update(120, {"loss": 2.41312, "consensus": 0.012, "tokens/s": 81234.5})
        shown.note("saved the checkpoint of step 120")
        clock[0] += 80
        shown.update(600, {"loss": 2.0, "skipped": 3})
    assert stream.getvalue().splitlines() == [
        "step 1/600  loss 10.82",
        "step 120/600  loss 2.413  consensus 0.01200  81.2k tokens/s  0:01:20 left",
        "saved the checkpoint of step 120",
        "step 600/600  loss 2.000  skipped 3",
    ]


def test_time_left_counts_neither_earlier_sessions_nor_compilation_nor_waits(clock):
    stream = io.StringIO()
    with Progress(1000, start_step=500, stream=stream) as shown:
        with shown.announce("compiling"):
            clock[0] += 300
        shown.update(501)
        clock[0] += 60  # the first steps compile too
        shown.update(501, {"loss": 1.0})
        clock[0] += 10
        with shown.announce("restoring"):
            clock[0] += 1000
        shown.update(511, {"loss": 1.0})
    assert stream.getvalue().splitlines() == [
        "compiling ... done in 5 min 0 s",
        "step 501/1000  loss 1.000",
        "restoring ... done in 16 min 40 s",
        "step 511/1000  loss 1.000  0:08:09 left",
    ]


def test_announce_says_what_happened(clock):
    stream = io.StringIO()
    with announce("compiling the step for round 0 of 3", stream=stream, after_s=0):
        assert stream.getvalue() == "compiling the step for round 0 of 3 ... "
        clock[0] += 4.2
    with pytest.raises(KeyError), announce("restoring", stream=stream):
        raise KeyError
    assert stream.getvalue().splitlines() == [
        "compiling the step for round 0 of 3 ... done in 4.2 s",
        "restoring ... failed after 0.00 s",
    ]


def test_what_is_refused_at_once_says_only_why():
    stream = io.StringIO()
    with pytest.raises(ConfigError), announce("looking for images", stream=stream, after_s=60):
        raise ConfigError("there are none")
    assert stream.getvalue() == ""
    with announce("looking for images", stream=stream, after_s=60):
        pass
    assert re.fullmatch(r"looking for images \.\.\. done in .* s\n", stream.getvalue())


def test_a_wait_is_announced_while_it_lasts():
    told = threading.Event()

    class Stream(io.StringIO):
        def write(self, text):
            told.set()
            return super().write(text)

    stream = Stream()
    with pytest.raises(ConfigError), announce("looking", stream=stream, after_s=0.01):
        assert told.wait(30)
        raise ConfigError("there are none")
    assert re.fullmatch(r"looking \.\.\. failed after .* s\n", stream.getvalue())


def test_notes_inside_an_announcement_get_lines_of_their_own(clock):
    stream = io.StringIO()
    shown = Progress(10, stream=stream)
    with shown.announce("restoring"):
        shown.note("8 replicas became 4")
        shown.note("moments are averaged")
    shown.note("ready")
    assert stream.getvalue().splitlines() == [
        "restoring ... ",
        "8 replicas became 4",
        "moments are averaged",
        "done in 0.00 s",
        "ready",
    ]


def test_quiet_writes_nothing(terminal):
    stream, shown = terminal
    with Progress(10, quiet=True, stream=stream) as bar, bar.announce("compiling"):
        bar.update(5, {"loss": 1.0})
        bar.note("hello")
    with announce("loading", quiet=True, stream=stream):
        pass
    assert shown() == ""


def test_a_terminal_gets_a_bar_that_notes_do_not_break(terminal):
    stream, shown = terminal
    with Progress(600, start_step=100, stream=stream) as bar:
        with bar.announce("compiling the step"):
            pass
        bar.update(101)
        bar.update(200, {"loss": 2.6})
        bar.update(300, {"loss": 2.413, "tokens/s": 81234.0})
        bar.note("saved the checkpoint of step 300")
        bar.update(600, {"loss": 2.112, "tokens/s": 81234.0})
    text = shown()
    assert "17% |" in text and "100/600" in text
    assert re.search(r"50% \|.+\| 300/600, 0:00:0\d left  loss 2\.413  81\.2k tokens/s", text)
    assert "\rsaved the checkpoint of step 300\r\n" in text
    assert re.search(r"\rcompiling the step \.\.\. done in 0\.\d+ s\r\n", text)
    assert re.search(r"100% \|.+\| 600/600, loss 2\.112  81\.2k tokens/s *\r\n$", text)
    lines = [line.rsplit("\r", 1)[-1] for line in text.split("\r\n")]
    assert max(map(len, lines)) <= 120
    assert len(lines) == 4  # the announcement, the note, the bar, and nothing after it


def test_a_terminal_without_a_size_gets_lines(terminal):
    stream, shown = terminal
    fcntl.ioctl(stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    with Progress(600, stream=stream) as bar:
        bar.update(1, {"loss": 2.0})
    assert shown() == "step 1/600  loss 2.000\r\n"


@pytest.mark.parametrize(
    "columns, shown_words",
    [
        (60, "0:00:0. left  loss 2.413"),
        (80, "0:00:0. left  loss 2.413  consensus 0.01200"),
        (200, "0:00:0. left  loss 2.413  consensus 0.01200  81.2k tokens/s"),
    ],
)
def test_a_bar_keeps_ten_columns_and_whole_words(terminal, columns, shown_words):
    stream, shown = terminal
    size = struct.pack("HHHH", 24, columns, 0, 0)
    fcntl.ioctl(stream.fileno(), termios.TIOCSWINSZ, size)
    with Progress(600, stream=stream) as bar:
        bar.update(1, {"loss": 3.0})
        bar.update(300, {"loss": 2.413, "consensus": 0.012, "tokens/s": 81234.0})
        bar.note("word " * 30 + "optimizer")
    lines = re.split(r"[\r\n]+", shown())
    bars = [line for line in lines if "300/600, " in line]
    assert re.fullmatch(rf" 50% \|(.{{10,}})\| 300/600, {shown_words} *", bars[0])
    assert max(map(len, lines)) <= columns
    assert "optimizer" in {word for line in lines for word in line.split()}


def test_what_is_said_before_the_bar_keeps_whole_words(terminal):
    stream, shown = terminal
    fcntl.ioctl(stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    one, other = "accum_adam: a replica sends 0.674 MB per step and keeps", "21.69 MB of state"
    with announce("reading the standard library of Python as the corpus", stream=stream, after_s=0):
        pass
    print(progress.fitted(f"short\n{one} {other}", stream), file=stream)
    path = "curves       " + "/x" * 31
    assert progress.fitted(path, stream) == path
    text = shown()
    assert text.endswith(f"short\r\n{one}\r\n{other}\r\n")
    assert text.startswith("reading the standard library of Python as the\r\ncorpus ... done")


def test_a_notebook_without_widgets_gets_lines(monkeypatch):
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(config={"IPKernelApp": {}}))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    assert progress._notebook_bar() is None
