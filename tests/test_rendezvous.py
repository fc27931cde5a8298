"""The start-up barrier, in threads: it names what is wrong, and strangers cannot stop it."""

import contextlib
import json
import socket
import stat
import struct
import threading
import time

import pytest
from several import free_port

from decent_jax.cluster import rendezvous, secret
from decent_jax.train import ConfigError

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory of the run, which all threads see and nobody has made."""
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    return tmp_path / "runs" / "mine"


class Group:
    """Processes at one barrier, each a thread; ``results`` are hosts, or a ConfigError's text."""

    def __init__(self, folder, count=2, timeout_s=20, port=None):
        self.folder, self.count, self.timeout_s = folder, count, timeout_s
        self.port = port or free_port()
        self.results, self._threads = {}, []

    def come(self, index, facts=None, count=None, name=None, folder=None):
        name = index if name is None else name

        def one():
            try:
                self.results[name] = rendezvous.barrier(
                    f"localhost:{self.port}",
                    count or self.count,
                    index,
                    {"jax": "1"} if facts is None else facts,
                    self.timeout_s,
                    folder or self.folder,
                )
            except ConfigError as error:
                self.results[name] = str(error)

        self._threads.append(threading.Thread(target=one))
        self._threads[-1].start()
        return self

    def connect(self):
        """A connection to process 0, once it listens."""
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("localhost", self.port), timeout=10)
            time.sleep(0.01)

    def leave(self):
        for thread in self._threads:
            thread.join()
        assert not self.folder.exists() and not self.folder.parent.exists()
        return self.results


# --- What is wrong --------------------------------------------------------------------------------


def test_processes_that_agree_learn_their_hosts(folder):
    group = Group(folder, 3).come(2).come(0).come(1)
    assert group.leave() == {k: [HERE] * 3 for k in range(3)}


def test_all_processes_name_the_difference(folder):
    group = Group(folder).come(0, {"config.seed": "0"}).come(1, {"config.seed": "7"})
    sentence = f"config.seed: 0 on process 0 ({HERE}), 7 on process 1 ({HERE})"
    assert group.leave() == dict.fromkeys(range(2), f"the processes differ in {sentence}")


def test_many_and_long_differences_are_one_short_sentence():
    facts = [{f"f{k}": v * 5000 for k in range(9)} for v in "ab"]
    sentence = rendezvous.difference(facts, ["x", "y"])
    assert "in f2: aaa" in sentence
    assert sentence.endswith("bbb ... bbbbbbbbbbb on process 1 (y); and in 6 more")
    assert len(str(ConfigError(sentence))) <= 300


def test_the_process_that_does_not_come_is_named(folder):
    results = Group(folder, 4, timeout_s=1).come(0).come(2).leave()
    for result in results.values():
        assert result.startswith("processes 1 and 3 of 4 did not come within 1 s")


def test_process_0_that_does_not_come(folder):
    result = Group(folder, timeout_s=0.5).come(1).leave()[1]
    assert "process 0 does not answer at localhost:" in result and "Connection refused" in result


def test_two_processes_of_one_number(folder):
    results = Group(folder, 3).come(0).come(1).come(1, name="again").leave()
    assert all("say that they are process 1" in result for result in results.values())


def test_processes_of_two_counts(folder):
    results = Group(folder, 3).come(0).come(1, count=2).leave()
    assert all("was told of 2 processes and process 0" in result for result in results.values())


def test_a_port_that_is_taken(folder):
    with socket.create_server(("", 0)) as server:
        result = Group(folder, port=server.getsockname()[1]).come(0).leave()[0]
    assert "cannot listen on port" in result and "Address already in use" in result


def test_a_host_name_that_does_not_exist(monkeypatch, folder):
    monkeypatch.setattr(rendezvous, "_RESOLVE_S", 0.5)
    with pytest.raises(ConfigError, match=r"host 'no-such-host.invalid' of cluster.coordinator"):
        rendezvous.barrier("no-such-host.invalid:9876", 2, 1, {}, 60, folder)


@pytest.mark.parametrize(
    "address", ["host", "host:", "host:port", "host:99999", ":80", "h:" + 5000 * "9"]
)
def test_addresses_that_are_none(address, folder):
    with pytest.raises(ConfigError, match="must be host:port"):
        rendezvous.barrier(address, 2, 0, {}, 1, folder)


# --- Strangers ------------------------------------------------------------------------------------

HELLO = {"process": 1, "count": 2, "host": "h", "facts": {"jax": "1"}}
STRANGERS = {
    "silent": b"",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "earlier version": json.dumps(HELLO).encode() + b"\n",
    "random": bytes(range(256)) * 40,
    "oversized": b"x" * (rendezvous.LARGEST_MESSAGE + 100_000),
    "deep": b"[" * 100_000 + b"\n",
    "a proof of zeros": bytes(2 * rendezvous.NONCE) + json.dumps(HELLO).encode() + b"\n",
}


def proved(group):
    """A connection that has proved to belong to the run."""
    connection = group.connect()
    nonce, own = connection.recv(rendezvous.NONCE), bytes(rendezvous.NONCE)
    known = secret.find(group.folder, group.port)
    connection.sendall(own + secret.proof(known, "process", nonce, own))
    assert connection.recv(rendezvous.NONCE) == secret.proof(known, "process 0", nonce, own)
    return connection


