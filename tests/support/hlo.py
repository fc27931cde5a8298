"""What a compiled program communicates, read off its HLO."""

import re
from math import prod

KINDS = (
    "collective-permute",
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-broadcast",
    "conditional",
)


def collectives(text):
    """[(kind, [size of each array], line)] of the collectives (and branches) of an HLO module."""
    found = []
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
        if match:
            shapes = re.findall(r"\b[a-z]+[0-9]*\[([0-9,]*)\]", match[1])
            sizes = [prod(int(n) for n in shape.split(",") if n) for shape in shapes]
            found.append((match[2], sizes, line))
    return found


def pairs_of(line):
    """{(source, target)} of a collective-permute."""
    inside = re.search(r"source_target_pairs=\{(.*?)\}\}", line)[1]
    return {tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", inside)}
