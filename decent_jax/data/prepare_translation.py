"""The former name of `decent-jax prepare translation`."""

import sys

from decent_jax import prepare

if __name__ == "__main__":
    sys.exit(prepare.former("translation"))
