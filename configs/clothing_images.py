"""A narrow ResNet-18 on 1,000 photographs of clothes, by gossip and by all-reduce.

Source: a subset of https://github.com/alexeygrigorev/clothing-dataset-small (CC0): 10 classes with
100 training images each, and 282 validation images, of at most about 400 x 533 pixels, in the
folders train/<class>/*.jpg and val/<class>/*.jpg. The set is small, so compare several seeds.

Command: python train.py --config configs/clothing_images.py:accum_adam --workdir runs/clothing \\
    --config.data.path=CLOTHING_IMAGES
After the colon comes one of all_reduce, accum_adam, accum_adam_ring (alternating_exp_ring on nodes
of 2) and momentum_sgd (one_peer_exp).

Hardware and result: see docs/images.md.
"""

from decent_jax import train

ARMS = ("accum_adam", "all_reduce", "accum_adam_ring", "momentum_sgd")


def get_config(arguments: str = "accum_adam"):
    (arm,) = train.chosen(arguments, ARMS)
    config = train.default_config("image_classification")
    config.data.path = "data/clothing_images"
    config.data.image_size = 64

    config.model.preset = "resnet18"
    config.model.width = 32  # half the channels: 2.8 million parameters
    config.model.dtype = "float32"

    config.num_replicas = 8
    config.batch_size = 64
    config.epochs = 25.0
    config.lr_schedule.warmup = "10%"
    config.lr_schedule.end_factor = 0.01
    config.optimizer.weight_decay = 3e-5
    config.optimizer.decoupled = False

    if arm == "momentum_sgd":
        config.algorithm = "decentralized_sgd"
        config.schedule = "one_peer_exp"
        config.learning_rate = 0.1
        config.optimizer.weight_decay = 1e-4
    elif arm == "all_reduce":
        config.algorithm = "all_reduce"
        config.learning_rate = 2e-3
    else:
        config.algorithm = "accum_adam"
        config.schedule = "one_peer_exp"
        config.optimizer.accum_steps = 4
        config.learning_rate = 2e-3
    if arm == "accum_adam_ring":
        config.schedule = "alternating_exp_ring"
        config.replicas_per_node = 2

    # vmap over replicas makes grouped convolutions, slow on a CPU
    config.mesh.sequential_replicas = True
    config.log.every = 20
    config.eval.every = 0
    config.checkpoint.every_minutes = 0.0
    return config
