"""prepare_images end to end: the same bytes for any workers, broken images, messages, and kills."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import mini_imagenet as mini
import numpy as np
import pytest

from decent_jax.data import image_files, image_shards, jpeg, prepare_images
from decent_jax.data.prepare_images import main, prepare
from decent_jax.data.prepared_folder import sha256_file
from decent_jax.errors import DataError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return mini.write_folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
def prepared(folders, tmp_path_factory):
    """Five shards of train and three of val."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare(folders, out, shards=5, workers=1)
    return out


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def records(out, split):
    source = image_files.open_images(out, split)
    return [source[i] for i in range(len(source))]


def test_manifest_and_records(tmp_path, folders):
    manifest = prepare(folders, tmp_path / "out", shards=4, workers=1)
    assert manifest == json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["class_names"] == list(mini.WNIDS)
    names = {"manifest.json", "bad_files.jsonl"}
    for split, count in (("train", 4), ("val", 2)):
        entry = manifest["splits"][split]
        assert entry["records"] == len(mini.images()[split]) and entry["bad"] == 0
        assert entry["class_counts"] == [entry["records"] // 5] * 5
        assert [s["file"] for s in entry["shards"]] == [
            f"{split}-{i:05}-of-{count:05}.array_record" for i in range(count)
        ]
        for shard in entry["shards"]:
            path = tmp_path / "out" / shard["file"]
            assert shard["bytes"] == path.stat().st_size
            assert shard["sha256"] == sha256_file(path)
        names |= {shard["file"] for shard in entry["shards"]}
        assert records(tmp_path / "out", split) == mini.records(split)
    assert manifest["total"]["records"] == 45 and manifest["total"]["bad"] == 0
    assert set(contents(tmp_path / "out")) == names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_record():
    record = image_shards.pack_record(b"image", 258, "é")
    assert record == b"\x02\x01\x00\x00" + b"\x02\x00" + b"\xc3\xa9" + b"image"
    assert image_shards.unpack_record(record) == (b"image", 258, "é")


def test_workers_and_layouts_do_not_change_a_byte(tmp_path, folders, prepared):
    prepare(folders, tmp_path / "two", shards=5, workers=2)
    prepare(mini.write_archives(tmp_path / "in"), tmp_path / "tar", shards=5, workers=1)
    assert contents(prepared) == contents(tmp_path / "two") == contents(tmp_path / "tar")


def test_how_many_shards(folders, monkeypatch):
    images = {split: image_files.open_images(folders, split) for split in ("train", "val")}

    def counts(shards=None):
        tasks = prepare_images._tasks(images, shards)
        for split, files in images.items():
            indices = [i for t in tasks if t.split == split for i in range(t.start, t.stop)]
            assert indices == list(range(len(files)))
        return [sum(task.split == split for task in tasks) for split in images]

    assert counts() == [1, 1]
    assert counts(shards=4) == [4, 2]
    assert counts(shards=99) == [30, 15]  # an image each
    monkeypatch.setattr(prepare_images, "_FEW_IMAGES", 3)
    assert counts() == [10, 5]
    monkeypatch.setattr(prepare_images, "_SHARD_BYTES", 1200)  # about two images
    assert 10 < counts()[0] < 30


def break_images(path, names):
    """The first is empty, the second is text, all others are cut in the middle."""
    mini.write_folders(path)
    for number, name in enumerate(names):
        data = (path / name).read_bytes()
        (path / name).write_bytes({0: b"", 1: b"no image"}.get(number, data[: len(data) // 2]))
    return path


def test_broken_images_are_left_out(tmp_path, capsys):
    bad = [mini.records("train")[i][2] for i in (5, 6, 20)] + [mini.records("val")[3][2]]
    path = break_images(tmp_path / "in", bad)
    out = tmp_path / "out"
    arguments = ["--input", str(path), "--out", str(out), "--workers", "2", "--shards", "3"]
    assert main([*arguments, "--max_bad", "0.1"]) == 0
    assert (
        "train           27 images          0.4 MB, 3 broken left out\n" in capsys.readouterr().out
    )
    lines = [json.loads(line) for line in (out / "bad_files.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == bad
    assert [line["reason"] for line in lines][:2] == ["is empty", "is no image"]
    assert all(line["reason"].startswith("cannot be decoded") for line in lines[2:])
    manifest = image_shards.read_manifest(out)
    assert [manifest["splits"][split]["bad"] for split in ("train", "val")] == [3, 1]
    assert manifest["total"]["bad"] == 4
    for split in ("train", "val"):
        wanted = [record for record in mini.records(split) if record[2] not in bad]
        assert records(out, split) == wanted
        labels = image_files.open_images(out, split).labels
        assert labels.tolist() == [label for _, label, _ in wanted]


@pytest.mark.parametrize("workers", [1, 2])
def test_too_many_broken_images(tmp_path, workers):
    bad = [mini.records("train")[i][2] for i in (1, 2, 3, 4)]
    path = break_images(tmp_path / "in", bad)
    out = tmp_path / "out"
    with pytest.raises(DataError) as error:
        prepare(path, out, shards=1, workers=workers, max_bad=0.08)
    said = str(error.value)
    assert said.startswith(
        f"at least 4 of 45 images are broken, more than the share 0.08 that --max_bad allows"
        f" ({bad[0]} is empty; {bad[1]} is no image; {bad[2]} cannot be decoded"
    )
    assert bad[3] not in said and said.endswith("; fetch them again or allow more")
    assert not out.exists()
    assert not (tmp_path / ".out.unfinished/manifest.json").exists()
    prepare(path, out, shards=1, workers=1, max_bad=0.1)
    assert len(records(out, "train")) == 26


def test_a_split_without_a_whole_image(tmp_path):
    path = mini.write_folders(tmp_path / "in")
    for file in (path / "val").glob("*/*"):
        file.write_bytes(b"")
    with pytest.raises(DataError, match="none of the 15 images of 'val' is whole"):
        prepare(path, tmp_path / "out", workers=1, max_bad=0.5)
    assert not (tmp_path / "out").exists()


def test_bad_arguments(tmp_path, folders, capsys):
    out = ["--out", str(tmp_path / "out")]
    given = ["--input", str(folders), *out]
    prepared = tmp_path / "prepared"
    prepare(folders, prepared, workers=1)
    tfds_folder = mini.write_tfds(tmp_path / "tfds")
    cases = {
        "shards must be at least 1, got 0": [*given, "--shards", "0"],
        "workers must be at least 1, got 0": [*given, "--workers", "0"],
        "max_bad must be at least 0 and less than 1, got 1.0": [*given, "--max_bad", "1"],
        "/nowhere: no such folder; give the folder": ["--input", "/nowhere", *out],
        "is a prepared folder already, which training reads": ["--input", str(prepared), *out],
        "is a TFDS folder already, which training reads": ["--input", str(tfds_folder), *out],
    }
    for sentence, arguments in cases.items():
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("prepare_images: ") and sentence in said and said.count("\n") == 1
    assert not list(tmp_path.glob(".*"))
    for arguments in ([], [*given, "--nonsense"], [*given, "--shards", "many"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "example, ImageNet from the original archives:" in capsys.readouterr().out


def test_existing_output(tmp_path, folders, capsys):
    out = tmp_path / "out"
    arguments = ["--input", str(folders), "--out", str(out), "--workers", "1"]
    out.mkdir()  # empty: as good as none
    assert main(arguments) == 0
    before = contents(out)
    assert main([*arguments, "--shards", "2"]) == 2
    assert "out: already prepared; pass --overwrite to replace it" in capsys.readouterr().err
    assert contents(out) == before
    assert main([*arguments, "--shards", "2", "--overwrite"]) == 0
    assert len(contents(out)) == 5 and records(out, "train") == mini.records("train")
    (out / "manifest.json").write_text("{}")
    assert main([*arguments, "--overwrite"]) == 2
    assert "is not empty and is no prepared image folder; choose" in capsys.readouterr().err
    shutil.rmtree(out)
    out.write_text("")
    assert main([*arguments, "--overwrite"]) == 2
    assert "out: exists and is not a folder; choose another --out" in capsys.readouterr().err
    assert main(["--input", str(folders), "--out", str(out / "deeper")]) == 2
    assert "out: cannot be written (" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_failed_overwrite_keeps_the_old(tmp_path):
    path = mini.write_folders(tmp_path / "in")
    prepare(path, tmp_path / "out", workers=1)
    before = contents(tmp_path / "out")
    break_images(path, [record[2] for record in mini.records("train")[:5]])
    with pytest.raises(DataError, match="are broken"):
        prepare(path, tmp_path / "out", workers=1, overwrite=True)
    assert contents(tmp_path / "out") == before


def test_a_full_disk(tmp_path, folders, monkeypatch, capsys):
    class Full:
        def __init__(self, path, options):
            self.close = lambda: None

        def write(self, record):
            raise RuntimeError("write() failed: No space left on device; writing x; at byte 0")

    monkeypatch.setattr(prepare_images, "ArrayRecordWriter", Full)
    out = tmp_path / "out"
    assert main(["--input", str(folders), "--out", str(out), "--workers", "1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("cannot be written (write() failed: No space left on device)")
    assert not out.exists()


# --- going on after a kill ---


def _children(pid):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry))
    return found


def _wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


# Each image takes long, in whichever process, so that a kill hits the middle.
_SLOW = """
import sys, time
from decent_jax.data import jpeg, prepare_images
check = jpeg.check
def slow(data):
    time.sleep(0.1)
    check(data)
jpeg.check = slow
if __name__ == "__main__":
    sys.exit(prepare_images.main(sys.argv[1:]))
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for orphans in /proc")
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_run_goes_on(tmp_path, folders, prepared, kind):
    out, unfinished = tmp_path / "out", tmp_path / ".out.unfinished"
    (tmp_path / "slow.py").write_text(_SLOW)
    arguments = ["--input", str(folders), "--out", str(out), "--shards", "5"]
    command = [sys.executable, str(tmp_path / "slow.py"), *arguments, "--workers", "2"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    _wait_for(lambda: len(list(unfinished.glob("*.json"))) >= 2)
    workers = _children(run.pid)
    assert len(workers) >= 2
    run.send_signal(kind)
    said = run.communicate(timeout=60)[1]
    _wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))
    if kind == signal.SIGKILL:
        assert run.returncode == -signal.SIGKILL
    else:
        assert run.returncode == 130
        assert said == (
            "prepare_images: interrupted; the same command goes on after the finished shards\n"
        )
    assert not out.exists()
    finished = {path.name.removesuffix(".json") for path in unfinished.glob("*.json")}
    assert 2 <= len(finished) < 8
    inodes = {name: (unfinished / name).stat().st_ino for name in finished}
    times = {name: (unfinished / name).stat().st_mtime_ns for name in finished}
    assert main([*arguments, "--workers", "1"]) == 0
    for name in finished:
        status = (out / name).stat()
        assert (status.st_ino, status.st_mtime_ns) == (inodes[name], times[name])
    assert contents(out) == contents(prepared)
    assert not list(tmp_path.glob(".*"))


@pytest.fixture
def checked(monkeypatch):
    """The images that were decoded."""
    seen = []
    check = jpeg.check

    def counting(data):
        seen.append(data)
        check(data)

    monkeypatch.setattr(jpeg, "check", counting)
    return seen


def stop_half_way(path, out, monkeypatch):
    """Leaves two shards of train finished, of five of six images each."""
    make = prepare_images._make_shard

    def stopping(task, **keywords):
        if task.shard == 2:
            raise KeyboardInterrupt
        return make(task, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_images, "_make_shard", stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare(path, out, shards=5, workers=1)
    assert len(list(out.with_name(f".{out.name}.unfinished").glob("*.json"))) == 2


def test_finished_shards_are_not_made_again(tmp_path, folders, prepared, checked, monkeypatch):
    stop_half_way(folders, tmp_path / "out", monkeypatch)
    assert len(checked) == 12
    prepare(folders, tmp_path / "out", shards=5, workers=1)
    assert len(checked) == 45
    assert contents(tmp_path / "out") == contents(prepared)


CHANGES = ("touched", "renamed", "shard", "sidecar", "half a sidecar", "count")


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_is_made_again(tmp_path, checked, monkeypatch, what):
    path = mini.write_folders(tmp_path / "in")
    stop_half_way(path, tmp_path / "out", monkeypatch)
    shard = tmp_path / ".out.unfinished/train-00001-of-00005.array_record"
    image = path / mini.records("train")[8][2]
    again, shards = 6, 5
    if what == "touched":
        os.utime(image, ns=(1, 1))
    elif what == "renamed":
        image.rename(image.with_name(image.name.replace(".JPEG", "x.JPEG")))
    elif what == "shard":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif what == "sidecar":
        image_shards.sidecar_of(shard).unlink()
    elif what == "half a sidecar":
        image_shards.sidecar_of(shard).write_text('{"key"')
    else:
        again, shards = 12, 3
    checked.clear()
    prepare(path, tmp_path / "out", shards=shards, workers=1)
    assert len(checked) == 33 + again
    for split in ("train", "val"):
        assert records(tmp_path / "out", split) == records(path, split)
    assert len(list((tmp_path / "out").glob("train-*"))) == shards


def test_only_one_run_at_a_time(tmp_path, folders):
    out = tmp_path / "out"
    with (
        image_shards.unfinished_folder(out),
        pytest.raises(DataError, match="out: another run is preparing it now; wait for that one"),
    ):
        prepare(folders, out, workers=1)
    prepare(folders, out, workers=1)


def _die(task):
    os._exit(9)


def test_a_dead_worker_is_no_hang(tmp_path, folders, monkeypatch):
    monkeypatch.setattr(prepare_images, "_make_in_worker", _die)
    with pytest.raises(DataError, match="a worker process died, perhaps out of memory; try fewer"):
        prepare(folders, tmp_path / "out", shards=3, workers=2)
    assert not (tmp_path / "out").exists()


def test_an_error_in_a_worker_is_one_sentence(tmp_path, capsys):
    path = mini.write_archives(tmp_path / "in")
    images = image_files.open_images(path, "val")
    archive = path / "ILSVRC2012_img_val.tar"
    archive.write_bytes(archive.read_bytes()[:4000])
    task = prepare_images._Task("val", 0, 1, 0, len(images))
    with (
        pytest.raises(DataError, match=r"img_val\.tar: is cut short, val/.* cannot be read"),
        prepare_images._results([task], {"val": images}, tmp_path, 2) as results,
    ):
        list(results)


def test_the_sample_of_sizes_covers_all():
    class Files:
        def __len__(self):
            return 5000

        def stamp(self, index):
            return image_files.FileStamp(size=int(index), mtime_ns=0)

    assert prepare_images._bytes(Files()) == pytest.approx(np.sum(np.arange(5000)), rel=1e-3)
