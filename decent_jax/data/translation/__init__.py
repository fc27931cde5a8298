"""Sentence pairs: sources, subwords, batches."""

from decent_jax import extras

extras.need("translation", "nltk", "sacrebleu", "sentencepiece")
