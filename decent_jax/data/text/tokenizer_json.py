"""Reads the end-of-document token of a tokenizer.json, and adapts the file to whole documents."""

import json
import re

from decent_jax.ground.errors import DataError
from decent_jax.ground.json_files import Json

HF_FILE = "tokenizer.json"
HF_CONFIG = "tokenizer_config.json"
# Names of the end-of-document token in published tokenizers.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
DROPPED = "decent_jax: dropped"
_BYTES = {f"<0x{number:02X}>" for number in range(256)}  # the tokens of `byte_fallback`


def end_token(
    saved: Json, vocabulary: dict[str, int], end: str | int | None, eos: str | None
) -> str:
    """The token that ends a document: the one given as `end`, or the only likely candidate."""
    if end is not None:
        named = [token for token, number in vocabulary.items() if end in (token, number)]
        if not named:
            raise DataError(
                f"{HF_FILE} has no token {end!r}; --end_of_text names one of its tokens"
            )
        return named[0]
    special = [x["content"] for x in saved.get("added_tokens") or [] if x.get("special")]
    candidates = [token for token in _END_OF_TEXT if token in special]
    if eos in vocabulary and (not candidates or eos in candidates):
        return eos
    candidates = candidates or [token for token in _END_OF_TEXT if token in vocabulary]
    if len(candidates) == 1 and eos is None:
        return candidates[0]
    known = f"none of the tokens that end a document: {', '.join(_END_OF_TEXT)}"
    if candidates:
        candidates += [] if eos is None else [f"{eos} of {HF_CONFIG}"]
        known = f"several tokens that may end a document: {', '.join(candidates)}"
    raise DataError(f"{HF_FILE} has {known}; name it by --end_of_text")


def for_documents(saved: Json, end: str, number: int) -> bytes:
    """Changes a tokenizer.json to encode whole documents, so that ids depend only on the text.

    Truncation, padding, post-processing and dropout are turned off. The end-of-document token
    becomes a special token, which is not matched in text. If the model's vocabulary also contains
    it, its spelling in a text is split after the first character. The change is idempotent.
    """
    added = [x for x in saved.get("added_tokens") or [] if x["id"] != number]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added.append({"id": number, "content": end, **flags, "special": True})
    model = saved["model"] | ({"dropout": None} if saved["model"].get("dropout") else {})
    vocabulary = model.get("vocab", ())
    words = vocabulary if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
    before = saved.get("pre_tokenizer")
    if end in words and len(end) > 1:
        first, rest = re.escape(end[0]), re.escape(end[1:])
        pattern = {"Regex": f"{first}(?={rest})"}
        cut = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        steps = [] if before is None else [before]
        if before and before["type"] == "Sequence":
            steps = before["pretokenizers"]
        if cut not in steps:
            before = {"type": "Sequence", "pretokenizers": [*steps, cut]}
    changed = saved | {
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "pre_tokenizer": before,
        "post_processor": None,
        "model": model,
    }
    return json.dumps(changed, ensure_ascii=False).encode()


def showing_what_is_dropped(saved: Json) -> Json | None:
    """Adds a token for the characters that a tokenizer.json drops; returns None if it drops none.

    Byte pair encoding drops characters outside its vocabulary. Their neighbours then merge, so
    the ids around them also differ.
    """
    import tokenizers

    model, bytewise = saved["model"], set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    steps = json.dumps([saved.get("normalizer"), saved.get("pre_tokenizer")])
    if "merges" not in model or model.get("unk_token"):
        return None
    pieces = set(model["vocab"])
    # With a prefix or suffix, a vocabulary may have a byte for only one position in a word.
    placed = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    whole = '"ByteLevel"' in steps and not placed and bytewise <= pieces
    if whole or (model.get("byte_fallback") and pieces >= _BYTES):
        return None
    vocabulary = model["vocab"] | {DROPPED: max(model["vocab"].values(), default=-1) + 1}
    return saved | {"model": model | {"vocab": vocabulary, "unk_token": DROPPED}}
