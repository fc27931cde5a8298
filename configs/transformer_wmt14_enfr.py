"""Transformer on WMT14 English-French; configs/transformer_wmt14_ende.py explains the arguments.

Source: the same paper and code; published for this pair: big, 16 workers.

Data: as for German, in docs/translation.md, plus the pairs undoc.2000.fr-en and
giga-fren.release2.fixed, and with --vocab_size 32000.
Command (16 GPUs on 4 nodes, one process per GPU, under srun or with config.cluster.*):
    python train.py --config configs/transformer_wmt14_enfr.py:big,accum_adam --workdir runs/enfr

Hardware and result, as published: 16 workers, BLEU 45.70 for all_reduce, 45.60 for
decentralized_adam, 46.05 for accum_adam, on tokenized text and most likely without a beam, and thus
not comparable with sacreBLEU. The number of steps is not published; 302,600 steps are five epochs,
as in the published code. Not reproduced by this project yet.
"""

from pathlib import Path

from decent_jax.train import flags


def get_config(arguments: str = "big,accum_adam"):
    if not {"base", "big"} & set(arguments.split(",")):
        arguments = f"big,{arguments}"
    config = flags.load(f"{Path(__file__).with_name('transformer_wmt14_ende.py')}:{arguments}")
    if config.data.path != "numbers":
        config.data.path = "data/wmt14_enfr"
        config.steps = 302_600
    return config
