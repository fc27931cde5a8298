"""The TCP connections of this process and their network cards, as the Linux kernel reports them."""

import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path

End = tuple[str, int]  # address, port

_ESTABLISHED = "01"
# Of rtnetlink(7): a query for a route, the answer that there is none, and attributes of a route.
_GET_ROUTE, _REQUEST, _ERROR, _TO, _FROM, _CARD = 26, 1, 2, 1, 2, 4
_ROUTE = "IHHII8BI"  # the heads of a message about one


def connections() -> list[tuple[End, End]]:
    """(own end, other end) of each established connection; empty except on Linux."""
    own = set()
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile, as is the listing's own descriptor
            own.add(os.readlink(descriptor))
    pairs = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # no IPv6
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, near, far, state, *_, inode = line.split()[:10]
                if state == _ESTABLISHED and f"socket:[{inode}]" in own:
                    pairs.append((_end(near), _end(far)))
    return pairs


def _end(text: str) -> End:
    """Parse an end, whose address is 32-bit hexadecimal numbers in the machine's byte order."""
    digits, _, port = text.partition(":")
    numbers = [int(digits[k : k + 8], 16) for k in range(0, len(digits), 8)]
    address = ipaddress.ip_address(struct.pack(f"{len(numbers)}I", *numbers))
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)


def card(near: str, far: str) -> str:
    """The network card on which the kernel sends from one address to another; "?" if none.

    We ask the kernel because the routing tables alone do not show the card if policy rules choose
    between them.
    """
    family = socket.AF_INET6 if ":" in far else socket.AF_INET
    ends = [(_TO, socket.inet_pton(family, far)), (_FROM, socket.inet_pton(family, near))]
    asked = b"".join(struct.pack("HH", 4 + len(x), kind) + x for kind, x in ends)
    size, bits = struct.calcsize(_ROUTE), 8 * len(ends[0][1])
    heads = size + len(asked), _GET_ROUTE, _REQUEST, 0, 0, family, bits, bits, *[0] * 6
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel:
        kernel.send(struct.pack(_ROUTE, *heads) + asked)
        answer = kernel.recv(1 << 14)
    end, kind = struct.unpack_from("IH", answer)
    while kind != _ERROR and size < end:
        length, what = struct.unpack_from("HH", answer, size)
        if what == _CARD:
            return socket.if_indextoname(*struct.unpack_from("I", answer, size + 4))
        size += (length + 3) // 4 * 4  # attributes are padded
    return "?"
