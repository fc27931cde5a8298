"""Four peers learn Python's own standard library without a common step; one may be slow, or die.

Source: none; the data and the model are those of configs/quickstart.py. Every peer is a separate
process, which Ray starts on this machine; random pairs average every 4 steps.

Command: python train.py --config configs/quickstart_peers.py --workdir runs/peers
Kill one of the processes called ray::Peer during training: the others continue, and a new one
joins.
Hardware: 2 cores; expected result: see docs/peers.md.
"""

import importlib.util
from pathlib import Path


def get_config():
    path = Path(__file__).with_name("quickstart.py")
    spec = importlib.util.spec_from_file_location("_quickstart", path)
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    config = quickstart.get_config()
    config.trainer = "peers"
    config.num_replicas = 4
    config.algorithm = "swarm"
    config.schedule = "random_matching"  # peers average in random pairs, without rounds
    config.optimizer.name = "accum_adam"
    config.mix_every = 4
    return config
