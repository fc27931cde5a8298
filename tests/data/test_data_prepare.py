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
import work
from refusals import refuses
from several import children_of, nothing_is_left, until

from decent_jax.commands.prepare import KINDS, main
from decent_jax.data import prepared_folder, worker_pool
from decent_jax.data.images import array_records, prepare_images
from decent_jax.data.prepared_folder import Draft, Kind
from decent_jax.data.text import prepare_text, token_folder
from decent_jax.data.translation import number_pairs, pair_folder, prepare_translation
from decent_jax.ground.errors import DataError

FOLDERS = {"text": token_folder, "images": array_records, "translation": pair_folder}
MODULES = {"text": prepare_text, "images": prepare_images, "translation": prepare_translation}


def write_input(kind, folder):
    """Something small to prepare, and the kind's other arguments."""
    if kind == "images":
        return [str(mini_imagenet.write_folders(folder))]
    folder.mkdir()
    if kind == "text":
        lines = (json.dumps({"text": f"document {i}"}) + "\n" for i in range(40))
        (folder / "a.jsonl").write_text("".join(lines))
        return [str(folder), "--tokenizer", "bytes", "--val_fraction", "0.3"]
    number_pairs.write_files(folder, train=120, val=10, test=10, seed=0)
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
    assert error.startswith("decent-jax prepare: workers") and error.endswith("got 0")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("kind", KINDS)
