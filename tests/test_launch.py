"""What starts processes: the supervisor, and the files for SLURM, Open MPI and Kubernetes."""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import yaml
from several import slurm, until

from decent_jax import topology
from decent_jax.cluster import start
from decent_jax.ground import json_files
from decent_jax.ground.errors import PEER_LOST
from decent_jax.plan.plan_file import Plan
from decent_jax.train import config as config_lib
from decent_jax.train import flags

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"


supervise = SimpleNamespace(**runpy.run_path(str(LAUNCH / "supervise.py")))

# --- What changes with the number of processes ----------------------------------------------------


def test_replicas_keep_their_share():
    config = tiny.config("DATA", num_replicas=8, batch_size=32, schedule="one_peer_exp")
    config.update(eval={"batch_size": 16}, mesh={"devices": 8})
    assert supervise.fit(config, 4, 4) == ({}, [])
    changes, notes = supervise.fit(config, 4, 3)
    wanted = {"num_replicas": 6, "batch_size": 24, "eval.batch_size": 12, "mesh.devices": 6}
    assert changes == wanted
    assert notes == [f"{name} is {value}" for name, value in wanted.items()]


@pytest.mark.parametrize("schedule", ["hypercube", "alternating_exp_ring"])
def test_a_schedule_that_needs_a_power_of_two(schedule):
    config = tiny.config("DATA", num_replicas=8, batch_size=32, schedule=schedule, local_size=2)
    changes, notes = supervise.fit(config, 4, 3)
    assert changes["schedule"] == "one_peer_exp"
    assert notes[-1].startswith(f"schedule: {schedule} ")
    assert notes[-1].endswith("one_peer_exp takes its place")
    assert "schedule" not in supervise.fit(config, 4, 2)[0]


def test_a_plan_is_for_devices_that_are_gone(tmp_path):
    plan = Plan(("a/0", "b/0", "c/0", "d/0"), topology.make("ring", 4), mix_every=2)
    plan.save(tmp_path / "plan.json")
    config = tiny.config("DATA", cluster={"plan": str(tmp_path / "plan.json")})
    changes, _ = supervise.fit(config, 4, 3)
    assert changes["cluster.plan"] == "" and changes["mix_every"] == 2
    assert changes["schedule"] == "one_peer_exp"  # ring needs an even number
    assert supervise.fit(config, 4, 2)[0]["schedule"] == "ring"


def test_a_batch_may_follow_the_number_of_replicas_only():
    old = json_files.flat(tiny.config("DATA", num_replicas=4, batch_size=8))
    follows = json_files.flat(tiny.config("DATA", num_replicas=3, batch_size=6))
    assert config_lib.refused_changes(old, follows) == []
    other = json_files.flat(tiny.config("DATA", num_replicas=3, batch_size=12))
    assert config_lib.refused_changes(old, other) == ["batch_size: 8 -> 12"]


def member(name):
    return supervise.Member(name, name, [])


@pytest.mark.parametrize(
    ("codes", "left"),
    [
        ([PEER_LOST, -signal.SIGKILL, PEER_LOST], "ac"),
        ([PEER_LOST, 255, PEER_LOST], "ac"),  # ssh that lost its host
        ([None, PEER_LOST, PEER_LOST], "bc"),  # a host that fell silent
        ([PEER_LOST, PEER_LOST, PEER_LOST], "abc"),  # a network that broke for a while
        ([-signal.SIGABRT, 137, 1], "ac"),
    ],
)
def test_who_is_lost(codes, left):
    members = [member(name) for name in "abc"]
    assert "".join(m.name for m in supervise._without_the_lost(members, codes, 0, 1.0)) == left


def test_a_process_may_be_given_another_chance():
    members, codes = [member("a"), member("b")], [PEER_LOST, -signal.SIGKILL]
    assert len(supervise._without_the_lost(members, codes, 1, 1.0)) == 2
    assert len(supervise._without_the_lost(members, codes, 1, 1.0)) == 1


