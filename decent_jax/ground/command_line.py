"""What the command lines of this package have in common."""

import argparse
from typing import NoReturn

from decent_jax.ground.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for a wrong flag; a command then refuses it in one short sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help shows how)")
