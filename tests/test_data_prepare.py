"""`decent-jax prepare`: arguments, old folders, kills, publishing, for every kind."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys

import mini_imagenet
import pytest
from several import children_of, nothing_is_left, until

from decent_jax.commands.prepare import KINDS, main
from decent_jax.data import prepared_folder, worker_pool
from decent_jax.data.images import array_records
from decent_jax.data.images import prepare as prepare_images
from decent_jax.data.prepared_folder import Draft, Kind
from decent_jax.data.text import prepare as prepare_text
from decent_jax.data.text import token_folder
from decent_jax.data.translation import number_words, pair_folder
from decent_jax.data.translation import prepare as prepare_translation
from decent_jax.ground.errors import DataError

FOLDERS = {"text": token_folder, "images": array_records, "translation": pair_folder}
MODULES = {"text": prepare_text, "images": prepare_images, "translation": prepare_translation}


def write_input(kind, folder):
    """Something small to prepare, and the kind's other arguments."""
    if kind == "images":
        return [str(mini_imagenet.write_folders(folder)), "--shards", "5"]
    folder.mkdir()
    if kind == "text":
        lines = (json.dumps({"text": f"document {i}"}) + "\n" for i in range(40))
        (folder / "a.jsonl").write_text("".join(lines))
        return [str(folder), "--tokenizer", "bytes", "--val_fraction", "0.3"]
    number_words.write_files(folder, train=120, val=10, test=10, seed=0)
    return [str(folder), "--source_lang", "en", "--target_lang", "de", "--vocab_size", "300"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_whole(folder, kind):
    return prepared_folder.is_whole(folder, FOLDERS[kind].KIND)


# --- arguments and messages -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_arguments(kind, tmp_path, capsys):
    given = [kind, "--input", *write_input(kind, tmp_path / "in"), "--out", str(tmp_path / "out")]
    for arguments in ([kind], [*given, "--nonsense"], [*given, "--overwr"], given[:1] + given[3:]):
        assert main(arguments) == 2
    assert main([*given, "--workers", "0"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"prepare {kind}: workers must be at least 1, got 0"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    with pytest.raises(SystemExit, match="0"):
        main([kind, "--help"])
    said = capsys.readouterr().out
    assert "example, " in said and f"decent-jax prepare {kind} " in said


def test_kinds(capsys):
    for arguments in ([], ["sounds"]):
        assert main(arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "{text,images,translation}" in capsys.readouterr().out


def test_a_command_that_fails_says_one_sentence(tmp_path):
    _, *arguments = write_input("text", tmp_path / "in")
    good = tmp_path / "in/a.jsonl"
    with good.open("a") as file:
        file.write('{"text": "torn\n')
    arguments += ["--out", tmp_path / "out", "--input", good, "--workers", "2"]
    before = sorted(tmp_path.rglob("*"))
    run = subprocess.run(
        [sys.executable, "-m", "decent_jax.commands.prepare", "text", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2 and run.stdout == "", run
    assert sorted(tmp_path.rglob("*")) == before
    assert run.stderr.count("\n") == 1
    assert f"{good}, line 41: not valid JSON (" in run.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_existing_output(kind, tmp_path, capsys):
    given, *more = write_input(kind, tmp_path / "in")
    out = tmp_path / "out"
    arguments = [kind, "--input", given, *more, "--workers", "1", "--out"]
    out.mkdir()  # an empty folder is no obstacle
    assert main([*arguments, str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {out}\n")
    before = contents(out)
    changed = [*arguments, str(out), *{"images": ["--shards", "2"]}.get(kind, [])]
    changed += {"text": ["--seed", "5"], "translation": ["--vocab_size", "310"]}.get(kind, [])
    assert main(changed) == 2
    assert "out: already prepared; pass --overwrite to replace it" in capsys.readouterr().err
    assert contents(out) == before
    assert main([*changed, "--overwrite"]) == 0
    assert contents(out) != before and is_whole(out, kind)
    (out / "manifest.json").write_text("{}")
    assert main([*arguments, str(out), "--overwrite"]) == 2
    assert f"is not empty and is no prepared {kind} folder; choose" in capsys.readouterr().err
    shutil.rmtree(out)
    out.write_text("")
    assert main([*arguments, str(out), "--overwrite"]) == 2
    assert "out: exists and is not a folder; choose another --out" in capsys.readouterr().err
    assert main([*arguments, str(out / "deeper")]) == 2
    assert "out: cannot be written (" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_do_not_change_a_byte(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("decent_jax.data.text.documents.CHUNK_BYTES", 300)
    monkeypatch.setattr("decent_jax.data.translation.sentence_pairs.BLOCK_LINES", 23)
    given, *more = write_input(kind, tmp_path / "in")
    for workers in ("1", "2"):
        out = ["--out", str(tmp_path / workers), "--workers", workers]
        assert main([kind, "--input", given, *more, *out]) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_damaged_manifests(tmp_path):
    kind = Kind("text", "the format")
    path = tmp_path / "manifest.json"
    for content, message in (
        (None, "no manifest.json, .* make one with `decent-jax prepare text`"),
        ("{", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ("[]", "the format is None, expected 'the format'; give a folder that `decent-jax"),
        ('{"format": "other"}', "the format is 'other', expected 'the format'"),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(DataError, match=message):
            prepared_folder.read_manifest(tmp_path, kind)
        assert not prepared_folder.is_whole(tmp_path, kind)


@pytest.mark.parametrize("kind", ["text", "translation"])
def test_a_pipe_that_nobody_writes_into(kind, tmp_path, capsys):
    given, *more = write_input(kind, tmp_path / "in")
    name = {"text": "a.jsonl", "translation": "val.de"}[kind]
    (tmp_path / "in" / name).unlink()
    os.mkfifo(tmp_path / "in" / name)
    pipe = tmp_path / "in" / name
    given = str(pipe) if kind == "text" else given
    assert main([kind, "--input", given, *more, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{pipe}: cannot be read (it is a pipe" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


# --- kills ----------------------------------------------------------------------------------------


# Images take long to check, in whichever process; texts and pairs wait for a file: so a kill always
# hits the middle.
_SLOW = """
import sys, time
from pathlib import Path
from decent_jax.commands import prepare
from decent_jax.data.images import jpeg
from decent_jax.data.text import tokenizers
from decent_jax.data.translation import prepare as translation

HERE = Path(__file__).parent

def slow(data, decode=jpeg.decode):
    time.sleep(0.1)
    return decode(data)

def halted(work):
    def wait(text):
        (HERE / "begun").touch()
        while not (HERE / "go").exists():
            time.sleep(0.02)
        return work(text)
    return wait

jpeg.decode = slow
tokenizers.valid_unicode = halted(tokenizers.valid_unicode)
translation.normalise = halted(translation.normalise)
if __name__ == "__main__":
    sys.exit(prepare.main(sys.argv[1:]))
"""
_KILLS = [("text", signal.SIGKILL), ("translation", signal.SIGINT)]
_KILLS += [("images", signal.SIGKILL), ("images", signal.SIGTERM)]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for orphans in /proc")
@pytest.mark.parametrize("kind, number", _KILLS)
def test_a_killed_run(kind, number, tmp_path):
    """No orphans and no output; the same command works afterwards, from finished shards if any."""
    given, *more = write_input(kind, tmp_path / "in")
    out, unfinished = tmp_path / "out", tmp_path / ".out.unfinished"
    (tmp_path / "slow.py").write_text(_SLOW)
    arguments = [kind, "--input", given, *more, "--out", str(out)]
    command = [sys.executable, str(tmp_path / "slow.py"), *arguments, "--workers", "2"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    if kind == "images":
        until(lambda: len(list(unfinished.glob("*.json"))) >= 2, seconds=60)
    else:
        until((tmp_path / "begun").exists, seconds=60)
    workers = children_of(run)
    assert len(workers) >= 3  # two workers, the resource tracker
    run.send_signal(number)
    (tmp_path / "go").touch()
    said = run.communicate(timeout=60)[1]
    nothing_is_left(workers)
    assert not out.exists()
    drafts = [path for path in tmp_path.iterdir() if path.name.startswith(".out.tmp-")]
    if number == signal.SIGKILL:
        assert run.returncode == -signal.SIGKILL and len(drafts) == (kind != "images")
    else:
        assert run.returncode == 130 and not drafts
        assert said.startswith(f"prepare {kind}: interrupted; ") and said.count("\n") == 1
    finished = [path.name.removesuffix(".json") for path in unfinished.glob("*.json")]
    inodes = {name: (unfinished / name).stat().st_ino for name in finished}
    assert 2 <= len(finished) < 8 if kind == "images" else not finished
    assert main([*arguments, "--workers", "1"]) == 0
    assert {name: (out / name).stat().st_ino for name in finished} == inodes
    assert is_whole(out, kind)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    if kind == "images":
        assert main([kind, "--input", given, *more, "--out", str(tmp_path / "at_once")]) == 0
        assert contents(out) == contents(tmp_path / "at_once")


def _die(*_, **__):
    os._exit(9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_worker_is_no_hang(kind, tmp_path, monkeypatch, capsys):
    work = {"text": "_work", "images": "_make_shard", "translation": "_survey_block"}[kind]
    monkeypatch.setattr(MODULES[kind], work, _die)
    given, *more = write_input(kind, tmp_path / "in")
    out = ["--out", str(tmp_path / "out"), "--workers", "2"]
    assert main([kind, "--input", given, *more, *out]) == 2
    assert "a worker process died, perhaps out of memory; try few" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _fail_at(number, least):
    if number >= least:
        raise DataError(f"bad number {number}")
    return -number


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_errors_through(workers):
    """Tasks are taken `2 * workers` ahead at most."""
    taken = []

    def tasks():
        for number in range(40):
            taken.append(number)
            yield number

    work = functools.partial(_fail_at, least=20)
    seen = []
    with (
        pytest.raises(DataError, match="bad number 20"),
        worker_pool.results(work, tasks(), workers) as results,
    ):
        for number, result in results:
            assert result == -number and len(taken) <= number + 2 * workers
            seen.append(number)
    assert seen == list(range(20)) and len(taken) < 26


# --- publishing -----------------------------------------------------------------------------------

KIND = Kind("text", "anything 1", beside="wanted|other")
MANIFEST = {"format": KIND.format}


def test_a_living_run_is_left_alone(tmp_path):
    out = tmp_path / "out"
    with Draft(out, KIND, overwrite=False) as first, Draft(out, KIND, overwrite=False) as second:
        assert first.folder.exists() and second.folder.exists()
        second.publish(MANIFEST)
        with pytest.raises(DataError, match="already prepared"):
            first.publish(MANIFEST)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["manifest.json"]


def test_a_dead_run_is_removed(tmp_path, monkeypatch):
    draft = Draft(tmp_path / "out", KIND, overwrite=False)
    draft._lock.close()  # as its process's death does
    (tmp_path / ".out.tmp-half").mkdir()
    with Draft(tmp_path / "out", KIND, overwrite=False) as other:
        assert not draft.folder.exists() and other.folder.exists()
        assert (tmp_path / ".out.tmp-half").exists()  # too young to be called dead without a lock
    monkeypatch.setattr(prepared_folder, "_YOUNG_S", -1)
    with Draft(tmp_path / "out", KIND, overwrite=False):
        assert not (tmp_path / ".out.tmp-half").exists()


def test_a_draft_that_is_kept_has_one_owner(tmp_path):
    out = tmp_path / "out"
    with Draft(out, KIND, overwrite=False, resume=True) as draft:
        for name in ("wanted", "other"):
            (draft.folder / name).write_text(name)
        with pytest.raises(DataError, match="out: another run is preparing it now; wait for that"):
            Draft(out, KIND, overwrite=False, resume=True)
    with Draft(out, KIND, overwrite=False, resume=True) as draft:
        draft.keep_only({"wanted"})
        draft.publish(MANIFEST)
    assert {path.name for path in out.iterdir()} == {"manifest.json", "wanted"}
    with Draft(out, KIND, overwrite=True, resume=True) as draft:
        draft.publish(MANIFEST | {"name": "é\udce9"})  # of a file, no UTF-8
    assert prepared_folder.read_manifest(out, KIND)["name"] == "é\udce9"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
