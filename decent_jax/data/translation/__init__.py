"""Sentence pairs: sources, subwords, batches."""

from decent_jax.ground import extras

extras.need("translation", "num2words", "sacrebleu", "sentencepiece")
