"""Hostile files and numbers through planner, prepare, peers and what overwrites a file.

A row is (name, command, what the sentence names). `FILES` says what is in the folder in which the
command of a row runs: bytes, text, or None for a folder. See `test_hostile` for those of train.py.
"""

import gzip
import json
import os
import shlex

import mini_imagenet
import pytest
from hostile import assert_refused
from refusals import refused

from decent_jax.commands import export
from decent_jax.commands import main as command
from decent_jax.data.translation import number_pairs
from decent_jax.ground import machine
from decent_jax.ground.command_line import check_replaceable

DEEP, NINES = "[" * 100_000, "9" * 5000
CLUSTER = "--network nvlink_25gbe --nodes 2 --devices_per_node 2"
MODEL = "--parameters 1e6 --compute_s 0.1"
STAGES = "--parameters 1e6 --stages 2 --replicas 2 --pipeline_bytes 1e6"
PLANNER = [  # what follows "planner "
    ("network node of a billion", "network --network n.json", "n.json"),
    ("network nodes ragged", "network --network n.json", "n.json"),
    ("network names a number", "network --network n.json", "n.json"),
    ("network names nested", "network --network n.json", "n.json"),
    ("network names escape", "network --network n.json", "n.json"),
    ("network nic", "network --network n.json", "n.json"),
    ("million", f"predict --network nvlink_25gbe --nodes 1000000 {MODEL}", "1000000 devices"),
    ("nodes", f"predict {CLUSTER} {MODEL} --nodes {NINES}", "--nodes"),
    ("parameters", f"predict {CLUSTER} --parameters 1e300 --compute_s 1", "--parameters"),
    ("compute", f"predict {CLUSTER} --parameters 1e6 --compute_s inf", "--compute_s"),
    ("every", f"predict {CLUSTER} {MODEL} --mix_every=-1", "--mix_every"),
    ("every", f"recommend {CLUSTER} {MODEL} --mix_every=-1", "--mix_every"),
    (
        "tokens",
        f"recommend {CLUSTER} {MODEL} --tokens_per_parameter 5e-324",
        "--tokens_per_parameter",
    ),
    ("forever", f"place {CLUSTER} --parameters 1e6 --time_limit_s inf", "--time_limit_s"),
    ("inf", f"place {CLUSTER} {STAGES} --pipeline_bytes inf", "--pipeline_bytes"),
    ("nan", f"place {CLUSTER} {STAGES} --pipeline_bytes nan", "--pipeline_bytes"),
    ("flag", f"predict {CLUSTER} --{NINES}", "--999"),
    ("choice", f"predict {CLUSTER} {MODEL} --wire {NINES}", "--wire"),
    ("speeds text", f"place {CLUSTER} {STAGES} --speeds m.json", "m.json"),
    ("speeds deep", f"place {CLUSTER} {STAGES} --speeds m.json", "m.json"),
    ("speeds nan", f"place {CLUSTER} {STAGES} --speeds m.json", "m.json"),
]
PLANNER += [
    (f"trace {name}", f"predict {CLUSTER} --parameters 1e6 --trace t.jsonl", "t.jsonl")
    for name in ("step a string", "nested", "times strings", "times of ages")
]
TEXT = "text --input in --out out --tokenizer bytes --val_fraction 0.3"
IMAGES = "images --input in --out out --workers 1"
PAIRS = "translation --input in --out out --source_lang en --target_lang de --vocab_size 300"
PREPARE = [  # what follows "prepare "
    ("nothing", "", "kind"),
    ("a long kind", NINES, "kind"),
    ("text", f"{TEXT} --workers 100000", "workers 100000"),
    ("text", f"{TEXT} --workers {NINES}", "--workers"),
    ("text line bomb", TEXT, "a.jsonl.gz 1"),
    ("text bomb", TEXT, "a.txt.gz"),
    ("text many fields", TEXT, "'text' 'f0' --text_field"),
    ("text tokenizer", TEXT.replace("bytes", "t.json"), "t.json"),
    ("text thesis", f"{TEXT} --overwrite", "out/thesis.txt"),
    ("text folder", f"{TEXT} --overwrite", "out/own"),
    ("images thesis", f"{IMAGES} --overwrite", "out/train.txt"),
    ("images pax zero", IMAGES, "img_train.tar"),
    ("images long name", IMAGES, "img_train.tar 1048576"),
    ("images negative size", IMAGES, "img_train.tar"),
    ("pairs", f"{PAIRS} --vocab_size 0", "vocabulary 261"),
    ("pairs line bomb", f"{PAIRS} --workers 1 --val_fraction 0.1", ".gz 1"),
    ("pairs thesis", f"{PAIRS} --overwrite", "out/val.txt"),
]
REPLAY = "replay --workdir run"
PEERS = [  # what follows "peers "
    ("no run", REPLAY, "run peers"),
    ("nothing", "replay", "--workdir"),
    ("count", f"resize --workdir run --count {NINES}", "--count"),
    ("count", "resize --workdir run --count 0", "--count"),
    ("count", "resize --workdir run --count 1000000000", "--count"),
    ("a folder called peers", "resize --workdir run --count 2", "run peers"),
    ("log without start", REPLAY, "events-0.jsonl 1"),
    ("log huge", REPLAY, "events-0.jsonl 1"),
    ("log negative", REPLAY, "events-0.jsonl 1"),
    ("log origin", REPLAY, "events-0.jsonl 1"),
    ("log sides", REPLAY, "events-0.jsonl 2"),
    ("log version", REPLAY, "events-0.jsonl 2"),
    ("log end", REPLAY, "0.0 2000000000"),
    ("config gone", REPLAY, "config.json"),
    ("config wrong", REPLAY, "config.json num_replicas"),
    ("manifest streams", REPLAY, "peers.json"),
    ("manifest peers", REPLAY, "peers.json"),
    ("manifest gone", REPLAY, "peers.json"),
]
ON_PEERS = "train --config quickstart_peers --workdir run"
TRAIN = [
    ("manifest slot", ON_PEERS, "peers.json"),
    ("manifest best", ON_PEERS, "peers.json"),
    ("manifest batch", ON_PEERS, "batch 7"),
]
KEPT = [  # a file of the user's is where a command would write
    (f"planner network {CLUSTER} --save thesis.json", "--save thesis.json"),
    (f"planner place {CLUSTER} --parameters 1e6 --plan thesis.json", "--plan thesis.json"),
    (f"planner predict {CLUSTER} {MODEL} --out thesis.png", "--out thesis.png"),
    ("sweep --config quickstart --over seed=1 --out mine", "mine/table.csv"),
    ("sweep --config quickstart --over seed=1 --out thesis.json", "thesis.json"),
    ("preflight --save thesis.json", "--save thesis.json"),
    ("plot run --out thesis.png", "--out thesis.png"),
    ("export --workdir run --out mine/x.safetensors", "tokenizer.json"),
    ("export --workdir run --out x.safetensors", "config.json"),
    ("export --workdir run --out y.safetensors", "y.safetensors"),
]