DIES = "import os; os.kill(os.getpid(), 9)"
WAITS = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("programs", "codes", "code"),
    [
        (["", ""], [0, 0], 0),
        ([WAITS, "exit(2)"], [None, 2], 2),
        (["exit(143)", "exit(143)"], [143, 143], 143),
        (["exit(75)", DIES], [75, -9], None),
        ([DIES, WAITS], [-9, None], None),
    ],
)
def test_waiting_until_all_have_ended(programs, codes, code):
    processes = [
        subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
        for program in programs
    ]
    patience = 1 if WAITS in programs else 60
    assert supervise._wait(processes, (patience - 30) / 2) == (codes, code)


@pytest.mark.parametrize(
    ("number", "answer", "code"),
    [
        (signal.SIGTERM, "exit(77)", 77),
        (signal.SIGHUP, "exit(77)", 77),
        (signal.SIGTERM, "None", None),  # it is killed after a while
    ],
)
def test_an_interruption_is_passed_on_and_ends_the_run(number, answer, code, tmp_path, monkeypatch):
    patience = 0.5 if code is None else 60.0
    monkeypatch.setitem(supervise._wait.__globals__, "STOP_S", patience)
    ready = tmp_path / "ready"
    program = f"import pathlib, signal, time; signal.signal(15, lambda *_: {answer}); "
    program += f"pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
    processes = [subprocess.Popen([sys.executable, "-c", program], start_new_session=True)]
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # also under nohup

    def interrupt():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    assert supervise._wait(processes, 30) == ([code], 128 + number)


# In place of train.py: process 0 ends on SIGTERM as train.py does, process 1 ignores it.
SUPERVISED = """
import os, pathlib, signal, sys, time
from decent_jax.cluster import secret, supervised
flags = dict(flag.split("=", 1) for flag in sys.argv[1:] if "=" in flag)
index = int(flags["--config.cluster.process_id"])
if index:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
supervised.end_with_supervisor(2)
known = os.environ[secret.VARIABLE]
pathlib.Path(flags["--workdir"], f"{index}.txt").write_text(f"{os.getpid()} {known}")
time.sleep(600)
"""


def test_processes_end_with_their_supervisor_however_it_ends(start_process, tmp_path, tiny_data):
    program = tmp_path / "program.py"
    program.write_text(SUPERVISED)
    config = tiny.write_config(tmp_path / "config_file.py", tiny_data)
    flags = ["--config", config, f"--workdir={tmp_path}"]
    process = start_process([LAUNCH / "supervise.py", "--processes", 2, "--", program, *flags])
    files = [tmp_path / f"{k}.txt" for k in range(2)]
    until(lambda: all(path.exists() and path.read_text() for path in files), process)
    pids, secrets = zip(*(path.read_text().split() for path in files), strict=True)
    assert len(set(secrets)) == 1 and len(secrets[0]) == 64
    process.kill()
    process.wait()
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids), seconds=60)
    log = (tmp_path / "process-1.log").read_text()
    assert log == "program.py: the supervisor is gone: stopping\n"


def test_a_standard_input_that_is_no_supervisor_ends_nothing():
    """Such as that of a launcher which does not pass the pipe on."""
    program = "import time; from decent_jax.cluster import supervised; "
    program += "supervised.end_with_supervisor(0.1); time.sleep(0.5); print('alive')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"DECENT_JAX_SUPERVISED": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("alive\n", "")


def test_hosts_and_the_command_for_them():
    options, program = supervise._parse(
        ["--hosts", "a=10.0.0.1,b", "--via", "ssh {host} 'cd /x &&'", "--", str(ROOT / "train.py")]
    )
    first, second = supervise._members(options)
    assert (first.address, second.address) == ("10.0.0.1", "b")
    assert second.argv == ["ssh", "b", "cd /x &&"] and program == [str(ROOT / "train.py")]


