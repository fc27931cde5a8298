"""WMT14 in small: the original archives with a few hundred pairs, and the same pairs elsewhere.

Members have the names and the places of the real archives, beside those of other languages and
tests; the test sets are the same SGML, which is no proper XML.
"""

import gzip
import html
import io
import itertools
import tarfile

from decent_jax.data.translation import number_pairs

_FRENCH = {"ist mehr als": "est plus que", "der Preis beträgt": "le prix est de", "Euro": "euros"}
SIZES = {"europarl": 160, "commoncrawl": 80, "nc": 60, "un": 50, "giga": 70, "dev": 20, "test": 24}


def pairs(part, other="de"):
    """[(English, German or something like French), ...] of a part of ``SIZES``."""
    split = {"dev": "val", "test": "test"}.get(part, "train")
    seed = list(SIZES).index(part)
    found = itertools.islice(number_pairs.sentences(split, seed=seed), SIZES[part])
    found = [(f"{en} & “so on”", f"{de} & „so weiter“") for en, de in found]
    if other == "fr":
        for german, french in _FRENCH.items():
            found = [(en, text.replace(german, french)) for en, text in found]
    return found


def training_pairs(other="de"):
    parts = ["europarl", "commoncrawl", "nc", *(["un", "giga"] if other == "fr" else [])]
    return [pair for part in parts for pair in pairs(part, other)]


def write_archives(folder, other="de", test="test-full"):
    """The archives as they are fetched from statmt.org."""
    folder.mkdir(parents=True)

    def both(part, name):
        english, foreign = (_lines(side) for side in zip(*pairs(part, other), strict=True))
        return {
            name.format(other=other, lang="en"): english,
            name.format(other=other, lang=other): foreign,
        }

    noise = {
        "training/europarl-v7.cs-en.cs": b"jiny\n",
        "training/europarl-v7.cs-en.en": b"other\n",
    }
    _tgz(
        folder / "training-parallel-europarl-v7.tgz",
        noise | both("europarl", "training/europarl-v7.{other}-en.{lang}"),
    )
    _tgz(
        folder / "training-parallel-commoncrawl.tgz",
        both("commoncrawl", "commoncrawl.{other}-en.{lang}")
        | {f"commoncrawl.{other}-en.annotation": b"source\n"},
    )
    _tgz(
        folder / "training-parallel-nc-v9.tgz",
        both("nc", "training/news-commentary-v9.{other}-en.{lang}"),
    )
    if other == "fr":
        _tgz(folder / "training-parallel-un.tgz", both("un", "un/undoc.2000.{other}-en.{lang}"))
        giga = both("giga", "giga-fren.release2.fixed.{lang}.gz")
        giga = {name: gzip.compress(data) for name, data in giga.items()}
        (folder / "training-giga-fren.tar").write_bytes(tar_bytes(giga))
    dev = {f"dev/newstest2012-src.{lang}.sgm": b'<seg id="1">no</seg>' for lang in ("en", other)}
    for lang, side in zip(("en", other), zip(*pairs("dev", other), strict=True), strict=True):
        dev[f"dev/newstest2013.{lang}"] = _lines(side)
        for kind in ("src", "ref"):
            dev[f"dev/newstest2013-{kind}.{lang}.sgm"] = _sgm(side, kind, lang)
    _tgz(folder / "dev.tgz", dev)
    tests = {}
    for lang, side in zip(("en", other), zip(*pairs("test", other), strict=True), strict=True):
        for kind in ("src", "ref"):
            tests[f"{test.removesuffix('-filtered')}/newstest2014-{other}en-{kind}.{lang}.sgm"] = (
                _sgm(side, kind, lang)
            )
    _tgz(folder / f"{test}.tgz", tests)
    return folder


def write_files(folder, other="de", end=".gz"):
    """train.en.gz, train.de.gz, valid.en.gz and so on."""
    folder.mkdir(parents=True)
    splits = {"train": training_pairs(other), "valid": pairs("dev", other)}
    for name, found in (splits | {"test": pairs("test", other)}).items():
        for lang, side in zip(("en", other), zip(*found, strict=True), strict=True):
            data = _lines(side)
            path = folder / f"{name}.{lang}{end}"
            path.write_bytes(gzip.compress(data) if end else data)
    return folder


def write_pairs(prefix, found):
    """PREFIX.en and PREFIX.de."""
    for lang, side in zip(("en", "de"), zip(*found, strict=True), strict=True):
        prefix.with_name(f"{prefix.name}.{lang}").write_bytes(_lines(side))
    return prefix


def _lines(sentences):
    return "".join(f"{sentence}\n" for sentence in sentences).encode()


def _sgm(sentences, kind, lang):
    tag = {"src": "srcset", "ref": "refset"}[kind]
    lines = [f'<{tag} setid="newstest" srclang="any">', '<doc docid="a.b" genre="news">', "<p>"]
    lines += [
        f'<seg id="{i}"> {html.escape(sentence, quote=False)} </seg>'
        for i, sentence in enumerate(sentences, 1)
    ]
    return "\n".join([*lines, "</p>", "</doc>", f"</{tag}>"]).encode() + b"\n"


def _tgz(path, members):
    path.write_bytes(gzip.compress(tar_bytes(members), mtime=0))


def tar_bytes(members):
    """An uncompressed tar file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()
