"""Transformer on WMT14 English-German: the translation task of "From Promise to Practice".

Source: Wang et al., ICLR 2025 (arXiv 2410.11998), Table 2, Figures 6 and 7, and its published
training code. After the colon, in any order and separated by commas:

    base, big                                       the size; published for this pair: base
    accum_adam, decentralized_adam, all_reduce      the algorithm
    8, 16, 32                                       replicas, on nodes of 4; published: 16
    runlocal                                        shrinks everything, and translates number words

All: about 25,000 source and 25,000 target tokens per step, 130,000 steps, linear warm-up over 4,000
and then the inverse square root, dropout and label smoothing 0.1, eps 1e-9, no decay, no clipping.
all_reduce: Adam, peak 7e-4, betas (0.9, 0.98). decentralized_adam: betas (0.974, 0.999), peak 2e-3,
2.8e-3, 3.8e-3 for 8, 16, 32 replicas. accum_adam: betas (0.9, 0.999), windows of n / 2 steps, peak
8e-4 for 8 and 7e-4 for more replicas (32: not published).

The schedule `auto` suits the hosts; `--config.schedule=alternating_exp_ring` is the published one.
Differences from the reference: the validation set is newstest2013, not a part of the training data;
pairs are normalized, filtered and deduplicated; every epoch draws new batches.

Data: the training archives of statmt.org/wmt14, unpacked, and the test sets from sacreBLEU;
docs/translation.md has the commands.
Command (16 GPUs on 4 nodes, one process per GPU, under srun or with config.cluster.*):
    python train.py --config configs/transformer_wmt14_ende.py:base,accum_adam --workdir runs/ende

Hardware and result, as published: 16 workers, BLEU 27.79 for all_reduce, 27.58 for
decentralized_adam, 27.71 for accum_adam, on tokenized text and most likely without a beam, and thus
not comparable with sacreBLEU. Not reproduced by this project yet.
"""

from decent_jax import train

PEAKS = {  # peak learning rates by algorithm and number of replicas
    "accum_adam": {8: 8e-4, 16: 7e-4, 32: 7e-4},
    "all_reduce": {8: 7e-4, 16: 7e-4, 32: 7e-4},
    "decentralized_adam": {8: 2.0e-3, 16: 2.8e-3, 32: 3.8e-3},
}
BETAS = {
    "all_reduce": (0.9, 0.98),
    "decentralized_adam": (0.974, 0.999),
    "accum_adam": (0.9, 0.999),
}


def get_config(arguments: str = "base,accum_adam"):
    size, algorithm, replicas, local = train.chosen(
        arguments, ("base", "big"), [*PEAKS], ("16", "8", "32"), ("", "runlocal")
    )
    n = int(replicas)
    config = train.default_config("translation")
    config.data.path = "data/wmt14_ende"

    config.model.preset = size
    config.model.dropout = 0.1
    config.model.label_smoothing = 0.1
    config.model.dtype = "bfloat16"

    config.num_replicas = n
    config.replicas_per_node = 4
    config.schedule = "auto"  # published: alternating_exp_ring
    config.algorithm = algorithm
    config.optimizer.accum_steps = max(n // 2, 1)

    config.batch_size = 25_600  # source tokens, and as many target tokens: 800 per replica of 32
    config.steps = 130_000
    config.learning_rate = PEAKS[algorithm][n]
    config.lr_schedule.name = "inverse_sqrt"
    config.lr_schedule.warmup = 4000
    config.optimizer.b1, config.optimizer.b2 = BETAS[algorithm]
    config.optimizer.eps = 1e-9
    config.optimizer.weight_decay = 0.0

    config.eval.every = 5000
    config.checkpoint.every = 5000
    config.checkpoint.every_minutes = 30.0
    config.log.every = 50

    if local:
        config.data.update(path="numbers", shapes=2, bleu_sentences=20)
        config.model.update(preset="tiny", dtype="float32")
        config.update(num_replicas=8, replicas_per_node=2, batch_size=2048, steps=40)
        config.optimizer.accum_steps = 4
        config.lr_schedule.warmup = 10
        config.eval.every = 20
        config.log.every = 5
    return config
