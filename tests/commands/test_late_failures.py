"""Every command with input that fails late: an exit code, and one sentence as its last line.

"Late" is after the arguments were accepted. Whoever raises, and of whatever kind: nothing leaves a
command as a traceback. test_hostile has input that is refused at once.
"""

import io
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import damage
import pytest
import raising_task
import small_runs
import tiny

from decent_jax.checkpoints import on_disk
from decent_jax.commands import main as command
from decent_jax.ground import errors, json_files
from decent_jax.plots import runs as plot

pytestmark = pytest.mark.usefixtures("compile_once")
CLUSTER = "--network nvlink_25gbe --nodes 2 --devices_per_node 2"
MODEL = "--parameters 1e6 --compute_s 0.1"
PREPARE = "prepare text --input in --out out --tokenizer bytes --val_fraction 0.3"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_data, compile_once):
    """Finished runs of two steps: ``text`` has a sample, ``line`` a task of a user's."""
    folder = tmp_path_factory.mktemp("runs")
    data = shutil.copytree(tiny_data, folder / "data")
    tiny.run(tiny.config(data, num_replicas=2, steps=2, eval={"every": 1}), folder / "text")
    tiny.run(small_runs.config("raising_task", steps=2), folder / "line")
    return folder


@pytest.fixture
def here(runs, tmp_path, monkeypatch):
    """A copy of them, where commands run."""
    for path in runs.iterdir():
        shutil.copytree(path, tmp_path / path.name)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text(
        "".join(f'{{"text": "document {i}"}}\n' for i in range(40))
    )
    config = (tmp_path / "text/config.json").read_text()
    (tmp_path / "text/config.json").write_text(config.replace(str(runs), str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plot, "plot_runs", lambda paths: None)
    return tmp_path


def last_line(line, codes, capfd):
    """What the command says last; it must have one of these exit codes, and no traceback."""
    try:
        code = command.main(shlex.split(line))
    except SystemExit as end:
        code = end.code
    said = capfd.readouterr()
    assert code in codes and "Traceback" not in said.err + said.out, (code, said.err[-2000:])
    last = [words for words in said.err.splitlines() if words.strip()][-1]
    assert last.startswith(f"decent-jax {line.split()[0]}: ") and len(last) < 700, last
    assert last.isprintable()
    return last


# --- Damage ---------------------------------------------------------------------------------------


def all_steps(change):
    def damages(run):
        for path in [*run.glob("checkpoints/[0-9]*"), *run.glob("best/[0-9]*")]:
            change(path)

    return damages


def write(name, text):
    return lambda run: (run / name).write_text(text)


DAMAGE = {
    "bits": all_steps(damage.flip_bits),
    "cut": all_steps(damage.cut_short),
    "no arrays": all_steps(lambda step: shutil.rmtree(step / "state")),
    "no meta": all_steps(lambda step: (step / "meta.json").unlink()),
    "no checkpoint": lambda run: shutil.rmtree(run / "checkpoints"),
    "config of another": lambda run: shutil.copy("line/config.json", run / "config.json"),
    "config cut": lambda run: write("config.json", (run / "config.json").read_text()[:90])(run),
    "config empty": write("config.json", ""),
    "config of numbers": write("config.json", "3"),
    "no data": lambda run: shutil.rmtree("data"),
    "manifest": lambda run: Path("data/manifest.json").write_text("[]"),
    "tokens": lambda run: Path("data/train.bin").write_bytes(b"\xff" * 7),
    "metrics": write("metrics.jsonl", "[]\n{\n"),
    "metrics is a folder": lambda run: (
        (run / "metrics.jsonl").unlink(),
        (run / "metrics.jsonl").mkdir(),
    ),
}
READ = ("sample --workdir text", "export --workdir text --out m.safetensors", "plot text")
READ += ("status text", "translate --workdir text", "train --config config.py --workdir text")
FINE = {  # what a command does not read
    "sample": ("metrics", "metrics is a folder", "tokens", "cut"),
    "export": ("metrics", "metrics is a folder", "tokens", "cut"),
    "translate": (),
}


@pytest.mark.parametrize("line", READ)
@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder(case, line, here, capfd, monkeypatch):
    config = tiny.config(here / "data", num_replicas=2, steps=4, eval={"every": 1})
    tiny.write(config, here / "config.py")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n")))
    DAMAGE[case](here / "text")
    name = line.split()[0]
    if name in ("plot", "status") or case in FINE.get(name, ()) or (name, case) in CONTINUES:
        code = command.main(shlex.split(line))  # may have nothing to say of this damage
        assert code in (0, 1, 2) and "Traceback" not in capfd.readouterr().err
    else:
        last_line(line, (1, 2), capfd)


# Of these a run begins anew, or takes the checkpoint that is left.
CONTINUES = {("train", "no checkpoint"), ("train", "tokens")}


# --- Files that cannot be written or read ---------------------------------------------------------

WRITES = {
    "export": "export --workdir text --out m.safetensors",
    "plot": "plot text --out p.png",
    "train": "train --config config.py --workdir new",
    "prepare": PREPARE,
    "planner": f"planner network {CLUSTER} --save n.json",
    "peers": "peers resize --workdir peers --count 3",
}


@pytest.mark.parametrize("name", WRITES)
def test_a_full_disk(name, here, capfd, monkeypatch):
    tiny.write(small_runs.config("raising_task", steps=2), here / "config.py")
    (here / "peers/peers").mkdir(parents=True)
    (here / "peers/config.json").write_text("{}")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if name == "plot":
        monkeypatch.undo()
        monkeypatch.chdir(here)
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    for module in (os, json_files.os):
        monkeypatch.setattr(module, "fsync", full)
    assert "No space left" in last_line(WRITES[name], (1, 2), capfd)


UNREADABLE = {
    "sample": "sample --workdir {}",
    "translate": "translate --workdir text --input {}",
    "export": "export --workdir {} --out m.safetensors",
    "status": "status {}",
    "plot": "plot {}",
    "train": "train --config {} --workdir new",
    "prepare": "prepare text --input {} --out out --tokenizer bytes",
    "prepare images": "prepare images --input {} --out out",
    "prepare translation": "prepare translation --input {} --out o --source_lang a --target_lang b",
    "planner": "planner predict --network {} --parameters 1e6 --compute_s 0.1",
    "peers": "peers replay --workdir {}",
    "preflight": "preflight --config {} --save n.json",
    "supervise": "supervise --processes 2 -- {} --config {} --workdir new",
}


@pytest.mark.timeout(60)  # opening a pipe that nobody writes into waits for ever
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a link to nothing", "/proc/self/mem"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read(name, kind, here, capfd):
    if (name, kind) == ("translate", "a pipe"):
        return  # it reads what somebody will write
    path = here / "x"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/proc/self/mem" if kind.startswith("/") else here / "nowhere")
    last_line(UNREADABLE[name].replace("{}", str(path)), (1, 2), capfd)


@pytest.mark.parametrize(
    "line",
    [
        "sample --workdir text",
        "status text",
        f"planner predict {CLUSTER} {MODEL}",
        PREPARE,
        "--help",
    ],
)
def test_a_reader_that_has_seen_enough(line, here, capfd, monkeypatch):
    """A pipe closed at its other end, as `head` leaves it: no words, and the code of SIGPIPE."""
    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writes, "w"))
    monkeypatch.setattr(sys, "argv", ["decent-jax", *shlex.split(line)])
    with pytest.raises(SystemExit) as end:
        command.console()
    sys.stdout.close()
    assert end.value.code == 128 + signal.SIGPIPE
    assert "Traceback" not in capfd.readouterr().err


