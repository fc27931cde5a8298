"""Continue a prompt with the consensus model of a run.

decent-jax sample --workdir runs/quickstart --prompt "def main("
"""

import math
import sys

from decent_jax import saved_model
from decent_jax.errors import ConfigError
from decent_jax.text import shown


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 2 after one sentence on stderr."""
    parser = saved_model.parser("sample", __doc__)
    add = parser.add_argument
    add("--prompt", default="", help="text to continue (default: begin a document)")
    add("--tokens", type=int, default=200, help="tokens to add (default: 200)")
    add("--samples", type=int, default=1, help="number of continuations (default: 1)")
    add("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    add("--top_k", type=int, default=0, help="draw from the k likeliest tokens (default: 0, all)")
    add("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    try:
        options = vars(parser.parse_args(arguments))
        most = {"tokens": 10**6, "samples": 10**4, "top_k": 2**24, "seed": 2**63 - 1}
        for name, largest in most.items():
            if not 0 <= options[name] <= largest:
                raise ConfigError(
                    f"--{name} must be from 0 to {largest}, got {shown(options[name])}"
                )
        if not 0 <= options["temperature"] < math.inf:
            raise ConfigError(
                f"--temperature must be finite and at least 0, got {options['temperature']}"
            )
        run = saved_model.Run(options.pop("workdir"), options.pop("which"))
        for text in run.call("sample", "continue a prompt", **options):
            print(text, "-" * 80, sep="\n")
    except (ConfigError, ValueError) as error:
        print(f"sample: {ConfigError(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
