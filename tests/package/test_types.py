"""What an editor shows of the core: the types of every public name, as pyright counts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ("topology", "gossip", "replicas", "optim")
# A named tuple of optax, which says so only to itself.
OF_OTHERS = {f"decent_jax.optim.{name}" for name in ("Method", "as_method")}
OF_OTHERS |= {f"decent_jax.optim.method_wrapper.{name}" for name in ("Method", "as_method")}


@pytest.mark.slow
def test_every_public_name_of_the_core_has_known_types():
    command = [sys.executable, "-m", "pyright", "--verifytypes", "decent_jax"]
    command += ["--ignoreexternal", "--outputjson"]
    # pyright does not follow the import hook that `pip install -e` leaves.
    paths = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=paths, capture_output=True, text=True)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    core = [each for each in symbols if each["isExported"] and room_of(each["name"]) in CORE]
    assert len(core) > 300
    unknown = {each["name"] for each in core if not each["isTypeKnown"]}
    assert unknown == OF_OTHERS


def room_of(name):
    return [*name.split("."), ""][1]
