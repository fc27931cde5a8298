"""Every command with input that fails late: an exit code, and one sentence as its last line.

"Late" is after the arguments were accepted. Whoever raises, and of whatever kind: nothing leaves a
command as a traceback. test_hostile has input that is refused at once.
"""

import gzip
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import damage
import pytest
import raising_task
import small_runs
import tiny

from decent_jax.commands import main as command
from decent_jax.ground import json_files
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


# One damage of each kind of file, and commands that read it; the readers themselves have the others
# (test_checkpoint_damage, test_damaged_files).
DAMAGE = {
    "bits": (all_steps(damage.flip_bits), "sample export train"),
    "config of another": (
        lambda run: shutil.copy("line/config.json", run / "config.json"),
        "sample plot status train",
    ),
    "config of numbers": (write("config.json", "3"), "export plot status translate train"),
    "no data": (lambda run: shutil.rmtree("data"), "sample train"),
    "manifest": (lambda run: Path("data/manifest.json").write_text("[]"), "train"),
    "metrics": (write("metrics.jsonl", "[]\n{\n"), "plot status train"),
}
READ = ("sample --workdir text", "export --workdir text --out m.safetensors", "plot text")
READ += ("status text", "translate --workdir text", "train --config config.py --workdir text")
COMMANDS = {line.partition(" ")[0]: line for line in READ}


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in DAMAGE for name in DAMAGE[case][1].split()]
)
def test_a_damaged_folder(case, name, here, capfd, monkeypatch):
    config = tiny.config(here / "data", num_replicas=2, steps=4, eval={"every": 1})
    tiny.write(config, here / "config.py")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n")))
    DAMAGE[case][0](here / "text")
    if name in ("plot", "status"):
        code = command.main(shlex.split(COMMANDS[name]))
        assert code in (0, 1, 2) and "Traceback" not in capfd.readouterr().err
    else:
        last_line(COMMANDS[name], (1, 2), capfd)


# --- Inputs whose fault is behind a good beginning, and folders of another kind -------------------

DOCUMENTS = "".join(f'{{"text": "document {i}"}}\n' for i in range(40)).encode()
EVENTS = b'{"start": 0, "origin": null}\n{"t": 0, "rate": 0}\n'
PEERS = {"p/config.json": "{}", "p/peers/0/events-0.jsonl": EVENTS}
SUPERVISE = "supervise --processes 2 -- config.py --config config.py --workdir"
ALONE = "supervise --hosts a --via {} -- config.py --config config.py --workdir new"
LATE = [
    ({"in/b.jsonl.gz": gzip.compress(DOCUMENTS)[:-9]}, PREPARE, "b.jsonl.gz"),
    ({}, f"planner predict {CLUSTER} --config text/config.json --compute_s 1", "text/config.json"),
    ({}, f"planner place {CLUSTER} --parameters 1e6 --plan text", "--plan text"),
    (PEERS, "peers replay --workdir p", "p"),
    (PEERS | {"p/peers/count.json/a": "mine"}, "peers resize --workdir p --count 3", "count.json"),
    ({"lines": b"a\n" * 600 + b"\xff\n"}, "translate --workdir line --input lines", "line 601"),
    ({"lines": b"a\n" * 600 + b"late\n"}, "translate --workdir line --input lines", "of the task"),
    ({"lines": b"a\n" * 600 + b"a" * 20_001}, "translate --workdir line --input lines", "line 601"),
    ({"new/process-1.log/a": "mine"}, f"{SUPERVISE} new", "--workdir new"),
    ({"config.py": "def get_config():\n    return 1 / 0\n"}, f"{SUPERVISE} new", "config.py"),
    ({}, ALONE.format("nowhere"), "nowhere"),
    ({}, "preflight --config config.py --save text", "--save text"),
]


@pytest.mark.parametrize(
    ("files", "line", "named"),
    LATE,
    ids=[f"{k} {line[:30]}" for k, (_, line, _) in enumerate(LATE)],
)
def test_what_is_wrong_in_the_middle(files, line, named, here, capfd):
    tiny.write(small_runs.config("raising_task", steps=2), here / "config.py")
    for name, content in files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    said = last_line(line, (1, 2), capfd)
    assert not [word for word in named.split() if word not in said], said


# --- Files that cannot be written or read ---------------------------------------------------------

WRITES = {
    "export": "export --workdir text --out m.safetensors",
    "plot": "plot text --out p.png",
    "train": "train --config config.py --workdir new",
    "prepare": PREPARE,
    "planner": f"planner recommend {CLUSTER} {MODEL} --plan n.json",
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
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read(name, here, capfd):
    for path in map(Path, ("pipe", "folder", "link", "memory")):
        if (name, path.name) == ("translate", "pipe"):
            continue  # it reads what somebody will write
        if path.name == "pipe":
            os.mkfifo(path)
        elif path.name == "folder":
            path.mkdir()
        else:
            path.symlink_to("/proc/self/mem" if path.name == "memory" else "nowhere")
        last_line(UNREADABLE[name].replace("{}", str(here / path)), (1, 2), capfd)


@pytest.mark.parametrize("line", ["sample --workdir text", "status text", PREPARE, "--help"])
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


@pytest.mark.parametrize("where", ["pass", "gc.callbacks.append(lambda *_: press()); gc.collect()"])
def test_ctrl_c_while_modules_are_imported(where, tmp_path):
    """Also where Python would ignore it: in a callback of the garbage collector, as jax has one."""
    press = "def press(): os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "slow.py").write_text(f"import gc, os, signal\n{press}\n{where}\npress()\n")
    code = "from decent_jax.commands import main; main.import_module('slow')"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (ended.returncode, ended.stderr.count(b"\n")) == (128 + signal.SIGINT, 1)


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
