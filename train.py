"""Train a model on replicas that gossip instead of all-reducing gradients; see --help.

The same as `decent-jax train`, from a checkout.
"""

import sys

from decent_jax.commands import main as command


def main(argv: list[str]) -> int:
    return command.train(argv, "train.py")


if __name__ == "__main__":
    command.leave(main(sys.argv[1:]))
