"""GPT-2 small on OpenWebText: the language-modelling task of "From Promise to Practice".

Source: Wang et al., ICLR 2025 (arXiv 2410.11998), its published training code; the recipe is
nanoGPT's. Both arms: 480 x 1024 tokens per step, 600,000 steps, warm-up over 2,000 steps to 6e-4,
cosine to 6e-5, weight decay 0.1 on matrices, clipping at 1.0, no biases, vocabulary 50304
(124,373,760 parameters). `decentralized`: 16 replicas on nodes of 4, accumulated AdamW over windows
of 8 steps, betas (0.9, 0.98). `all_reduce`: AdamW, betas (0.9, 0.95). The schedule `auto` suits the
hosts; `--config.schedule=alternating_exp_ring` is the published one. `peers` is not in the paper:
it trains 16 peers of one GPU each with the optimizer of `decentralized`; they average in random
pairs every 8 steps, without waiting for each other (docs/peers.md).

Unlike the reference, this config clips a replica's whole gradient (there: each 100 MB bucket) and
computes in bfloat16 (there: float16 with loss scaling).

Data: decent-jax prepare text --tokenizer gpt2 --input OPENWEBTEXT --out data/owt
Command (16 GPUs on 4 nodes, one process per GPU, under srun or with config.cluster.*):
    python train.py --config configs/gpt2_openwebtext.py:decentralized --workdir runs/owt
Peers, on a Ray cluster (launch/slurm_peers.sbatch, launch/kuberay_peers.yaml):
    python train.py --config configs/gpt2_openwebtext.py:peers --workdir /shared/runs/owt
On another number of GPUs, set num_replicas, of which the batch_size of 480 must be a multiple;
micro_batches splits a replica's share into parts that fit into the memory of a GPU.
`:runlocal` (or `:decentralized,runlocal`) shrinks everything for a laptop and reads any folder
that `prepare text` wrote.

Hardware and result, as published: 16 A100 (4 nodes, 100 Gb InfiniBand), about 35 h; validation loss
2.841 and 2.846 nats per token for the two arms (the source does not say which is which). The log of
the same code shows 177.9 ms per step. Not reproduced by this project yet.
"""

from decent_jax import train

ARMS = ("decentralized", "all_reduce", "peers")


def get_config(arguments: str = "decentralized"):
    arm, local = train.chosen(arguments, ARMS, ("", "runlocal"))
    config = train.default_config("language_modeling")
    config.seed = 42

    config.model.preset = "small"
    config.model.vocab_size = 50304
    config.model.bias = False
    config.model.context = 1024
    config.model.dtype = "bfloat16"
    config.data.path = "data/owt"

    config.batch_size = 480
    config.steps = 600_000
    config.learning_rate = 6e-4
    config.lr_schedule.name = "cosine"
    config.lr_schedule.warmup = 2000
    config.lr_schedule.end_factor = 0.1
    config.optimizer.b1 = 0.9
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.num_replicas = 16
    config.replicas_per_node = 4
    config.schedule = "auto"  # published: alternating_exp_ring
    if arm == "all_reduce":
        config.algorithm = "all_reduce"
        config.optimizer.b2 = 0.95
    else:
        config.algorithm = "accum_adam"
        config.optimizer.accum_steps = 8
        config.optimizer.b2 = 0.98
    if arm == "peers":
        config.trainer = "peers"
        config.ray.address = "auto"
        config.ray.gpus = 1.0
        config.peers.exchange_s = 30.0  # a snapshot is 497 MB
        config.algorithm = "swarm"
        config.optimizer.name = "accum_adam"
        config.schedule = "random_matching"
        config.mix_every = 8

    config.eval.every = 1000
    config.eval.batches = 200
    config.checkpoint.every = 5000
    config.checkpoint.every_minutes = 30.0
    config.log.every = 20

    if local:
        config.model.layers = 2
        config.model.heads = 2
        config.model.width = 64
        config.model.context = 64
        config.model.dtype = "float32"
        config.num_replicas = 8
        config.replicas_per_node = 2
        config.batch_size = 16
        config.steps = 20
        config.lr_schedule.warmup = 5
        config.eval.every = 10
        config.eval.batches = 4
        config.log.every = 5
        config.ray.address = ""
        config.ray.gpus = 0.0
    return config