# --- Code of others that raises -------------------------------------------------------------------


def write_config(path, **changes):
    config = small_runs.config("raising_task", steps=2, **changes)
    config.eval.every = 1
    tiny.write(config, path)


@pytest.mark.parametrize("part", raising_task.PARTS)
def test_a_task_that_raises(part, here, capfd):
    """The sentence names the error and the line that raised it; a file has the traceback."""
    write_config(here / "config.py", model__raises=part)
    said = last_line("train --config config.py --workdir new", (1, 2), capfd)
    assert "of the task" in said and "raising_task.py, line" in said
    path = Path(re.search(r"(/\S+\.txt)", said)[1])
    assert "Traceback" in path.read_text() and "_raise(" in path.read_text()


def test_an_optimizer_that_raises(here, capfd):
    changes = {"algorithm": "decentralized_sgd", "optimizer__name": "raising_task.optimizer"}
    write_config(here / "config.py", **changes)
    assert "of the task" in last_line("train --config config.py --workdir new", (1, 2), capfd)


@pytest.mark.parametrize(
    "text",
    [
        "def get_config():\n    return 1 / 0\n",
        "import nowhere\n",
        "def get_config(:\n",
        "def get_config():\n    return None\n",
        "raise SystemExit('enough')\n",
        "from decent_jax import train\nget_config = lambda: train.default_config('nowhere')\n",
    ],
)
def test_a_config_file_that_raises(text, here, capfd):
    (here / "config.py").write_text(text)
    for line in ("train --config config.py --workdir new", "preflight --config config.py --save n"):
        last_line(line, (1, 2), capfd)


@pytest.mark.parametrize("line", READ)
def test_code_of_ours_that_raises(line, here, capfd, monkeypatch):
    """As a kind that nobody foresaw does: still one sentence, and the code 1."""
    tiny.write(small_runs.config("raising_task", steps=4), here / "config.py")

    def raises(*_, **__):
        raise RecursionError("too deep")

    for name in ("read_json", "read_text", "read_bytes"):
        monkeypatch.setattr(json_files, name, raises)
    monkeypatch.setattr(on_disk, "steps", raises)
    monkeypatch.setattr("decent_jax.train.saved_model.TrainedRun", raises)
    monkeypatch.setattr("decent_jax.monitor.run_state.read", raises)
    assert errors.unforeseen(KeyError("a"))
    code = command.main(shlex.split(line))
    said = capfd.readouterr().err
    assert code in (0, 1, 2) and "Traceback" not in said
