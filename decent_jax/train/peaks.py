"""The peak of GPUs, beside which *model FLOPs utilization* (mfu) puts the speed of a run."""

import math
import re
from collections.abc import Iterable
from typing import Any

# Peak of a GPU in bfloat16, dense, in TFLOP/s, from the vendors' data sheets (which tend to print
# twice as much, for sparse matrices); the first row of which all words are in the name counts.
PEAKS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("A100", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("A10G", 70.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.2),
    ("MI300X", 1307.4),
)
_PARTS = {"MIG", "Laptop", "D"}  # GPUs that are less than their name says


def peak(devices: Iterable[Any]) -> float | None:
    """FLOP/s of these `jax.Device` together in bfloat16; None where one is not in `PEAKS`."""
    found = [peak_of(device.device_kind) for device in devices]
    return None if None in found else math.fsum(filter(None, found))


def peak_of(kind: str) -> float | None:
    """FLOP/s of a device whose `jax.Device.device_kind` this is; None: not known.

    >>> peak_of("NVIDIA H100 PCIe"), peak_of("NVIDIA A100-SXM4-80GB MIG 1g.10gb"), peak_of("cpu")
    (756000000000000.0, None, None)
    """
    words = set(re.split("[ -]", kind))
    if words & _PARTS:
        return None
    fit = (tera for name, tera in PEAKS if set(name.split()) <= words)
    return next((1e12 * tera for tera in fit), None)
