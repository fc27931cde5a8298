"""`decent-jax status`: what it reads from the folders of runs, and its screens."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import tiny
from refusals import refuses

from decent_jax.commands import status, supervise
from decent_jax.ground import machine
from decent_jax.ground.errors import RunError
from decent_jax.ground.format import format_bytes
from decent_jax.ground.json_files import write_json_atomic
from decent_jax.monitor import comm_metrics, goodput_file, run_state
from decent_jax.monitor.metrics_file import MetricWriter
from decent_jax.peers.events import EventLog
from decent_jax.train.config import parse
from decent_jax.train.workdir import open_workdir

pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compile_once):
    """A run of four replicas that has ended."""
    config = tiny.waves(log={"every": 4}, eval={"every": 4})
    return tiny.run(config, tmp_path_factory.mktemp("runs") / "run")


def lines(folder, width=80):
    """{label: words} of a screen, and the lines after its empty line."""
    shown = list(status.screen(run_state.read(folder), width))
    assert all(len(line) <= width for line in shown[1:]), shown
    head, _, table = "\n".join(shown).partition("\n\n")
    found, label = {}, ""
    for line in head.splitlines()[1:]:
        label = line[:11].strip() or label
        found[label] = f"{found.get(label, '')} {line[11:]}".strip()
    return found, table.splitlines()


def test_a_run_that_has_ended(finished):
    rows, (found, table) = tiny.rows(finished), lines(finished)
    assert found["run"] == "toys.waves, accum_adam over one_peer_exp, 4 replicas"
    assert found["state"].startswith("ended ")
    assert found["step"] == "12 of 12 (100%)" and found["saved"] == "checkpoint of step 12"
    last = rows[-1]
    assert found["loss"].startswith(f"{last['train/loss']:.4g}"[:5])
    assert "in validation at step 12" in found["loss"]
    assert found["goodput"].startswith(f"{tiny.summary(finished)['goodput']['share']:.0%} of ")
    assert found["messages"].endswith("per step from a replica, one host")
    each = [last[f"replicas/{k}/loss"] for k in range(4)]
    assert max(each) == last["train/loss_max"] and min(each) == last["train/loss_min"]
    assert [row.split()[0] for row in table] == ["replica", "0", "1", "2", "3"]
    assert [float(row.split()[-1]) for row in table[1:]] == pytest.approx(each, rel=1e-3)


def test_while_it_runs(finished, tmp_path):
    """Its folder is locked by a process that lives, and its rows end with a torn one."""
    folder = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("*.jsonl"))
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoints")
    for none in (tmp_path, tmp_path / "none"):
        with refuses(none, error=RunError):
            run_state.read(none)
    with open_workdir(folder, parse(tiny.waves())), MetricWriter(folder) as writer:
        assert lines(folder)[0]["state"].startswith("starting (process ")
        writer.write(2, {"eval/top1": 0.5})
        writer.write(3, {"train/loss": 2.5, "perf/step_time_s": 0.5, "train/skipped_updates": 2})
        writer.write(3, {"train/loss_min": 2.0, "train/loss_max": 3.0, "perf/mfu": 0.4})
        writer.write(3, {"perf/tokens_per_s": 12_000.0, "perf/data_wait_s": 0.1})
        writer.write(3, {"eval/top1": 0.25})
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "tra')
        found, table = lines(folder)
        assert found["state"].startswith("running (process ")
        assert found["step"] == "3 of 12 (25%), about 4.5 s left"
        assert found["score"] == "25.00 Top-1, % of the validation images at step 3 (best 50.00)"
        assert "2 updates were not finite" in found["failed"] and not table
        assert found["loss"] == "2.500 in training (2.000 to 3.000 over the replicas)"
        speed = "500 ms per step, 12.0k tokens/s, 100 ms of it waiting for data, 40% of the "
        assert found["speed"] == speed + "devices' peak"
    assert lines(folder)[0]["state"].startswith("stopped before its end")
    (folder / ".lock").write_text("process 7 on elsewhere")  # which only its files can tell
    assert lines(folder)[0]["state"].startswith("running (process 7 on elsewhere)")
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    assert lines(folder)[0]["state"].startswith("silent: ")


def test_what_failed_is_shown_once_the_newest_last(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    for number in (1, 2, 3, 3, 4, 5):
        supervise._tell(folder, f"process {number} died of SIGKILL")
    with (folder / goodput_file.INCIDENTS).open("a") as file:
        file.write('{"date": "now"}\n{"date": 1')
    found, _ = lines(folder)
    said = found["failed"].split(" s ago: ")[1:]
    assert [words.split()[1] for words in said] == ["2", "3", "4", "5"]
    assert "2 more in " in found["failed"]


def write_peers(folder, peers, **known):
    """A run whose peers have (starts, loss, seconds of a step), and whether each is still there."""
    write_json_atomic(folder / "config.json", {"steps": 20, "trainer": "peers"})
    with MetricWriter(folder) as writer:
        writer.write(8, {"train/loss": 2.0, "perf/step_time_s": 0.1} | known)
    for rank, (starts, loss, seconds, _) in enumerate(peers):
        own = folder / "peers" / str(rank)
        for generation in range(starts):
            EventLog(own, generation).end(4, 0)
        with MetricWriter(own) as writer:
            writer.write(4, {"train/loss": loss, "perf/step_time_s": seconds})
    alive = {str(rank): {"steps": 4, "alive": peer[3]} for rank, peer in enumerate(peers)}
    write_json_atomic(folder / "peers.json", {"peers": alive})


def test_a_run_of_peers_has_a_row_for_each(tmp_path):
    known = {"peers/0/steps": 12.0, "peers/0/stale": 3.0, "peers/1/steps": 4.0}
    peers = [(1, 2.0, 0.02, True), (2, 3.0, 0.05, True), (1, 4.0, 0.02, False)]
    write_peers(tmp_path, peers, **known)
    found, table = lines(tmp_path)
    assert found["step"].startswith("8 of 20")
    assert [row.split() for row in table[1:]] == [
        ["0", "trains", "1", "12", "2.000", "20.0", "3"],
        ["1", "(slow)", "trains", "2", "4", "3.000", "50.0"],
        ["2", "gone", "1", "4", "4.000", "20.0"],
    ]
    write_json_atomic(tmp_path / "summary.json", {"steps": 8})
    for name in ("metrics.jsonl", "config.json"):  # nobody has written for long
        os.utime(tmp_path / name, (0, 0))
    _, table = lines(tmp_path)
    assert [row.replace("(slow)", "").split()[1] for row in table[1:]] == ["ended", "ended", "gone"]


def test_32_peers_fit_into_80_by_40(tmp_path):
    """Those that stand out are shown, all of them where the output is no terminal."""
    peers = [(1 + 2 * (k == 30), 2.0 - k / 100, 1.0, k != 29) for k in range(32)]
    write_peers(tmp_path, peers)
    for k in range(9):
        goodput_file.add_incident(tmp_path, f"peer {k} was killed; 31 continue")
    state = run_state.read(tmp_path)
    shown = list(status.screen(state, 80, 40))
    assert len(shown) <= 39 and all(len(line) <= 80 for line in shown[1:])
    ranks = [line.split()[0] for line in shown[shown.index("") + 2 : -1]]
    assert {"0", "29", "30"} <= set(ranks) and shown[-1] == f"and {32 - len(ranks)} more"
    for height in (10, 0):
        rows = list(status.screen(state, 80, height))
        assert sum("trains" in line for line in rows) == (3 if height else 31)


def test_a_run_of_several_processes_has_a_row_for_each(finished, tmp_path, monkeypatch):
    """Each writes its own; process 1 computes for longer than the other."""
    folder = shutil.copytree(finished, tmp_path / "run")
    start = json.loads((folder / "run.json").read_text()) | {"processes": 2}
    start["bytes_between_hosts_per_step"] = 3000
    write_json_atomic(folder / "run.json", start)
    counts = iter([(1000, 0)] * 2 + [(9000, 50_000)] * 2)
    names = "between_hosts", "inside_host"
    sent = lambda: dict(zip(names, next(counts), strict=True))  # noqa: E731
    monkeypatch.setattr(comm_metrics.machine, "sent_bytes", sent)
    monkeypatch.setattr(comm_metrics.jax, "process_count", lambda: 2)
    measured = []
    for k in (0, 1):
        monkeypatch.setattr(comm_metrics.jax, "process_index", lambda k=k: k)
        measured.append(comm_metrics.CommMetrics(folder))
        measured[k].measured = comm_metrics.Times(0.1 + 0.3 * k, 0.25).entries()
    first, _ = (one.row(16, steps=4) for one in measured)
    assert first["comm/between_hosts_bytes"] == 2000 and first["comm/inside_host_bytes"] == 12_500
    assert first["comm/exposed_s"] == pytest.approx(0.15)
    with MetricWriter(folder, start_step=12) as writer:
        writer.write(16, first)
    found, table = lines(folder)
    sent = f"{format_bytes(tiny.summary(folder)['bytes_sent_per_step'])} per step from a replica"
    assert found["messages"].startswith(f"{sent}; a host sends {format_bytes(3000)} to others")
    assert "250 ms, of which 150 ms" in found["messages"]
    rows = [row.split() for row in table[1:3]]
    assert [row[0] for row in rows] == ["0", "1"] and rows[1][1] == "(slow)"
    assert [row[-4:-1] for row in rows] == [["100", "250", "0.00200"], ["400", "250", "0.00200"]]


def test_pipelines_have_a_row_for_each_stage_of_a_replica(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    start = json.loads((folder / "run.json").read_text()) | {"stages": 2}
    write_json_atomic(folder / "run.json", start)
    for name, seconds in (("3-0", 0.1), ("3-1", 0.4)):
        worker = comm_metrics.CommMetrics(folder, name)
        worker.measured = {"compute_s": seconds, "wait_s": 0.5 - seconds}
        worker.row(12, steps=4)
    table = lines(folder)[1]
    assert table[0].startswith("worker ")
    assert [(row.split()[0], row.split()[-4:-2]) for row in table[1:3]] == [
        ("3-0", ["100", "400"]),
        ("3-1", ["400", "100"]),
    ]
    assert "slow" in table[2]


def test_the_kernel_counts_what_is_sent():
    """A kilobyte to this machine itself."""
    before = machine.sent_bytes()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.sendall(bytes(1000))
    assert machine.sent_bytes()["inside_host"] >= before["inside_host"] + 1000


def test_it_starts_without_jax_and_speaks_json(finished):
    program = (
        "import sys; from decent_jax.commands.main import main; main(sys.argv[1:]);"
        "assert not {'jax', 'matplotlib', 'ml_collections'} & set(sys.modules)"
    )
    argv = [sys.executable, "-c", program, "status", str(finished), "--json"]
    found = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    assert (found["state"], found["step"], found["steps"]) == ("ended", 12, 12)
    assert found["row"] == tiny.rows(finished)[-1]