def test_existing_output(kind, tmp_path, capsys):
    given, *more = write_input(kind, tmp_path / "in")
    out = tmp_path / "out"
    arguments = [kind, "--input", given, *more, "--workers", "1", "--out"]
    out.mkdir()  # an empty folder is no obstacle
    assert main([*arguments, str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {out}\n")
    before = contents(out)
    changed = [*arguments, str(out)]
    changed += {"text": ["--val_fraction", "0.1"], "translation": ["--vocab_size", "310"]}.get(
        kind, []
    )
    if kind == "images":
        next((tmp_path / "in/train").glob("*/*")).unlink()
    assert main(changed) == 2
    assert "out: already prepared; pass --overwrite to replace it" in capsys.readouterr().err
    assert contents(out) == before
    assert main([*changed, "--overwrite"]) == 0
    assert contents(out) != before and is_whole(out, kind)
    (out / "manifest.json").write_text("{}")
    assert main([*arguments, str(out), "--overwrite"]) == 2
    assert f"is not a prepared {kind} folder" in capsys.readouterr().err
    shutil.rmtree(out)
    out.write_text("")
    assert main([*arguments, str(out), "--overwrite"]) == 2
    assert "out: exists and is not a folder" in capsys.readouterr().err
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


# --- kills ----------------------------------------------------------------------------------------


# The work on the first text, pair or image waits for a file, so a kill always hits the middle.
_SLOW = """
import sys, time
from pathlib import Path
from decent_jax.commands import prepare
from decent_jax.data.images import jpeg
from decent_jax.data.text import tokenizers

HERE = Path(__file__).parent

def halted(work):
    def wait(given):
        (HERE / "begun").touch()
        while not (HERE / "go").exists():
            time.sleep(0.02)
        return work(given)
    return wait

jpeg.decode = halted(jpeg.decode)
tokenizers.valid_unicode = halted(tokenizers.valid_unicode)
if __name__ == "__main__":
    sys.exit(prepare.main(sys.argv[1:]))
"""
_KILLS = [("text", signal.SIGKILL), ("images", signal.SIGTERM), ("text", signal.SIGHUP)]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for orphans in /proc")
@pytest.mark.parametrize("kind, number", _KILLS)
def test_a_killed_run(kind, number, tmp_path):
    """No orphans and no output; the same command works afterwards."""
    given, *more = write_input(kind, tmp_path / "in")
    out = tmp_path / "out"
    (tmp_path / "slow.py").write_text(_SLOW)
    arguments = [kind, "--input", given, *more, "--out", str(out)]
    command = [sys.executable, str(tmp_path / "slow.py"), *arguments, "--workers", "2"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until((tmp_path / "begun").exists, seconds=60)
    workers = children_of(run)
    assert len(workers) >= 3  # two workers, the resource tracker
    if number == signal.SIGHUP:  # the terminal of all is closed
        os.killpg(run.pid, number)
    else:
        run.send_signal(number)
    (tmp_path / "go").touch()
    said = run.communicate(timeout=60)[1]
    nothing_is_left(workers)
    assert not out.exists()
    drafts = [path for path in tmp_path.iterdir() if path.name.startswith(".out.tmp-")]
    if number == signal.SIGKILL:
        assert run.returncode == -signal.SIGKILL and len(drafts) == 1
    else:
        assert run.returncode == 130 and not drafts
        assert said.startswith("decent-jax prepare: interrupted; ") and said.count("\n") == 1
    assert main([*arguments, "--workers", "1"]) == 0
    assert is_whole(out, kind)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_worker_is_no_hang(kind, tmp_path, monkeypatch, capsys):
    name = {"text": "_encode", "images": "_check", "translation": "_survey_lines"}[kind]
    monkeypatch.setattr(MODULES[kind], name, work.die)
    given, *more = write_input(kind, tmp_path / "in")
    out = ["--out", str(tmp_path / "out"), "--workers", "2"]
    assert main([kind, "--input", given, *more, *out]) == 2
    assert "a worker process died, perhaps out of memory; try few" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_errors_through(workers):
    """Tasks are taken `2 * workers` ahead at most."""
    taken = []

    def tasks():
        for number in range(40):
            taken.append(number)
            yield number

    negate = functools.partial(work.negate_below, least=20)
    seen = []
    with (
        refuses("bad number 20", error=DataError),
        worker_pool.results(negate, tasks(), workers) as results,
    ):
        for number, result in results:
            assert result == -number and len(taken) <= number + 2 * workers
            seen.append(number)
    assert seen == list(range(20)) and len(taken) < 26


LEFT = """
from multiprocessing import shared_memory
from decent_jax.data import worker_pool
with worker_pool.deaf_to_signals():
    pass
print(shared_memory.SharedMemory(create=True, size=8).name)
"""


def test_shared_memory_that_a_stopped_reader_left_is_removed_without_a_word():
    """As a batch is that it was writing; multiprocessing's tracker removes it, and would warn."""
    ran = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=True)
    assert not ran.stderr
    if os.path.isdir("/dev/shm"):
        assert not os.path.exists(f"/dev/shm/{ran.stdout.strip()}")


# --- publishing -----------------------------------------------------------------------------------

KIND = Kind("text", "anything 1")


def test_a_living_run_is_left_alone(tmp_path):
    out = tmp_path / "out"
    with Draft(out, KIND, overwrite=False) as first, Draft(out, KIND, overwrite=False) as second:
        assert first.folder.exists() and second.folder.exists()
        second.publish({})
        with refuses(out, error=DataError):
            first.publish({})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["manifest.json"]


def test_a_dead_run_is_removed(tmp_path):
    draft = Draft(tmp_path / "out", KIND, overwrite=False)
    draft._lock.close()  # as its process's death does
    half = tmp_path / ".out.tmp-0123456789ab"
    half.mkdir()
    (tmp_path / ".out.tmp-mine").mkdir()
    with Draft(tmp_path / "out", KIND, overwrite=False) as other:
        assert not draft.folder.exists() and other.folder.exists()
        assert not half.exists()  # a draft without a lock is half removed
    assert [path.name for path in tmp_path.iterdir()] == [".out.tmp-mine"]


def test_only_what_its_manifest_names_is_replaced(tmp_path):
    out = tmp_path / "out"
    with Draft(out, KIND, overwrite=False) as draft:
        draft.append("wanted", b"1")
        draft.publish({"name": "é\udce9"})  # of a file, no UTF-8
    assert prepared_folder.read_manifest(out, KIND)["name"] == "é\udce9"
    (out / "thesis.txt").touch()
    with refuses("thesis", error=DataError):
        Draft(out, KIND, overwrite=True)
    (out / "thesis.txt").unlink()
    with Draft(out, KIND, overwrite=True) as draft:
        draft.append("other", b"2")
        draft.publish({})
    assert {path.name for path in out.iterdir()} == {"manifest.json", "other"}
    (out / "manifest.json").write_text(json.dumps({"format": KIND.format, "files": 5}))
    with refuses("manifest", error=DataError):
        Draft(out, KIND, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
