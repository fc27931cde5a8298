"""jax's settings, whose values have many types."""

from typing import Any

class Config:
    values: dict[str, Any]
    def update(self, name: str, val: object) -> None: ...
    def __getattr__(self, name: str) -> Any: ...

config: Config

def __getattr__(name: str) -> Any: ...
