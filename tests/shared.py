"""Where the golden values and small real data sets lie beside a checkout."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(name: str) -> Path:
    """The folder or file ``../shared/name``; skips where it is absent, fails in CI."""
    path = SHARED / name
    if not path.exists():
        message = f"../shared/{name} lies beside the development checkout only; it is absent here"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path
