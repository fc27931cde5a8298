"""The start-up barrier, in threads: it names what is wrong, and strangers cannot stop it."""

import contextlib
import json
import math
import socket
import stat
import threading
import time

import pytest
from refusals import refused
from several import free_port

from decent_jax.cluster import rendezvous
from decent_jax.ground import connections
from decent_jax.train import ConfigError

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory of the run, which all threads see and nobody has made."""
    monkeypatch.delenv(rendezvous.SECRET, raising=False)
    return tmp_path / "runs" / "mine"


class Group:
    """Processes at one barrier, each a thread; ``results`` are hosts, or a ConfigError's text."""

    def __init__(self, folder, count=2, timeout_s=20.0, port=None):
        self.folder, self.count, self.timeout_s = folder, count, timeout_s
        self.port = port or free_port()
        self.results, self._threads = {}, []

    def come(self, index, facts=None, count=None, name=None, folder=None):
        name = index if name is None else name
        address, count = f"localhost:{self.port}", count or self.count
        given = ({"jax": "1"} if facts is None else facts, self.timeout_s, folder or self.folder)

        def one():
            try:
                self.results[name] = rendezvous.barrier(address, count, index, *given)
            except ConfigError as error:
                self.results[name] = str(error)

        self._threads.append(threading.Thread(target=one))
        self._threads[-1].start()
        return self

    def connect(self):
        """A connection to process 0, once it listens."""
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("localhost", self.port), timeout=30)
            time.sleep(0.01)

    def member(self):
        """A connection that has proved to belong to the run."""
        with self.connect() as link:
            return connections.prove(link, rendezvous.find_secret(self.folder, self.port))

    def leave(self):
        for thread in self._threads:
            thread.join()
        assert not self.folder.exists() and not self.folder.parent.exists()
        return self.results


def alike(results, *words):
    """All processes say the same sentence, in which these words are."""
    [sentence] = set(results.values())
    assert all(word in sentence for word in words), sentence
    assert sentence.isprintable() and len(sentence) <= 300


# --- What is wrong --------------------------------------------------------------------------------


def test_what_every_process_has_of_its_own():
    """Its number, and where the data are: hosts may have copies at different places."""
    one, other = {"seed": 0, "data.path": "/a"}, {"seed": 0, "data.path": "/b"}
    assert rendezvous.describe(one) == rendezvous.describe(other)
    assert rendezvous.describe(one) != rendezvous.describe(one | {"seed": math.nextafter(0, 1)})


def test_all_processes_name_the_differences_in_a_short_sentence(folder):
    one, other = ({f"config.f{k}": 5000 * value for k in range(9)} for value in "ab")
    results = Group(folder).come(0, one).come(1, other).leave()
    alike(results, "config.f0: aaa", f" on process 1 ({HERE})")


def test_processes_that_do_not_come_are_named(folder):
    results = Group(folder, 4, timeout_s=1).come(0).come(2).leave()
    alike(results, "processes 1 and 3 of 4", "1 s")


def test_process_0_that_does_not_come(folder):
    address = f"localhost:{free_port()}"
    with refused("cluster.coordinator", address):
        rendezvous.barrier(address, 2, 1, {}, 0.5, folder)


@pytest.mark.parametrize(
    ("index", "count", "words"),
    [(0, 3, "process 0"), (1, 2, "2 processes"), (7, 3, "process 7"), (-1, 3, "process -1")],
)
def test_a_process_that_fits_into_no_place(index, count, words, folder):
    """A number that another has, another count, and numbers that there are not."""
    group = Group(folder, 3).come(0)
    with group.member() as member:
        hello = {"process": index, "count": count, "host": "h", "facts": {"jax": "1"}}
        connections.send(member, hello)
        answer, _ = connections.receive(member)
    group.results["it"] = answer["refusal"]
    alike(group.leave(), words, "h")


HELLO = {"process": 1, "count": 2, "host": "h", "facts": {"jax": "1"}}