def network(**changes):
    ones = [[1e-5] * 3] * 3
    fields = {"latency_s": ones, "bandwidth_bytes_per_s": [[1e9] * 3] * 3}
    return json.dumps({"format": "decent_jax.network/1"} | fields | changes)


def trace(**changes):
    row = {"step": 1, "perf/step_time_s": 0.1}
    return (json.dumps(row | changes) + "\n") * 5


def tar_header(name, size, kind=b"0"):
    header = bytearray(512)
    header[: len(name)], header[124:136], header[156:157] = name, size, kind
    header[100:108] = header[108:116] = header[116:124] = b"0000644\0"
    header[136:148], header[257:265] = b"00000000000\0", b"ustar\x0000"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def tar(pax=None, size=b"00000000004\0", name_bytes=0):
    parts = [tar_header(b"a/0.jpg", b"00000000004\0"), b"jpeg".ljust(512, b"\0")]
    if pax is not None:
        parts += [tar_header(b"pax", b"%011o\0" % len(pax), b"x"), pax.ljust(8192, b"\0")[:8192]]
        parts[-1] = parts[-1][: -(-len(pax) // 512) * 512]
    if name_bytes:
        parts += [tar_header(b"././@LongLink", b"%011o\0" % name_bytes, b"L"), b"a" * name_bytes]
    parts += [tar_header(b"a/1.jpg", size), b"jpeg".ljust(512, b"\0"), bytes(1024)]
    return b"".join(parts)


START = '{"start": 0, "origin": null}\n'
RUN = {
    "run/config.json": '{"task": "language_modeling"}',
    "run/peers.json": json.dumps(
        {"step": 1, "seconds": 1.0, "best": None, "streams": 8, "batch": 8}
        | {"peers": {"0": {"steps": 1, "alive": True}}}
    ),
    "run/peers/0/events-0.jsonl": START + '{"t": 0, "rate": 0}\n{"end": 1, "crc": 5}\n',
}
LOG, MANIFEST = "run/peers/0/events-0.jsonl", "run/peers.json"
FILES = {
    "network node of a billion": {"n.json": network(node=[0, 1, 10**9])},
    "network nodes ragged": {"n.json": network(node=[[0], 1, 2])},
    "network names a number": {"n.json": network(names=5)},
    "network names nested": {"n.json": network(names=["a", "b", ["c"]])},
    "network names escape": {"n.json": network(names=["a", "b", "\x1b[2J"])},
    "network nic": {"n.json": network(nic_bytes_per_s=[1e-300, 1, 1])},
    "speeds text": {"m.json": '["a", "b", "c", "d"]'},
    "speeds deep": {"m.json": DEEP},
    "speeds nan": {"m.json": "[NaN, 1, 1, 1]"},
    "trace step a string": {"t.jsonl": trace(step="a")},
    "trace nested": {"t.jsonl": f"{DEEP}\n{{}}\n"},
    "trace times of ages": {"t.jsonl": trace(**{"perf/step_time_s": 1e300})},
    "trace times strings": {"t.jsonl": trace(**{"perf/step_time_s": "a"})},
    "text line bomb": {"in/a.jsonl.gz": gzip.compress(b"a" * (3 << 19), 1)},
    "text bomb": {"in/a.txt.gz": gzip.compress(b"a" * (4 << 20), 1)},
    "text many fields": {"in/a.jsonl": json.dumps({f"f{k}": 1 for k in range(999)})},
    "text tokenizer": {
        "t.json": '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
        "in/a.txt": "text",
    },
    "text": {"in/a.txt": "text"},
    "images pax zero": {"in/ILSVRC2012_img_train.tar": tar(b"0 path=b\n")},
    "images long name": {"in/ILSVRC2012_img_train.tar": tar(name_bytes=1 << 20)},
    "images negative size": {"in/ILSVRC2012_img_train.tar": tar(size=b"\xff" * 12)},
    "pairs line bomb": {
        f"in/train.{language}.gz": gzip.compress(b"a" * (1 << 20), 1) for language in ("en", "de")
    },
    "log without start": RUN | {LOG: '{"t": 0, "rate": 0}\n{}\n'},
    "log huge": RUN | {LOG: '{"start": 4611686018427387903, "origin": null}\n{}\n'},
    "log negative": RUN | {LOG: '{"start": -5, "origin": null}\n{}\n'},
    "log origin": RUN | {LOG: '{"start": 0, "origin": {"peer": 5}}\n{}\n'},
    "log sides": RUN | {LOG: START + '{"t": 0, "met": "a", "mine": 0, "sides": 5}\n{}'},
    "log version": RUN | {LOG: START + '{"t": 0, "version": "a", "crc": 1}\n{}\n'},
    "log end": RUN | {LOG: START + '{"end": 2000000000, "crc": 1}\n'},
    "config gone": {name: text for name, text in RUN.items() if "config" not in name},
    "config wrong": RUN | {"run/config.json": '{"task": "language_modeling", "num_replicas": []}'},
    "manifest streams": RUN | {MANIFEST: RUN[MANIFEST].replace('"streams": 8', '"streams": 0')},
    "manifest peers": RUN | {MANIFEST: RUN[MANIFEST].replace('"steps": 1', '"steps": -1')},
    "manifest slot": {MANIFEST: RUN[MANIFEST].replace('"0"', f'"{NINES}"')},
    "manifest best": {MANIFEST: RUN[MANIFEST].replace("null", "1" + "0" * 400)},
    "manifest batch": {MANIFEST: RUN[MANIFEST].replace('"batch": 8', '"batch": 7')},
    "manifest gone": {name: text for name, text in RUN.items() if name != MANIFEST},
    "a folder called peers": {"run/peers/thesis.txt": "my thesis"},
    "nothing": {},
    "count": RUN,
    "metrics": {"run/metrics.jsonl": '{"step": 1}\n{"step": 2}\n'},
}
STRANGERS = {
    "text thesis": "out/thesis.txt",
    "text folder": "out/own/",
    "pairs thesis": "out/val.txt",
    "images thesis": "out/train.txt",
}
ROWS = [(name, f"planner {rest}", words) for name, rest, words in PLANNER]
ROWS += [(name, f"prepare {rest}", words) for name, rest, words in PREPARE]
ROWS += [(name, f"peers {rest}", words) for name, rest, words in PEERS]
ROWS += TRAIN
ROWS += [("kept", rest, words) for rest, words in KEPT]


@pytest.fixture
def limits(monkeypatch):
    """A small machine: a bomb of a few megabytes is too much for it."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: 32 << 20)
    monkeypatch.setattr("decent_jax.data.text.documents.LONGEST_LINE", 1 << 18)


@pytest.mark.parametrize(("name", "line", "named"), ROWS, ids=[", ".join(r[:2])[:60] for r in ROWS])
def test_one_sentence(name, line, named, tmp_path, capsys, monkeypatch, limits):
    monkeypatch.chdir(tmp_path)
    write(name, tmp_path)
    assert_refused(command.main, shlex.split(line), named, tmp_path, capsys)


def write(name, folder):
    """What the row ``name`` finds in its folder."""
    files = dict(FILES.get(name, {}))
    if name == "kept":
        files = dict.fromkeys(("thesis.json", "thesis.png"), "my thesis")
        files["y.safetensors"] = '12345678{"__metadata__":{"format":"pt"},"mine":{}}'
        files |= {"mine/table.csv": "my thesis", "mine/tokenizer.json": "{}"}
        files |= {"config.json": '{"mine": 1}', "run/metrics.jsonl": '{"step": 1}\n{"step": 2}\n'}
    if name.startswith("images pax") or name in ("images long name", "images negative size"):
        files["in/ILSVRC2012_img_val.tar"] = tar()
    if name in STRANGERS:
        prepare_something(name.split()[0], folder)
        files[STRANGERS[name]] = "my thesis"
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith("/"):
            (folder / path).mkdir()
        elif isinstance(content, bytes):
            (folder / path).write_bytes(content)
        else:
            (folder / path).write_text(content)


def prepare_something(kind, folder):
    """``in`` and, prepared from it, ``out``."""
    if kind == "images":
        mini_imagenet.write_folders(folder / "in")
    elif kind == "pairs":
        number_pairs.write_files(folder / "in", train=60, val=5, test=5, seed=0)
    else:
        (folder / "in").mkdir()
        lines = (json.dumps({"text": f"document {i}"}) + "\n" for i in range(40))
        (folder / "in/a.jsonl").write_text("".join(lines))
    line = {"text": TEXT, "images": IMAGES, "pairs": PAIRS}[kind]
    assert command.main(["prepare", *shlex.split(line), "--workers", "1"]) == 0


# --- what a command may replace: a file of this package, nothing without an end -------------------


@pytest.mark.parametrize("check", [check_replaceable, lambda path, _: export.export("run", path)])
def test_only_regular_files_are_replaced(check, tmp_path):
    """Opening a pipe that nobody writes into waits for ever; a link to nothing makes a file."""
    pipe, link = tmp_path / "pipe.safetensors", tmp_path / "link.safetensors"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "elsewhere" / "x")
    for path in (pipe, link):
        with refused("--out", path):
            check(path, "--out")


def test_no_export_writes_beside_itself_through_a_link(tmp_path):
    out = tmp_path / "model.safetensors"
    (tmp_path / "config.json").symlink_to(tmp_path / "thesis.json")
    for content in (b"", b'12345678{"__metadata__":{"step":"1","which":"last"}'):
        out.write_bytes(content)
        with refused("--out", out):
            export.export("run", out)
    assert not (tmp_path / "thesis.json").exists()


def test_an_empty_file_makes_what_is_beside_it_nobodys(tmp_path):
    out = tmp_path / "model.safetensors"
    out.touch()
    (tmp_path / "config.json").write_text("mine")
    with refused("--out", out):
        export.export("run", out)
