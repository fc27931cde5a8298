"""Work for worker processes, which import this module and little else."""

import os

from decent_jax.ground.errors import DataError


def die(*_, **__):
    os._exit(9)


def negate_below(number, least):
    """-number; DataError from ``least`` on."""
    if number >= least:
        raise DataError(f"bad number {number}")
    return -number
