"""Translate sentences with the consensus model of a run, one per line.

    python -m decent_jax.translate --workdir runs/numbers < sentences.en > sentences.de

Lines are translated as they come, some hundred at a time; an empty line stays empty.
"""

import contextlib
import itertools
import sys
import time

from decent_jax import saved_model
from decent_jax.errors import ConfigError

_AT_A_TIME = 512  # sentences, which the task sorts by length


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 2 after one sentence on stderr."""
    parser = saved_model.parser("translate", __doc__)
    parser.add_argument("--input", metavar="FILE", help="UTF-8 text (default: standard input)")
    parser.add_argument("--beam", type=int, default=4, help="hypotheses kept; 1 is greedy (4)")
    parsed = parser.parse_args(arguments)
    began, count, path = 0.0, 0, parsed.input
    try:
        with open(path, encoding="utf-8") if path else contextlib.nullcontext(sys.stdin) as file:
            lines = (line.rstrip("\r\n") for line in file)
            run = saved_model.Run(parsed.workdir, parsed.which)
            translate = run.call("translator", "translate", parsed.beam)
            while sentences := list(itertools.islice(lines, _AT_A_TIME)):
                print("\n".join(translate(sentences)), flush=True)
                began, count = began or time.monotonic(), count + len(sentences)
    except (ConfigError, OSError, ValueError) as error:
        print(f"translate: {error}", file=sys.stderr)
        return 2
    if count > _AT_A_TIME:  # the first ones also compile
        rate = (count - _AT_A_TIME) / (time.monotonic() - began)
        print(f"{count} sentences, {rate:.1f} per second", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
