"""Human-readable numbers, durations and names."""

import math
from collections.abc import Iterable, Sequence


def format_number(value: float, digits: int = 3) -> str:
    """A readable number with about ``digits`` significant digits.

    >>> [format_number(v) for v in (0, 7, 7.0, 0.01234, 999.7, 81234.0, 124_440_000)]
    ['0', '7', '7.00', '0.0123', '1.00k', '81.2k', '124M']
    >>> format_number(2.41283, digits=4), format_number(1.2e-7), format_number(float("nan"))
    ('2.413', '1.20e-07', 'nan')
    """
    if value == 0 or not math.isfinite(value) or (isinstance(value, int) and abs(value) < 1000):
        return f"{value:.0f}"
    value = float(f"{value:.{digits - 1}e}")  # round first: 999.7 is 1.00k, not 1000
    if abs(value) >= 1e15:
        return f"{value:.{digits - 1}e}"
    power = min(4, max(0, math.floor(math.log10(abs(value)) / 3)))
    return f"{value / 1000**power:#.{digits}g}".rstrip(".") + ("", "k", "M", "G", "T")[power]


def format_bytes(value: float) -> str:
    """A number of bytes in MB, GB or TB.

    >>> format_bytes(674_000), format_bytes(1.99e9), format_bytes(1e12)
    ('0.674 MB', '1.99 GB', '1.00 TB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if value >= size:
            return f"{format_number(value / size)} {unit}"
    return f"{format_number(value / 1e6)} MB"


def format_duration(seconds: float) -> str:
    """A readable duration.

    >>> format_duration(0.04), format_duration(4.21), format_duration(125), format_duration(7260)
    ('0.04 s', '4.2 s', '2 min 5 s', '2 h 1 min')
    >>> format_duration(0.1), format_duration(59.96), format_duration(3599.6)
    ('0.1 s', '1 min 0 s', '1 h 0 min')
    """
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 0.1 else f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def shorten(text: str, limit: int) -> str:
    """``text``, without its middle if it is longer than ``limit`` characters.

    >>> shorten("seed must be an int, got 123456789123456789", 30)
    'seed must be an i ... 23456789'
    """
    if len(text) <= limit:
        return text
    after = (limit - 5) // 3
    return f"{text[: limit - 5 - after]} ... {text[-after:]}"


def shown(value: object) -> str:
    """A value as a message shows it: its ``repr``, cut in the middle if it is too long.

    >>> len(shown("x" * 5000)), shown(0.5)
    (60, '0.5')
    """
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to print large ones
        return f"an integer of about {round(value.bit_length() * 0.30103)} digits"
    try:
        return shorten(repr(value), 60)
    except RecursionError:  # a value from a file may be nested too deep
        return f"a {type(value).__name__} that is nested too deep"


def printable(text: str) -> str:
    r"""``text`` with Python's escapes in place of characters that control a terminal.

    >>> print(printable("red \x1b[31m"))
    red \x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def name_all(processes: list[int], hosts: list[str]) -> str:
    """A phrase with the numbers of some processes, and with their hosts if these are known.

    >>> name_all([2], []), name_all([0, 2], ["a", "b", "c"]), name_all([0, 1, 2, 3], [])
    ('process 2', 'processes 0 (a) and 2 (c)', 'processes 0, 1, 2 and 3')
    >>> name_all([0, 1, 2, 3, 4], [])
    'processes 0, 1, 2 and 2 more'
    """
    words = [f"{process} ({hosts[process]})" if hosts else str(process) for process in processes]
    if len(words) == 1:
        return f"process {words[0]}"
    shown, rest = (words, "") if len(words) <= 4 else (words[:3], f"{len(words) - 3} more")
    if rest:
        return f"processes {', '.join(shown)} and {rest}"
    return f"processes {', '.join(shown[:-1])} and {shown[-1]}"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; each row has a cell for each heading."""
    lines = [
        "".join(f"| {cell} " if cell != "" else "| " for cell in row) + "|"
        for row in (headings, *rows)
    ]
    lines.insert(1, "|---" * len(headings) + "|")
    return "\n".join(lines)


def split_outside_brackets(text: str) -> list[str]:
    """The parts of ``text`` between commas that are outside brackets.

    >>> split_outside_brackets("ring,hierarchical(complete, one_peer_exp), star")
    ['ring', 'hierarchical(complete, one_peer_exp)', 'star']
    """
    names, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return [name.strip() for name in names]
