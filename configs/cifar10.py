"""ResNet-20 on CIFAR-10, by gossip and by all-reduce: 8 replicas with 16 images each.

Source: the task of SwarmSGD (Nadiradze et al., 2021, arXiv:1910.12308) and of Consensus Control
(Kong et al., 2021, arXiv:2102.04828); the network, padding by 4, mirroring, momentum 0.9 and weight
decay 1e-4 are those of He et al. (2016, arXiv:1512.03385).

Data: CIFAR-10 as JPEG or PNG files in the folders train/<class>/ and val/<class>/ (the test set),
packed by
    decent-jax prepare images --input CIFAR10 --out data/cifar10

Command: python train.py --config configs/cifar10.py:momentum_sgd --workdir runs/cifar10
After the colon comes one of the names in ARMS; `benchmarks/evidence/trainings.py` runs them all.

Hardware: 2 cores, 0.7 s per step. Result: see docs/results.md.
"""

from decent_jax import train

PAIRS = "random_matching(rounds=16)"
SGD = {
    "algorithm": "decentralized_sgd",
    "optimizer.name": "sgd",
    "learning_rate": 0.1,
    "optimizer.weight_decay": 1e-4,
}
ADAM = {
    "algorithm": "accum_adam",
    "optimizer.name": "",
    "learning_rate": 2e-3,
    "optimizer.weight_decay": 3e-5,
}
ARMS = {
    "all_reduce": SGD | {"algorithm": "all_reduce"},
    "momentum_sgd": SGD,
    "momentum_sgd_atc": SGD | {"combine": "atc"},
    "alternating_exp_ring": SGD | {"schedule": "alternating_exp_ring", "replicas_per_node": 2},
    "hypercube": SGD | {"schedule": "hypercube"},
    "ring": SGD | {"schedule": "ring"},
    "base_graph": SGD | {"schedule": "base_k"},
    "gossiped_momentum": SGD | {"algorithm": "gossiped_momentum"},
    "exact_diffusion": SGD | {"algorithm": "exact_diffusion", "schedule": "hypercube"},
    "swarm": SGD | {"algorithm": "swarm", "schedule": PAIRS, "mix_every": 2},
    "noloco": SGD | {"algorithm": "noloco", "schedule": PAIRS, "mix_every": 10},
    "sparseloco": SGD | {"algorithm": "sparseloco", "schedule": "complete", "mix_every": 10},
    "accum_adam": ADAM,
    "all_reduce_adam": ADAM | {"algorithm": "all_reduce"},
    "peers": SGD
    | {"algorithm": "swarm", "schedule": "random_matching", "trainer": "peers", "mix_every": 2}
    | {"model.batch_norm_consensus": "mix"},  # peers average the statistics, too
}


def get_config(arguments: str = "momentum_sgd"):
    (arm,) = train.chosen(arguments, tuple(ARMS))
    config = train.default_config("image_classification")
    config.data.path = "data/cifar10"
    config.data.image_size = 32
    config.data.eval_resize = 32
    config.data.crop = "whole"
    config.data.shift = 4

    config.model.preset = "tiny"
    config.model.blocks = "3,3,3"  # 20 layers, 0.27 million parameters
    config.model.dtype = "float32"
    config.model.label_smoothing = 0.0

    config.num_replicas = 8
    config.batch_size = 128
    config.epochs = 15.0
    config.schedule = "one_peer_exp"
    config.lr_schedule.warmup = "5%"
    config.lr_schedule.end_factor = 0.0
    config.optimizer.decoupled = False
    config.optimizer.accum_steps = 4
    config.update_from_flattened_dict(ARMS[arm])

    # vmap over replicas makes grouped convolutions, slow on a CPU
    config.mesh.sequential_replicas = True
    config.log.every = 50
    config.eval.every = "20%"
    config.checkpoint.every = 0
    config.checkpoint.every_minutes = 5.0
    return config
