"""ResNet-50 on ImageNet-1K with momentum SGD over exponential graphs.

Source: Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training"
(NeurIPS 2021, arXiv 2110.13363), whose protocol is that of Goyal et al. (2017, arXiv 1706.02677):
90 epochs; the learning rate is 0.1 per 256 images of a step, rises linearly for 5 epochs, and falls
to a tenth after 30, 60 and 80; momentum 0.9, decay 1e-4 on all but batch-norm scales and biases; 32
images per replica, 4 machines with 8 GPUs each. Momentum stays local, and replicas mix their
parameters after the step (combine="atc"), as in the authors' code. After the colon:

    one_peer_exp     one neighbour per step, 2^k places away, in turn
    static_exp       all of these neighbours in each step
    ring             both neighbours on a circle
    all_reduce       momentum SGD on the mean gradient

Training crops, too, have 224 pixels. There is no label smoothing.

Data: as for configs/resnet50_imagenet.py.
Command (32 GPUs, one process per GPU, under srun or with config.cluster.*):
    python train.py --config configs/resnet50_imagenet_expgraph.py:one_peer_exp \\
        --workdir runs/expgraph
`:one_peer_exp,runlocal` shrinks everything for a laptop and trains on generated pictures.

Hardware and result: this project has not run it on ImageNet yet. In the paper, one-peer and static
exponential graphs reach the accuracy of all-reduce.
"""

from decent_jax import train

SCHEDULES = {
    "one_peer_exp": "one_peer_exp",
    "static_exp": "static_exp",
    "ring": "bidirectional_ring",
    "all_reduce": "complete",
}


def get_config(arguments: str = "one_peer_exp"):
    graph, local = train.chosen(arguments, [*SCHEDULES], ("", "runlocal"))
    config = train.default_config("image_classification")

    config.model.preset = "resnet50"
    config.model.dtype = "bfloat16"
    config.model.label_smoothing = 0.0
    config.data.path = "data/imagenet2012/5.1.0"
    config.data.image_size = 224
    config.data.eval_resize = 256
    config.data.prefetch = 8  # and as many threads per process; one decodes 1,500 images/s

    config.num_replicas = 32
    config.schedule = SCHEDULES[graph]
    config.algorithm = "decentralized_sgd"
    config.combine = "atc"
    if graph == "all_reduce":
        config.algorithm = "all_reduce"
        config.optimizer.name = "sgd"
        config.combine = ""

    config.batch_size = 32 * config.num_replicas
    config.epochs = 90.0
    config.learning_rate = 0.1 * config.batch_size / 256
    config.lr_schedule.name = "step"
    config.lr_schedule.warmup = "5 epochs"
    config.lr_schedule.drops = "30 epochs, 60 epochs, 80 epochs"
    config.optimizer.momentum = 0.9
    config.optimizer.weight_decay = 1e-4
    config.optimizer.decoupled = False

    config.eval.every = "1 epoch"
    config.checkpoint.every = "1 epoch"
    config.checkpoint.every_minutes = 30.0
    config.log.every = 50

    if local:
        config.model.update(width=8, small_images=True, dtype="float32")
        config.data.update(path="generated", train_images=2000, val_images=200)
        config.data.update(image_size=32, eval_resize=0)
        config.update(num_replicas=8, batch_size=64, epochs=3.0, learning_rate=0.025)
        config.lr_schedule.update(warmup="10%", drops="1 epoch, 2 epochs")
        config.log.every = 5
        config.mesh.sequential_replicas = True
    return config
