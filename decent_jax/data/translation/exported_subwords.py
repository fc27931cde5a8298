"""A vocabulary of subwords as a ``tokenizer.json`` of Hugging Face.

The library `tokenizers`, and so `transformers.AutoTokenizer`, makes of it the ids of
`Subwords.encode`: the same spelling first, then the same merges, which sentencepiece keeps as the
order of its pieces.
"""

import json
import sys

from decent_jax.data.translation.subwords import REMOVED, SAME, SPECIAL, Subwords

_SPACE = "\u2581"  # sentencepiece's sign for a space


def hf_files(vocabulary: Subwords, longest: int) -> dict[str, bytes]:
    """File name -> content. Sources end without a special token, as in training.

    Args:
      vocabulary: of both languages.
      longest: tokens that a sentence may have.
    """
    pieces = vocabulary.pieces()
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), pieces, strict=False))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": longest,
        "model_input_names": ["input_ids", "attention_mask"],
        "split_special_tokens": True,  # "</s>" in a text is text
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(_tokenizer(pieces), ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(about, indent=2).encode(),
    }


def _tokenizer(pieces: list[str]) -> dict:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": pieces[i], **plain, "special": True} for i in SPECIAL
        ],
        "normalizer": {"type": "Sequence", "normalizers": _spelling()},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                _replace({"String": _SPACE}, " "),
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": pieces[SPECIAL[1]],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": _merges(pieces),
        },
    }


def _spelling() -> list[dict]:
    """`subwords.normalise`, and sentencepiece's signs for spaces."""
    same = [_replace({"Regex": _one_of(others)}, plain) for plain, others in SAME.items()]
    same.append(_replace({"Regex": _one_of(REMOVED)}, ""))
    white = "".join(filter(str.isspace, map(chr, range(sys.maxunicode + 1))))
    return [
        *same,
        {"type": "NFKC"},
        *same,
        _replace({"String": "''"}, '"'),
        _replace({"Regex": _one_of(white) + "+"}, " "),
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Prepend", "prepend": _SPACE},
        _replace({"String": " "}, _SPACE),
    ]


def _replace(pattern: dict[str, str], content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _one_of(characters: str) -> str:
    """A class of a regular expression; ``-`` between two characters is a range of them."""
    escaped = (c if c == "-" else f"\\x{{{ord(c):x}}}" for c in characters)
    return f"[{''.join(escaped)}]"


def _merges(pieces: list[str]) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to another, the earliest piece first."""
    known = set(pieces[len(SPECIAL) :])
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces[len(SPECIAL) :]
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