# --- A host is lost -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_processes_one_is_killed_two_end_the_run(start_process, tmp_path, compile_once):
    path = tiny.write_config(tmp_path / "config_file.py")
    workdir = tmp_path / "run"
    flags = ["--config", path, "--workdir", workdir, "--config.schedule=static_exp"]
    flags += [
        "--config.num_replicas=3",
        "--config.batch_size=6",
        "--config.steps=16",
        "--config.checkpoint.every=4",
        "--config.checkpoint.keep=9",
        "--config.data.pause=0.25",  # time to die in
    ]
    flags += ["--config.mesh.devices=0", "--config.cluster.heartbeat_s=5", "--config.log.every=1"]
    program = [LAUNCH / "supervise.py", "--processes", 3, "--", ROOT / "train.py", *flags]
    process = start_process(program, **compile_once)
    saved = workdir / "checkpoints" / "8"
    until(saved.exists, process)
    pids = re.search(r"3 processes started \(pids (.*?)\)", process.words.read_text())[1]
    victim = int(pids.split(", ")[2])
    os.kill(victim, signal.SIGKILL)
    until(lambda: "2 processes started" in process.words.read_text(), process)
    assert process.wait(timeout=300) == 0, process.words.read_text()[-3000:]
    words = process.words.read_text()
    assert "process 2 (first 2) died of SIGKILL after" in words
    assert "; num_replicas is 2; batch_size is 4\n" in words
    lost = f"train.py: process 2 ({socket.gethostname()}) was lost: no sign of life for 5 s"
    assert lost in words and "Traceback" not in words
    step = int(re.search(r"resuming after step (\d+)", words)[1])
    assert step in (8, 12)
    summary = json.loads((workdir / "summary.json").read_text())
    assert (summary["num_replicas"], summary["processes"], summary["steps"]) == (2, 2, 16)
    assert summary["schedule"] == "static_exp"
    assert [row["step"] for row in tiny.rows(workdir)] == list(range(1, 17))
    # The data goes on where the last checkpoint was: no example is left out.
    metas = {
        k: json.loads((workdir / "checkpoints" / str(k) / "meta" / "metadata").read_text())
        for k in (step, 16)
    }
    assert metas[step]["examples"] == 6 * step
    assert metas[16]["examples"] == (6 * step // 4 + 16 - step) * 4


# --- The files, without the systems they are for --------------------------------------------------


def script(path, text):
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder in which a test puts its own srun, mpirun and scontrol."""
    folder = tmp_path / "tools"
    folder.mkdir()
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.chdir(ROOT)
    return folder


def run_sbatch(tools, **variables):
    script(tools / "srun", 'echo "$JAX_LOCAL_DEVICE_IDS|$*"')
    script(tools / "scontrol", "printf 'gpu1\\ngpu2\\n'")
    variables |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_GPUS_ON_NODE": "4"}
    done = subprocess.run(
        ["bash", LAUNCH / "slurm.sbatch", "--config", "a b.py"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_slurm_starts_a_process_for_each_gpu(tools):
    said = run_sbatch(tools)
    assert said == "|--no-kill --kill-on-bad-exit=0 python train.py --config a b.py\n"


def test_slurm_starts_a_process_for_each_node_with_all_its_gpus(tools):
    said = run_sbatch(tools, PER="node")
    assert said.startswith("0,1,2,3|--ntasks-per-node=1 --ntasks=2 ")


def test_slurm_with_the_supervisor(tools):
    script(tools / "python", 'printf "%s\\n" "$@"')
    words = run_sbatch(tools, SUPERVISE="1").splitlines()
    assert words[:4] == ["launch/supervise.py", "--hosts", "gpu1,gpu2", "--via"]
    assert words[4].endswith("--nodelist={host} --gres=gpu:4 sh -c")
    assert words[5:] == ["--", "train.py", "--config", "a b.py"]


def open_mpi_4(port, index):
    own = {"OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_LOCAL_RANK": str(index)}
    uri = "1531576320.0;tcp://127.0.0.1:34911"
    own |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": uri}
    return own | {"JAX_COORDINATOR_PORT": str(port)}


@pytest.mark.parametrize(
    ("launcher", "host", "variables"),
    [
        ("SLURM", "localhost", lambda index: slurm(9876, 2, index)),
        ("Open MPI", "127.0.0.1", lambda index: open_mpi_4(9876, index)),
    ],
)
def test_the_place_of_a_process_by_the_variables_of(monkeypatch, launcher, host, variables):
    """Processes with those of SLURM find each other in test_preflight."""
    for index in range(2):
        for name, value in variables(index).items():
            monkeypatch.setenv(name, value)
        assert start.detect_launcher() == launcher
        place = start._place(config_lib.default_config().cluster, launcher)
        assert place == (f"{host}:9876", 2, index, [index])


def test_variables_that_jax_cannot_use_are_a_sentence(tmp_path, monkeypatch, capsys):
    """Open MPI 5 has another variable than the one that jax looks for."""
    from decent_jax.commands import preflight

    for name, value in open_mpi_4(9876, 0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMPI_MCA_orte_hnp_uri")
    assert preflight.main(["--save", str(tmp_path / "network.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("preflight: Open MPI started this process, but ")
    assert "set cluster.coordinator, cluster.num_processes" in error


# Starts the processes one after the other in the background, as mpirun would on one host.
MPIRUN = """
count=$2; shift 2
while [[ $1 == -x || $1 == --bind-to ]]; do
    [[ $1 == -x && $2 == *=* ]] && export "$2"
    shift 2
done
for ((k = 0; k < count; k++)); do
    OMPI_COMM_WORLD_SIZE=$count OMPI_COMM_WORLD_RANK=$k OMPI_COMM_WORLD_LOCAL_RANK=$k "$@" &
done
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit $code
"""


def test_mpirun_gives_each_process_its_place(tools):
    script(tools / "mpirun", MPIRUN)
    script(tools / "python", 'echo "$JAX_LOCAL_DEVICE_IDS ${#DECENT_JAX_SECRET} $*"')
    done = subprocess.run(
        [LAUNCH / "mpirun.sh", "-np", "2", "--", "--config", "c.py"],
        env=os.environ | {"COORDINATOR": "h:1"},
        capture_output=True,
        text=True,
        check=True,
    )
    place = "--config.cluster.coordinator=h:1 --config.cluster.num_processes=2"
    assert sorted(done.stdout.splitlines()) == [
        f"{k} 64 train.py --config c.py {place} --config.cluster.process_id={k}" for k in range(2)
    ]


def test_mpirun_without_flags_says_how(tools):
    done = subprocess.run([LAUNCH / "mpirun.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "launch/mpirun.sh -np 8" in done.stderr


def pod():
    """(service, job, container) of the Kubernetes file."""
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    return service, job, container


def test_kubernetes_names_fit_together():
    service, job, container = pod()
    spec, name = job["spec"], job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    subdomain = spec["template"]["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"]
    [port] = container["ports"]
    coordinator = f"--config.cluster.coordinator={name}-0.{subdomain}:{port['containerPort']}"
    assert coordinator in container["command"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(variables["PROCESSES"]) == spec["completions"]


def test_kubernetes_flags_are_the_place_of_a_process(monkeypatch):
    for index in range(4):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        variables = {"PROCESSES": "4", "JOB_COMPLETION_INDEX": str(index)}
        config_flags = [
            re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], flag)  # noqa: B023
            for flag in pod()[2]["command"]
            if flag.startswith("--config.cluster.")
        ]
        config = flags.override_all(config_lib.default_config(), config_flags)
        place = start._place(config.cluster, start.detect_launcher())
        assert place == ("decent-jax-0.decent-jax:9876", 4, index, None)
