"""Translate sentences, one per line, with the consensus model of a run.

    decent-jax translate --workdir runs/numbers < sentences.en > sentences.de

Lines are translated as they arrive, a few hundred at a time; an empty line stays empty.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from typing import IO

from decent_jax.ground.command_line import command, model_parser
from decent_jax.ground.errors import ConfigError
from decent_jax.train.saved_model import TrainedRun

_LONGEST = 20_000  # bytes
_AT_A_TIME = 512  # sentences, which the task sorts by length


@command("translate")
def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 after one sentence on stderr."""
    parser = model_parser("translate", __doc__)
    parser.add_argument("--input", metavar="FILE", help="UTF-8 text (default: standard input)")
    parser.add_argument("--beam", type=int, default=4, help="beam width; 1: greedy (default: 4)")
    parsed, began, count = parser.parse_args(arguments), 0.0, 0
    path = parsed.input
    with open(path, "rb") if path else contextlib.nullcontext(sys.stdin.buffer) as file:
        lines = _lines(file, path or "standard input")
        run = TrainedRun(parsed.workdir, parsed.which)
        run.function("translator", "translate")  # refused before anything is read
        sentences = list(itertools.islice(lines, _AT_A_TIME))  # may be refused, so it comes first
        translate = run.call("translator", "translate", parsed.beam)
        while sentences:
            print("\n".join(translate(sentences)), flush=True)
            began, count = began or time.monotonic(), count + len(sentences)
            sentences = list(itertools.islice(lines, _AT_A_TIME))
    if count > _AT_A_TIME:  # the first ones include compilation
        rate = (count - _AT_A_TIME) / (time.monotonic() - began)
        print(f"{count} sentences, {rate:.1f} per second", file=sys.stderr)
    return 0


def _lines(file: IO[bytes], name: str) -> Iterator[str]:
    """The lines without line ends; raises ConfigError at one that is not UTF-8 or too long."""
    number = 0
    while line := file.readline(_LONGEST + 1):
        number += 1
        if len(line) > _LONGEST:
            raise ConfigError(f"{name}, line {number}: has more than {_LONGEST} bytes; split it")
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            where = f"{name}, line {number}: invalid UTF-8 at its byte {error.start}"
            raise ConfigError(f"{where}; convert the text to UTF-8") from None
