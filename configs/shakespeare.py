"""A character-level GPT on the works of Shakespeare, 8 replicas on one machine.

Source: the small example of nanoGPT (char-rnn's tiny Shakespeare, 1.1 MB), here as bytes.
Data, from char-rnn's input.txt cut in two (the last tenth is for validation):
    head -c 1003854 input.txt > train.txt && tail -c +1003855 input.txt > val.txt
    decent-jax prepare text --tokenizer bytes --input train.txt \\
        --val_input val.txt --out data/shakespeare
Command:
    python train.py --config configs/shakespeare.py --workdir runs/shakespeare

Hardware: one machine with a few cores. Expected result: not measured yet.
"""

from decent_jax import train


def get_config():
    config = train.default_config("language_modeling")
    config.data.path = "data/shakespeare"
    config.data.prompt = "ROMEO:"
    config.model.layers = 4
    config.model.heads = 4
    config.model.width = 128
    config.model.context = 128
    config.model.bias = False
    config.model.dropout = 0.1
    config.model.dtype = "float32"

    config.num_replicas = 8
    config.algorithm = "accum_adam"
    config.schedule = "one_peer_exp"
    config.optimizer.window = 4
    config.batch_size = 32
    config.steps = 2000
    config.learning_rate = 3e-3
    config.lr_schedule.warmup = "5%"
    config.optimizer.b2 = 0.98
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip_norm = 1.0

    config.mesh.loop = True  # faster than vmap on a CPU
    config.eval.every = 500
    config.checkpoint.every_minutes = 1.0
    return config
