"""Slower links for a rehearsal: `tc` limits what a host sends while a run is there.

The first process of each host limits the interface over which it reaches the others: the loopback
where all of them are on one host, which then share the rate. Everything else that leaves by this
interface is slowed down as well. A child process takes the limit away when the process ends,
however it ends.
"""

import atexit
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence

from decent_jax.ground.errors import ConfigError

FIELD = "cluster.rehearse"
_HANDLE = "dec0:"  # of our limit, by which the next run knows it
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LEAST, _MOST = 1e6, 2e10  # bits per second; with less, nobody could log in to stop it
# What an interface has unless somebody has set something else, and gets again afterwards.
_DEFAULTS = ("noqueue", "pfifo_fast", "fq_codel", "fq", "mq", "pfifo")
_PATIENCE_S = 10.0  # with the limit of a process that has ended just now


def check(rate: str) -> None:
    """Raises ConfigError where ``rate`` is neither empty nor a rate that can be rehearsed."""
    if rate and not _LEAST <= _bits(rate) <= _MOST:
        why = "must be a rate of tc from 1mbit to 20gbit, such as 75mbit, or empty"
        raise ConfigError.about(FIELD, rate, why)


def slow_down(rate: str, hosts: Sequence[str], index: int, address: str) -> str:
    """Limit what this host sends until this process ends; words for the log.

    Args:
      rate: of `check`.
      hosts: of all processes.
      index: of this process.
      address: ``host:port`` of process 0.

    Raises:
      ConfigError: this user or this machine cannot, or the interface has a limit already.
    """
    if hosts.index(hosts[index]) != index:  # another process of this host does it
        return ""
    interface = "lo" if len(set(hosts)) == 1 else _interface(address)
    _check_free(rate, interface)
    delete = shlex.join(["tc", "qdisc", "del", "dev", interface, "root", "handle", _HANDLE])
    # It reads nothing until this process closes the pipe, or the kernel does. In a session of its
    # own, signals for this process do not reach it.
    watcher = subprocess.Popen(
        ["sh", "-c", f"read _; {delete}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(_end, watcher)
    # A burst of a few packets of 64 KB, which is what segmentation offload hands over.
    burst = max(256 * 1024, int(_bits(rate) / 8 / 250))
    limit = f"handle {_HANDLE} tbf rate {rate} burst {burst} latency 200ms"
    _tc(rate, f"qdisc add dev {interface} root {limit}")
    return f"what this host sends over {interface} is limited to {rate} until the run ends"


def _end(watcher: subprocess.Popen) -> None:
    assert watcher.stdin is not None
    watcher.stdin.close()
    watcher.wait()


def _bits(rate: str) -> float:
    """Bits per second; 0 for what is no rate."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)(kbit|mbit|gbit)", rate)
    return float(match[1]) * _BITS[match[2]] if match else 0.0


def _interface(address: str) -> str:
    """The network card with the address by which this process talks to process 0."""
    host, _, port = address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        own = probe.getsockname()[0]
    found = _run(["ip", "-o", "addr", "show", "to", own]).stdout.split()
    if len(found) < 2:
        raise ConfigError(f"{FIELD}: no network card of this host has the address {own}")
    return found[1].partition("@")[0]


def _check_free(rate: str, interface: str) -> None:
    """Refuse an interface with rules that somebody else has made."""
    ends = time.monotonic() + _PATIENCE_S
    while True:
        # qdisc tbf 8056: root refcnt 3 rate 1Gbit ...
        words = _tc(rate, f"qdisc show dev {interface} root").split()
        kind, handle = words[1:3] if len(words) > 2 else ("noqueue", "0:")
        if kind in _DEFAULTS:
            return
        if handle != _HANDLE or time.monotonic() > ends:
            raise ConfigError(
                f"{FIELD}={rate}: {interface} has a limit already ({kind} {handle}); leave the "
                f"field empty, or take that one away: tc qdisc del dev {interface} root",
                field=FIELD,
                value=rate,
            )
        time.sleep(0.1)


def _tc(rate: str, command: str) -> str:
    found = _run(["tc", *command.split()])
    if found.returncode:
        said = " ".join(found.stderr.split()) or f"code {found.returncode}"
        raise ConfigError(
            f"{FIELD}={rate}: tc refuses ({said}); run as a user who may change the network, such "
            "as root, or leave the field empty",
            field=FIELD,
            value=rate,
        )
    return found.stdout


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    if shutil.which(argv[0]) is None:
        raise ConfigError(f"{FIELD} needs the program {argv[0]}, of the package iproute2")
    return subprocess.run(argv, capture_output=True, text=True, check=False)
