"""airbench94 on CIFAR-10, by gossip and by all-reduce: 8 replicas with 250 images each.

Source: github.com/KellerJordan/cifar10-airbench (Jordan, 2024), airbench94_muon.py: 8 epochs in
2.59 s on one A100, with a mean accuracy of 94.01% over 200 runs. As in the source: the network with
a whitening layer; 200 steps of 2000 images; Muon at 0.24 for the filters and SGD for all other
parameters, both decaying linearly to 0; images mirrored in every other epoch and shifted by up to 2
pixels; label smoothing of 0.2; six views of a test image. Unlike the source: float32 on a CPU;
images normalized by ImageNet's mean and standard deviation; batch norm over a replica's 250 images;
where momenta are averaged, Muon's momentum is 0.85 instead of 0.6.

Data: as for configs/cifar10.py, from the original images; JPEG copies of them cost 3.5 points.
docs/log/2026-11-29-cifar10-94.md says where to get them.

Command: python train.py --config configs/cifar10_fast.py:all_reduce --workdir runs/cifar10_fast
After the colon comes one of the names in ARMS; `benchmarks/evidence/trainings.py` runs them all.

Hardware: 2 cores. Result: see docs/results.md.
"""

from decent_jax import train

OPTIMIZER = "decent_jax.models.airbench.optimizer"
GOSSIP = {"algorithm": "decentralized_sgd", "schedule": "one_peer_exp"}
MOMENTA = {"algorithm": "gossiped_momentum", "optimizer.name": f"{OPTIMIZER}(beta=0.85)"}
ARMS = {
    "all_reduce": {"algorithm": "all_reduce"},
    "gossip": GOSSIP | {"combine": "atc"},
    "gossip_awc": GOSSIP,
    "gossiped_momentum": GOSSIP | MOMENTA,
    "hypercube": GOSSIP | {"combine": "atc", "schedule": "hypercube"},
}


def get_config(arguments: str = "all_reduce"):
    (arm,) = train.chosen(arguments, tuple(ARMS))
    config = train.default_config("image_classification")
    config.data.path = "data/cifar10"
    config.data.image_size = 32
    config.data.eval_resize = 32
    config.data.crop = "whole"
    config.data.shift = 2
    config.data.border = "reflect"
    config.data.alternate = True
    config.data.eval_views = 6

    config.model.preset = "airbench94"
    config.model.dtype = "float32"
    config.model.label_smoothing = 0.2

    config.num_replicas = 8
    config.batch_size = 2000
    config.epochs = 8.0
    config.optimizer.name = OPTIMIZER
    config.learning_rate = 0.24
    config.lr_schedule.name = "linear"
    config.lr_schedule.warmup = 0
    config.lr_schedule.end_factor = 0.0
    config.update_from_flattened_dict(ARMS[arm])

    config.mesh.sequential_replicas = (
        True  # vmap over replicas makes grouped convolutions, slow on a CPU
    )
    config.log.every = 5
    config.eval.every = "50%"
    config.checkpoint.every = 0
    config.checkpoint.every_minutes = 5.0
    return config