@pytest.mark.parametrize(
    "words",
    [
        b"no JSON",  # test_connections has others
        *(
            json.dumps([hello, None, []]).encode()
            for hello in ([], HELLO | {"process": True}, HELLO | {"facts": {"jax": 1}})
        ),
    ],
)
def test_a_hello_that_cannot_be_read_is_one_sentence(folder, words):
    group = Group(folder).come(0)
    with group.member() as member:
        member.send_bytes(words)
        answer, _ = connections.receive(member)
    group.results["it"] = answer["refusal"]
    alike(group.leave(), "process at ", "decent_jax")


@pytest.mark.parametrize("last", [1, 2])  # who comes last
def test_a_process_that_is_started_again_takes_its_place_again(folder, last):
    group = Group(folder, 3).come(0)
    with group.member() as first:
        connections.send(first, HELLO | {"count": 3})
    group.come(3 - last).come(last)
    assert group.leave() == dict.fromkeys(range(3), [HERE] * 3)


def test_a_port_that_is_taken(folder):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with refused("cluster.coordinator", port):
            rendezvous.barrier(f"localhost:{port}", 2, 0, {}, 60, folder)


@pytest.mark.parametrize(
    "address", ["host", "host:", "host:port", "host:99999", ":80", "h:" + 5000 * "9"]
)
def test_addresses_that_are_none(address, folder):
    with refused("cluster.coordinator"):
        rendezvous.barrier(address, 2, 0, {}, 1, folder)


def test_names_cannot_move_the_cursor(folder, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "\x1b[2Jred\r\n" + 500 * "x")
    group = Group(folder).come(0, {"\x1b[31m": "0"}).come(1, {"\x1b[31m": "\x07"})
    alike(group.leave(), "\\x1b[2Jred\\r\\nxxx", "\\x07")


# --- Strangers; test_connections has more of them -------------------------------------------------


def test_a_process_goes_on_looking_when_an_impostor_listens(folder):
    port = free_port()
    with (
        socket.create_server(("localhost", port)) as server,
        rendezvous.offered_secret(folder, port),
    ):
        group = Group(folder, port=port).come(1)
        for words in (b"HTTP/1.1 400\r\n" * 9, bytes(1000)):  # it comes twice
            link, _ = server.accept()
            with link:
                link.sendall(words)
    group.come(0)
    assert group.leave() == dict.fromkeys(range(2), [HERE] * 2)


@pytest.mark.parametrize("has_another", [True, False])
def test_a_process_in_another_folder_cannot_join(folder, tmp_path, has_another):
    """It has the secret of another run, or none."""
    group, elsewhere = Group(folder, timeout_s=1), tmp_path / "elsewhere"
    path = rendezvous.secret_file(elsewhere, group.port)
    elsewhere.mkdir()
    if has_another:
        path.write_bytes(b"0" * 64)
    results = group.come(0).come(1, folder=elsewhere).leave()
    assert "process 1 of 2" in results[0] and "strangers" in results[0]
    assert rendezvous.SECRET in results[1] and (str(path) in results[1]) == (not has_another)


# --- The secret -----------------------------------------------------------------------------------


def test_a_variable_takes_the_place_of_the_file(folder, monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET, "0123456789abcdef")
    group = Group(folder).come(0).come(1)
    assert group.leave() == dict.fromkeys(range(2), [HERE] * 2)  # and no folder was made
    monkeypatch.setenv(rendezvous.SECRET, "short")
    with refused(rendezvous.SECRET):
        rendezvous.find_secret(folder, 1)


def test_the_file_is_for_its_owner_and_goes(folder):
    folder.mkdir(parents=True)
    path = rendezvous.secret_file(folder, 1)
    path.write_text("of a process 0 that was killed")
    (folder / "mine.txt").write_text("stays")
    with rendezvous.offered_secret(folder, 1) as own:
        assert rendezvous.find_secret(folder, 1) == own == path.read_bytes() and len(own) == 64
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in folder.iterdir()] == ["mine.txt"]
    with rendezvous.offered_secret(folder, 1):
        path.write_text("of the same run, which somebody has started once more")
    assert path.exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(rendezvous.SECRET), rendezvous.offered_secret(tmp_path / "file", 1):
        pass
