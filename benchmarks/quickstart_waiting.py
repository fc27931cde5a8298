"""configs/quickstart.py with steps that also sleep, see benchmarks/waiting_text.py.

For --config of train.py, with the checkout on PYTHONPATH.
"""

import importlib.util
from pathlib import Path

from decent_jax import train


def get_config():
    path = Path(__file__).resolve().parents[1] / "configs" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    config = train.default_config("benchmarks.waiting_text")
    config.update(quickstart.get_config().to_dict())
    config.task = "benchmarks.waiting_text"
    config.data.compute_s = 0.1
    return config
