"""The compiled half of jaxlib, whose wheel has no types: devices, and everything else as Any."""

from typing import Any

class Device:
    id: int
    process_index: int
    platform: str
    device_kind: str
    @property
    def client(self) -> Any: ...
    def memory_stats(self) -> dict[str, int] | None: ...

class Client: ...

def __getattr__(name: str) -> Any: ...