def test_strangers_are_left_out_and_cost_no_time(folder, capsys, monkeypatch):
    """All at the same time, before the honest process comes; one trickles, four are silent."""
    monkeypatch.setattr(rendezvous, "_GUESTS", 12)  # more than these come
    monkeypatch.setattr(rendezvous, "ANSWER_S", 600)
    group = Group(folder, timeout_s=60).come(0)
    with contextlib.ExitStack() as stack:
        for words in (*STRANGERS.values(), b"", b"", b""):
            connection = stack.enter_context(group.connect())
            with contextlib.suppress(ConnectionError):
                connection.sendall(words)
        trickle = stack.enter_context(group.connect())
        for _ in range(20):
            trickle.send(b"x")
            time.sleep(0.01)
        reset = group.connect()
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        group.come(1)
        assert group.leave() == dict.fromkeys(range(2), [HERE] * 2)
    said = capsys.readouterr().err
    assert " a stranger at 127.0.0.1 was left out: it " in said or " at ::1 was left out" in said
    assert len(said.splitlines()) == 1


def test_silent_strangers_have_a_deadline_and_are_named_when_nobody_comes(
    folder, monkeypatch, capsys
):
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.3)
    group = Group(folder, timeout_s=1.5).come(0)
    with group.connect() as silent:
        silent.recv(rendezvous.NONCE)
        assert silent.recv(1) == b""  # closed by process 0
        result = group.leave()[0]
    assert "did not come within 1.5 s" in result
    assert "; 1 connections of strangers were left out, from " in result
    assert "left out: it was silent for 0.3 s" in capsys.readouterr().err


def test_an_impostor_at_the_port_of_process_0(folder, monkeypatch):
    """It can learn nothing, and the process goes on looking for the true one."""
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.3)
    heard = []

    def impostor(server):
        for words in (b"", b"HTTP/1.1 400\r\n" * 9, bytes(1000)):
            try:
                connection, _ = server.accept()
            except TimeoutError:
                return
            connection.sendall(words)
            told = connection.recv(1000)
            with contextlib.suppress(OSError):  # where the process has closed it
                connection.sendall(bytes(rendezvous.NONCE))  # a proof made of nothing
                told += connection.recv(1000)
            heard.append(told)
            connection.close()

    port = free_port()
    with socket.create_server(("localhost", port)) as server:
        server.settimeout(5)  # a process that believes one does not come to the next
        thread = threading.Thread(target=impostor, args=(server,))
        thread.start()
        group = Group(folder, port=port).come(1)
        with secret.offered(folder, port):
            thread.join()
    assert max(map(len, heard)) <= 2 * rendezvous.NONCE
    group.come(0)
    assert group.leave() == dict.fromkeys(range(2), [HERE] * 2)


def test_a_stranger_with_a_wrong_proof_takes_no_place(folder):
    group = Group(folder, timeout_s=1).come(0)
    with group.connect() as connection:
        connection.recv(rendezvous.NONCE)
        connection.sendall(bytes(2 * rendezvous.NONCE) + json.dumps(HELLO).encode() + b"\n")
        assert "process 1 of 2 did not come within 1 s" in group.leave()[0]


def test_a_process_with_another_secret_is_named(folder, tmp_path, capsys):
    group = Group(folder, timeout_s=1).come(0)
    group.connect().close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    secret.file_in(elsewhere, group.port).write_bytes(b"0" * 64)
    group.come(1, folder=elsewhere)
    results = group.leave()
    assert "process 1 of 2 did not come within 1 s" in results[0]
    assert "connections of strangers were left out" in results[0]
    assert "does not know the secret of this run; start all processes with the same" in results[1]


def test_a_process_that_does_not_see_the_folder(folder, tmp_path):
    group = Group(folder, timeout_s=1).come(0).come(1, folder=tmp_path / "elsewhere")
    path = secret.file_in(tmp_path / "elsewhere", group.port)
    assert f"{path}, its secret, is not there" in group.leave()[1]


@pytest.mark.parametrize("others", [(1, 2), (2, 1)])  # who comes last
def test_a_process_that_comes_once_more_is_the_same(folder, others):
    group = Group(folder, 3).come(0)
    with proved(group) as first:  # dies, and is started again
        first.sendall(json.dumps(HELLO | {"count": 3}).encode() + b"\n")
        time.sleep(0.2)
    group.come(others[0])
    time.sleep(0.2)
    group.come(others[1])
    assert group.leave() == dict.fromkeys(range(3), [HERE] * 3)


def test_names_cannot_move_the_cursor(folder, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "\x1b[2Jred\r\n" + 500 * "x")
    group = Group(folder).come(0, {"\x1b[31m": "0"}).come(1, {"\x1b[31m": "\x07"})
    for result in group.leave().values():
        assert "\\x1b[31m: 0 on process 0 (\\x1b[2Jred\\r\\nxxx" in result
        assert "x), \\x07 on process 1 (" in result and result.isprintable()
        assert len(result) <= 300


# --- The secret -----------------------------------------------------------------------------------


def test_a_variable_takes_the_place_of_the_file(folder, monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "0123456789abcdef")
    group = Group(folder).come(0).come(1)
    assert group.leave() == dict.fromkeys(range(2), [HERE] * 2)  # and no folder was made
    monkeypatch.setenv(secret.VARIABLE, "short")
    with pytest.raises(ConfigError, match="has 5 characters; it needs at least 16"):
        secret.find(folder, 1)


def test_the_file_is_for_its_owner_and_goes(folder):
    folder.mkdir(parents=True)
    path = secret.file_in(folder, 1)
    path.write_text("of a process 0 that was killed")
    (folder / "mine.txt").write_text("stays")
    with secret.offered(folder, 1) as own:
        assert secret.find(folder, 1) == own == path.read_bytes() and len(own) == 64
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in folder.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    refused = pytest.raises(ConfigError, match=r"cannot be written \(")
    with refused, secret.offered(tmp_path / "file", 1):
        pass
