"""GPT3-XL (1.3B) in eight stages of three layers, in eight pipelines: the workload of DT-FM.

Source: Brown et al., 2020 (arXiv 2005.14165), table 2.1 and appendix B: 24 layers, width 2048,
context 2048, batches of 1M tokens, Adam with betas (0.9, 0.95), 375M tokens of warm-up to 2e-4,
cosine to 10% over 260B tokens, clipping at 1.0, weight decay 0.1. The grid of 8 x 8 devices and
micro-batches of one sequence are those of Yuan et al., NeurIPS 2022 (arXiv 2206.01288). The table's
24 heads of size 128 do not give a width of 2048, so this config has 16 heads. The vocabulary is
padded to 50304.

Data: decent-jax prepare text --tokenizer gpt2 --input TEXT --out data/text
Command (64 machines in a Ray cluster, one GPU each, placed by the planner):
    decent-jax planner place --network network.json --parameters 1.3e9 --stages 8 --replicas 8 \\
        --pipeline_bytes 0.5e9 --plan plan.json
    python train.py --config configs/gpt3_xl_dtfm.py --workdir runs/gpt3_xl \\
        --config.ray.address=auto --config.cluster.plan=plan.json
To average as DT-FM does: --config.algorithm=all_reduce.

Hardware and result: not run at this size by this project.
"""

from decent_jax import train


def get_config():
    config = train.default_config("language_modeling")
    config.model.preset = "xl"
    config.model.layers = 24
    config.model.heads = 16
    config.model.width = 2048
    config.model.context = 2048
    config.model.vocab_size = 50304
    config.data.path = "data/text"

    config.num_replicas = 8
    config.algorithm = "decentralized_adam"
    config.schedule = "one_peer_exp"
    config.batch_size = 512
    config.steps = 247_955  # 260e9 tokens
    config.learning_rate = 2e-4
    config.lr_schedule.warmup = 358
    config.lr_schedule.end_factor = 0.1
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.trainer = "pipelines"
    config.pipeline.stages = 8
    config.pipeline.micro_batches = 64
    config.pipeline.order = "gpipe"  # see docs/pipelines.md; as DT-FM
    config.pipeline.codec = "bfloat16"
    config.ray.gpus = 1.0
    return config
