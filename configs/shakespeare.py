"""nanoGPT's small character models of Shakespeare, by gossip and by all-reduce: 4 replicas.

Source: github.com/karpathy/nanoGPT, config/train_shakespeare_char.py (:gpu) and the CPU command of
its README (:cpu). Published: a best validation loss of 1.4697 (:gpu) and a loss of 1.88 (:cpu), in
nats per character, estimated from 200 and 20 random batches; here, the loss is that of the whole
validation set. The vocabulary has nanoGPT's 65 characters and an end-of-text id.

Data: char-rnn's input.txt, whose last tenth is for validation, prepared by
    decent-jax prepare text --tokenizer chars --input input.txt --val_fraction 0.1 \\
        --out data/shakespeare

Command: python train.py --config configs/shakespeare.py:cpu,accum_adam --workdir runs/shakespeare
After the colon come one of the names in RECIPES and one of those in ARMS;
`benchmarks/evidence/trainings.py` runs them.

Hardware: 2 cores for :cpu, one GPU for :gpu. Result: see docs/results.md.
"""

from decent_jax import train

RECIPES = {
    "cpu": {
        "model.layers": 4,
        "model.heads": 4,
        "model.width": 128,
        "model.context": 64,
        "batch_size": 12,
        "steps": 2000,
        "eval.batch_size": 120,
    },
    "gpu": {
        "model.layers": 6,
        "model.heads": 6,
        "model.width": 384,
        "model.context": 256,
        "model.dropout": 0.2,
        "batch_size": 64,
        "steps": 5000,
    },
}
# A replica's gradient is noisier than the mean gradient, and Adam divides by its magnitude, so the
# learning rate is doubled.
GOSSIPED = {
    "algorithm": "gossiped_momentum",
    "optimizer.name": "adam",
    "schedule": "one_peer_exp",
    "learning_rate": 2e-3,
    "optimizer.b2": 0.999,
}
ARMS = {
    "all_reduce": {"algorithm": "all_reduce", "optimizer.name": "adam"},
    "accum_adam": {"algorithm": "accum_adam", "schedule": "one_peer_exp"},
    "gossiped_momentum": GOSSIPED,
    "gossiped_momentum_int8": GOSSIPED | {"codec": "int8"},
    "diloco": {
        "algorithm": "diloco",
        "optimizer.name": "adam",
        "schedule": "complete",
        "mix_every": 16,
        "codec": "int4",
    },
}


def get_config(arguments: str = "cpu,accum_adam"):
    recipe, arm = train.chosen(arguments, tuple(RECIPES), ("accum_adam", *ARMS))
    config = train.default_config("language_modeling")
    config.data.path = "data/shakespeare"
    config.data.shifted = True
    config.data.prompt = "\n"
    config.model.bias = False
    config.model.dtype = "float32"

    config.num_replicas = 4
    config.learning_rate = 1e-3
    config.lr_schedule.warmup = 100
    config.optimizer.b2 = 0.99
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0
    config.update_from_flattened_dict(RECIPES[recipe] | ARMS[arm])

    config.mesh.sequential_replicas = recipe == "cpu"  # faster than vmap on a CPU
    config.log.every = 50
    config.eval.every = 250
    config.checkpoint.every_minutes = 1.0
    return config
