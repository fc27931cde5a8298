"""Translate sentences with the consensus model of a run, a line each.

    python -m decent_jax.translate --workdir runs/numbers < sentences.en > sentences.de

Lines are translated as they come, some hundred at a time; an empty line stays one.
"""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterable, Iterator

from decent_jax import saved_model
from decent_jax.progress import announce
from decent_jax.train import ConfigError

_AT_A_TIME = 512  # sentences, sorted by length within


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m decent_jax.translate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    saved_model.add_arguments(parser)
    parser.add_argument("--input", metavar="FILE", help="UTF-8 text (default: standard input)")
    parser.add_argument("--beam", type=int, default=4, help="hypotheses kept; 1 is greedy (4)")
    parsed = parser.parse_args(arguments)
    began, count = None, 0
    try:
        with _lines(parsed.input) as lines:
            for text in translate(parsed.workdir, lines, which=parsed.which, beam=parsed.beam):
                began = began or time.monotonic()
                count += 1
                print(text, flush=True)
    except (ConfigError, OSError, ValueError) as error:
        print(f"translate: {error}", file=sys.stderr)
        return 2
    if count > _AT_A_TIME:  # of the first ones it is not known
        rate = (count - _AT_A_TIME) / (time.monotonic() - began)
        print(f"{count} sentences, {rate:.1f} a second", file=sys.stderr)
    return 0


def translate(
    workdir, sentences: Iterable[str], *, which: str = "last", beam: int = 4
) -> Iterator[str]:
    """The translation of each sentence; see `decent_jax.tasks.translator.Translator`.

    Raises:
      ConfigError: no such model.
      ValueError: a beam below 1.
    """
    from decent_jax.tasks.translator import Translator

    if beam < 1:
        raise ValueError(f"beam must be at least 1, got {beam}")
    with announce("loading the model"):
        model = saved_model.load_translation_model(workdir, which)
    translator = Translator(model.config, model.vocabulary, beam)
    sentences = iter(sentences)
    while some := list(itertools.islice(sentences, _AT_A_TIME)):
        yield from translator(model.params, some)


@contextlib.contextmanager
def _lines(path: str | None) -> Iterator[Iterator[str]]:
    """The lines of a file, or of standard input, without their ends."""
    with open(path, encoding="utf-8") if path else contextlib.nullcontext(sys.stdin) as file:
        yield (line.rstrip("\r\n") for line in file)


if __name__ == "__main__":
    sys.exit(main())
