"""The former name of `decent-jax prepare text`."""

import sys

from decent_jax import prepare

if __name__ == "__main__":
    sys.exit(prepare.former("text"))
