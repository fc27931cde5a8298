"""Every config that comes with the package, resolved: a changed default shows in review."""

import json
from pathlib import Path

import pytest

from decent_jax.ground.command_line import CONFIGS
from decent_jax.train import config as config_lib
from decent_jax.train import flags

RESOLVED = Path(__file__).parents[1] / "data" / "configs"


def resolved(name):
    return config_lib.parse(flags.load(name)).by_name


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_resolves_as_reviewed(name):
    """Run this file as a program to write what the configs resolve to now."""
    assert resolved(name) == json.loads((RESOLVED / f"{name}.json").read_text())


def test_what_is_resolved_is_every_config():
    assert {path.stem for path in RESOLVED.glob("*.json")} == set(CONFIGS)


if __name__ == "__main__":
    RESOLVED.mkdir(exist_ok=True)
    for name in CONFIGS:
        (RESOLVED / f"{name}.json").write_text(json.dumps(resolved(name), indent=0) + "\n")
