"""Translate sentences with the consensus model of a run, one per line.

    decent-jax translate --workdir runs/numbers < sentences.en > sentences.de

Lines are translated as they come, some hundred at a time; an empty line stays empty.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from decent_jax.commands import model_flags
from decent_jax.ground.errors import ConfigError
from decent_jax.train.saved_model import TrainedRun

_LONGEST = 20_000  # characters
_AT_A_TIME = 512  # sentences, which the task sorts by length


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 2 after one sentence on stderr."""
    parser = model_flags.parser("translate", __doc__)
    parser.add_argument("--input", metavar="FILE", help="UTF-8 text (default: standard input)")
    parser.add_argument("--beam", type=int, default=4, help="beams; 1 is greedy (default: 4)")
    began, count = 0.0, 0
    try:
        parsed = parser.parse_args(arguments)
        path = parsed.input
        with (
            open(path, encoding="utf-8")
            if path is not None
            else contextlib.nullcontext(sys.stdin) as file
        ):
            lines = _lines(file, path or "standard input")
            run = TrainedRun(parsed.workdir, parsed.which)
            run.function("translator", "translate")  # or refused, before anything is read
            sentences = list(itertools.islice(lines, _AT_A_TIME))  # may be refused, so before
            translate = run.call("translator", "translate", parsed.beam)
            while sentences:
                print("\n".join(translate(sentences)), flush=True)
                began, count = began or time.monotonic(), count + len(sentences)
                sentences = list(itertools.islice(lines, _AT_A_TIME))
    except (ConfigError, OSError, ValueError) as error:
        print(f"translate: {ConfigError(error)}", file=sys.stderr)
        return 2
    if count > _AT_A_TIME:  # the first ones also compile
        rate = (count - _AT_A_TIME) / (time.monotonic() - began)
        print(f"{count} sentences, {rate:.1f} per second", file=sys.stderr)
    return 0


def _lines(file: TextIO, name: str) -> Iterator[str]:
    """The lines without their ends; ConfigError for one longer than any sentence."""
    number = 0
    while line := file.readline(_LONGEST + 1):
        number += 1
        if len(line) > _LONGEST:
            raise ConfigError(
                f"{name}: line {number} has more than {_LONGEST} characters; split it",
                field="--input",
                value=name,
            )
        yield line.rstrip("\r\n")


if __name__ == "__main__":
    sys.exit(main())
