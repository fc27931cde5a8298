"""Connections of a run: messages arrive as they were sent, and strangers get nothing but an end."""

import contextlib
import json
import os
import queue
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge

import jax
import ml_dtypes
import numpy as np
import pytest

from decent_jax.ground import connections

SECRET = b"0123456789abcdef"


class Door:
    """A `Listener` whose connections and strangers a test takes one by one."""

    def __init__(self, **limits):
        server = socket.create_server(("localhost", 0))
        self.address = server.getsockname()
        self.connections, self.strangers = queue.SimpleQueue(), queue.SimpleQueue()
        self.listener = connections.Listener(
            server, SECRET, lambda *got: self.connections.put(got), self.strangers.put, **limits
        )

    def stranger(self, words=b""):
        link = socket.create_connection(self.address, timeout=30)
        with contextlib.suppress(ConnectionError):
            link.sendall(words)
        return link


@pytest.fixture
def door():
    with contextlib.ExitStack() as stack:

        def open_one(**limits):
            one = Door(**limits)
            stack.callback(one.listener.close)
            return one

        yield open_one


@pytest.fixture
def pair(door):
    """Both ends of a connection."""
    one = door()
    with connections.connect(one.address, SECRET) as ours:
        theirs, address = one.connections.get(timeout=30)
        assert address == "127.0.0.1"
        with theirs:
            yield ours, theirs


@pytest.mark.parametrize(
    "value",
    [
        None,
        np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3).T,  # not contiguous
        (np.float32(2.5), (), (np.zeros((0, 3), np.int32), None)),
        {"wte": {"embedding": np.array([True, False])}, "0": None},
        (np.arange(300_000, dtype=np.uint8),),  # longer than the buffers of a socket
    ],
)
def test_a_message_arrives_as_it_was_sent(value, pair):
    ours, theirs = pair
    header = {"kind": "forward", "t": 3, "who": [1, None, "ü"]}
    sender = threading.Thread(target=connections.send, args=(ours, header, value))
    sender.start()
    got, received = connections.receive(theirs)
    sender.join()
    assert got == header
    assert jax.tree.structure(received) == jax.tree.structure(value)
    for array, sent in zip(jax.tree.leaves(received), jax.tree.leaves(value), strict=True):
        assert array.dtype == sent.dtype
        np.testing.assert_array_equal(array, sent, strict=True)
    connections.send(theirs, None)
    assert connections.receive(ours) == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        *(b"\xff", b"", b"7", b"[0]", b"[0, null]", b"[" * 100_000),
        *(b'[0, 0, [["float32"]]]', b'[0, 0, [["object", [1]]]]', b'[0, 0, [["float32", [-1]]]]'),
        *(b'[0, 0, [["float32", "abc"]]]', b'[0, 0, [["float32", [2]]]]'),  # and the bytes of one
        *(b"[0, 0, []]", b"[0, [null, 1], []]", b'[0, "text", []]', b'[0, {"a": 0}, []]'),
    ],
)
def test_what_is_no_message_is_refused(pair, text):
    ours, theirs = pair
    ours.send_bytes(text)
    ours.send_bytes(bytes(4))
    with pytest.raises(connections.NoMessage):
        connections.receive(theirs)


@pytest.mark.parametrize(
    ("text", "size"), [(bytes(connections.LARGEST_HEADER + 1), 0), (b'[0, 0, [["int8", [3]]]]', 4)]
)
def test_no_more_is_read_than_announced(pair, text, size):
    ours, theirs = pair

    def send():
        with contextlib.suppress(OSError):  # the other side hangs up
            ours.send_bytes(text)
            ours.send_bytes(bytes(size))

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(OSError):
        connections.receive(theirs)
    theirs.close()
    sender.join()


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "random": bytes(range(256)) * 40,
    "a long message": struct.pack("!i", 1 << 30),
    "a longer one": struct.pack("!iQ", -1, 1 << 60),
    "a proof of zeros": struct.pack("!i", 16) + bytes(16),
    "a message": struct.pack("!i", 14) + json.dumps([{}, None, []]).encode() * 9,
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_strangers_get_nothing_but_an_end(door, words):
    one = door()
    with one.stranger(words) as link:
        assert one.strangers.get(timeout=30) == "127.0.0.1"
        with contextlib.suppress(ConnectionError):
            while link.recv(1000):
                pass
    with connections.connect(one.address, SECRET) as ours:  # the honest one finds its place
        connections.send(ours, "here")
        assert connections.receive(one.connections.get(timeout=30)[0])[0] == "here"
    assert one.connections.empty()


def test_another_secret_is_refused_on_both_sides(door):
    one = door()
    with pytest.raises(AuthenticationError):
        connections.connect(one.address, SECRET[::-1])
    one.strangers.get(timeout=30)
    assert one.connections.empty()


def test_silence_and_single_bytes_end_in_time(door):
    """The time counts from the first byte to the last, not from one to the next."""
    one = door(handshake_s=0.3)
    with one.stranger() as silent, one.stranger() as slow:
        done = threading.Event()

        def trickle():
            with contextlib.suppress(OSError):
                while not done.wait(0.05):
                    slow.send(b"\0")

        thread = threading.Thread(target=trickle)
        thread.start()
        for _ in range(2):
            one.strangers.get(timeout=30)
        done.set()
        thread.join()
        silent.recv(1000)  # the challenge
        assert silent.recv(1) == b""


def test_the_oldest_of_too_many_strangers_goes_and_the_honest_one_comes(door):
    one = door(guests=5, handshake_s=600)
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(one.stranger()) for _ in range(12)]
        with connections.connect(one.address, SECRET):
            one.connections.get(timeout=30)
        for link in links[:7]:
            one.strangers.get(timeout=30)
            link.recv(1000)
            with contextlib.suppress(ConnectionError):
                assert link.recv(1) == b""
    assert one.connections.empty()


def test_a_closed_listener_frees_its_port_and_leaves_nobody_waiting(door):
    one = door(handshake_s=600)
    with one.stranger() as link:
        link.recv(1000)  # it has been accepted
        one.listener.close()
        assert link.recv(1) == b""
    socket.create_server(one.address).close()
    with pytest.raises(OSError):
        connections.connect(one.address, SECRET)


def hangs_on(link):
    while link.recv(1000):
        pass


def talks_http(link):
    link.sendall(b"HTTP/1.1 400\r\n" * 9)
    hangs_on(link)


def believes_any_answer(link):
    """Lets the other side prove itself, and answers its challenge with zeros."""
    with Connection(os.dup(link.fileno())) as connection:
        connection.send_bytes(b"#CHALLENGE#" + bytes(20))
        connection.recv_bytes(256)
        connection.send_bytes(b"#WELCOME#")
        answer_challenge(connection, bytes(16))


@pytest.mark.parametrize("impostor", [hangs_on, talks_http, believes_any_answer])
def test_an_impostor_at_the_port_is_refused(impostor):
    with socket.create_server(("localhost", 0)) as server:

        def answer():
            link, _ = server.accept()
            with link, contextlib.suppress(OSError, AuthenticationError, EOFError):
                impostor(link)

        thread = threading.Thread(target=answer)
        thread.start()
        link = socket.create_connection(server.getsockname())
        with link, pytest.raises(AuthenticationError):
            connections.prove(link, SECRET, handshake_s=0.3)
        thread.join()
