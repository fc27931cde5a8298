"""By which addresses and network cards processes reach each other: what the kernel says of it."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys

import pytest

from decent_jax.cluster import preflight, sockets

CONNECT = "import socket, sys; link = socket.create_connection(('::1', int(sys.argv[1]))); input()"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_both_ends_of_a_connection_while_there_is_one(address):
    """The listener takes both families, as that of gRPC does."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        with contextlib.ExitStack() as links:
            try:
                link = socket.create_connection((address, server.getsockname()[1]))
            except OSError:
                pytest.skip(f"{address} cannot be reached here")
            links.enter_context(link)
            links.enter_context(server.accept()[0])
            near, far = link.getsockname()[:2], link.getpeername()[:2]
            assert {(near, far), (far, near)} <= set(sockets.connections())
        assert not {near, far} & {end for both in sockets.connections() for end in both}


def test_the_end_of_another_process_is_not_ours():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-c", CONNECT, str(port)]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE) as other,
            server.accept()[0] as link,
        ):
            near, far = link.getsockname()[:2], link.getpeername()[:2]
            ours = [both for both in sockets.connections() if ("::1", port) in both]
            other.communicate(b"")
        assert ours == [(near, far)]


def test_this_host_is_reached_by_its_loopback():
    for address in ("127.0.0.1", "127.9.9.9", "::1"):
        assert sockets.card(address, address) == "lo"


def test_without_a_route_there_is_no_card():
    for near, far in [("127.0.0.1", "192.0.2.1"), ("192.0.2.1", "192.0.2.2")]:
        assert sockets.card(near, far) == "?"


# Two cards; a rule takes the second for what is sent from its address, as clouds set it.
TWO_CARDS = """
for k in 0 1; do
    ip link add card$k type veth peer name other$k && ip link set other$k up
    ip address add 10.9.$k.1/24 dev card$k && ip address add fd00:$k::1/64 dev card$k nodad
    ip link set card$k up
done && ip route add default via 10.9.0.2 &&
ip rule add from 10.9.1.1 table 7 && ip route add default via 10.9.1.2 table 7 && exec "$@"
"""
ASK = """
import runpy, sys
card = runpy.run_path(sys.argv[1])["card"]
print(*(card(*both.split(",")) for both in sys.argv[2:]))
"""


def test_the_card_is_that_of_the_kernels_rules():
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs unshare and ip")
    within = ["unshare", "--map-root-user", "--net", "sh", "-c", TWO_CARDS, "sh"]
    if subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("no network of its own for a test here")
    wanted = {
        "10.9.0.1,198.51.100.1": "card0",
        "10.9.1.1,198.51.100.1": "card1",  # by the rule: the main table has the first
        "10.9.0.1,10.9.1.9": "card1",
        "10.9.0.1,10.9.1.1": "lo",
        "fd00:1::1,fd00:1::9": "card1",
    }
    command = [*within, sys.executable, "-c", ASK, sockets.__file__, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(wanted.values())


A, B, C, LO_1, LO_2 = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.1.0.3", 3), ("::1", 4), ("::1", 5)
BY_A, BY_B, ONE, TWO = (A, B, "eth0"), (B, A, "ib0"), (LO_1, LO_2, "lo"), (LO_2, LO_1, "lo")
A_TO_B, B_TO_A = ("a", "10.0.0.1", "eth0", "b"), ("b", "10.0.0.2", "ib0", "a")


@pytest.mark.parametrize(
    ("connections", "hosts", "wanted"),
    [
        ([[BY_A], [BY_B]], "ab", {A_TO_B, B_TO_A}),
        ([[BY_A, (A, C, "eth0")], [BY_B]], "ab", {A_TO_B, B_TO_A}),  # another program is at C
        ([[BY_A], []], "ab", set()),
        ([[ONE], [TWO]], "ab", set()),  # each to another program of its own host
        ([[ONE], [TWO], [ONE], [TWO]], "aabb", {("a", "::1", "lo", "a"), ("b", "::1", "lo", "b")}),
        ([[BY_A], [BY_A, ONE], [BY_B]], "aab", {A_TO_B, B_TO_A}),
    ],
)
def test_by_which_card_each_host_reaches_which_others(connections, hosts, wanted):
    """As lists, which they are once they have been sent."""
    sent = json.loads(json.dumps(connections))
    lines = preflight.ways(sent, hosts)
    assert set(re.findall(r"^(\w) by (\S+) \((\w+)\) to (.+)$", lines, re.M)) == wanted
