"""Continue a prompt with the consensus model of a run.

python -m decent_jax.sample --workdir runs/quickstart --prompt "def main("
"""

import argparse
import sys

from decent_jax import saved_model
from decent_jax.progress import announce
from decent_jax.train import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m decent_jax.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    saved_model.add_arguments(parser)
    parser.add_argument("--prompt", default="", help="empty: begin a document")
    parser.add_argument("--tokens", type=int, default=200, help="how many to add (200)")
    parser.add_argument("--samples", type=int, default=1, help="how many continuations (1)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (0.8)")
    parser.add_argument("--top_k", type=int, default=0, help="of the k likeliest tokens; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    try:
        for text in sample(**vars(parsed)):
            print(text, "-" * 80, sep="\n")
    except (ConfigError, ValueError) as error:
        print(f"sample: {error}", file=sys.stderr)
        return 2
    return 0


def sample(
    workdir,
    *,
    which: str = "last",
    prompt: str = "",
    tokens: int = 200,
    samples: int = 1,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> list[str]:
    """The prompt and its continuations, ``samples`` of them; see `generate.generate`.

    Raises:
      ConfigError: no such model, or no tokenizer to read the prompt with.
      ValueError: a number out of range.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from decent_jax.models import generate

    if tokens < 1 or samples < 1 or temperature < 0:
        raise ValueError(
            "tokens and samples must be at least 1 and temperature not negative, "
            f"got {tokens}, {samples} and {temperature}"
        )
    with announce("loading the model"):
        model = saved_model.load(workdir, which)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ConfigError("the run's token folder has no manifest.json that names its tokenizer")
    ids = [tokenizer.end_of_text, *tokenizer.encode(prompt).tolist()]
    with announce("sampling"):
        drawn = generate.generate(
            model.config,
            model.params,
            jnp.tile(jnp.asarray([ids], jnp.int32), (samples, 1)),
            tokens,
            jax.random.key(seed),
            temperature,
            top_k,
        )
        drawn = np.asarray(drawn)[:, 1:].tolist()
    return [tokenizer.decode([i for i in row if i < tokenizer.vocab_size]) for row in drawn]


if __name__ == "__main__":
    sys.exit(main())
