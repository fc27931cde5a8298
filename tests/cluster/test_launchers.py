"""SLURM with two virtual nodes and Open MPI, the real ones, start train.py by the files of launch/.

Both are packages of Debian (`slurm-wlm`, `openmpi-bin`); where one is absent its test skips. The
test starts SLURM's daemons itself, as root, with files and ports of their own.
"""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import tiny
from several import free_port, until

ROOT = Path(__file__).resolve().parents[2]
SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "srun", "scontrol", "scancel")
# Each has a host name of its own. Processes look for process 0 at the first, in alphabetical order.
NODES = ("node1", "node2")
START = 'mount --bind "$1" /etc/hosts && hostname "$0" && exec slurmd -D -f "$2"'
SETTINGS = ["--config.steps=3", "--config.mesh.devices=0", "--config.cluster.timeout_s=100"]
SETTINGS += ["--config.schedule=auto"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def found(*programs):
    """Where programs are that only root has on its path, too."""
    path = os.environ["PATH"] + os.pathsep + "/usr/sbin"
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    return path


@pytest.fixture
def train(tmp_path, compile_once):
    """(arguments of train.py, environment, folder of the run)."""
    config, workdir = tiny.write_config(tmp_path / "config_file.py"), tmp_path / "run"
    arguments = ["--config", str(config), *SETTINGS, "--workdir", str(workdir)]
    ours = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    environment = ours | compile_once | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return arguments, environment, workdir


@pytest.fixture
def slurm_conf(tmp_path):
    """The configuration of a running SLURM: two nodes of two cores, both this machine."""
    path = found(*SLURM, "unshare")
    if os.geteuid():
        pytest.skip("SLURM's daemons need root")
    folder = tmp_path / "slurm"
    folder.mkdir(mode=0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host, control = os.uname().nodename, free_port()
    # A machine's hosts file, which only the processes of the nodes see.
    hosts = folder / "hosts"
    names = "".join(f"127.0.0.1 {name}\n" for name in ("localhost", host, *NODES))
    hosts.write_text(names)
    conf = folder / "slurm.conf"
    nodes = "".join(
        f"NodeName={name} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2\n" for name in NODES
    )
    conf.write_text(
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={control}\n"
        f"SlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\nAuthInfo=socket={folder}/munge\n"
        f"CredType=cred/munge\nStateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/%n\n"
        f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/%n.pid\n"
        "ProctrackType=proctrack/pgid\nTaskPlugin=task/none\nSelectType=select/linear\n"
        "SwitchType=switch/none\nMpiDefault=none\nReturnToService=2\n"
        f"SlurmdParameters=config_overrides\n{nodes}"
        "PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=5\n"
    )
    environment = os.environ | {"SLURM_CONF": str(conf), "PATH": path}
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge", f"--key-file={key}",
         f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/seed",
         f"--log-file={folder}/munged.log"],
        ["slurmctld", "-D", "-f", str(conf)],
        *(["unshare", "--uts", "--mount", "sh", "-c", START, name, hosts, conf] for name in NODES),
    ]  # fmt: skip
    ping = functools.partial(subprocess.run, ["scontrol", "ping"], env=environment)
    begun = {"munged": (folder / "munge").exists}
    begun["slurmctld"] = lambda: b"is UP" in ping(capture_output=True).stdout
    running = []
    with (folder / "daemons.log").open("w") as log:
        try:
            for command in daemons:
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                until(begun.get(command[0], lambda: True))
            yield conf, path, folder / "daemons.log"
        finally:
            subprocess.run(["scancel", "--state=RUNNING"], env=environment, capture_output=True)
            for process in reversed(running):
                process.terminate()
            for process in running:
                process.wait(20)


def check(workdir, words, launcher, schedule):
    """Two processes of two replicas trained together; the schedule suits their hosts."""
    assert f"process 0 of 2 ({launcher})" in words, words
    assert re.search(r"^0-1 +0 ", words, re.MULTILINE), words
    assert re.search(r"^2-3 +1 .* cpu:0$", words, re.MULTILINE), words
    assert tiny.summary(workdir)["processes"] == 2
    assert tiny.summary(workdir)["schedule"] == schedule
    assert [row["step"] for row in tiny.rows(workdir)] == [1, 2, 3]


@pytest.fixture
def sbatch(train, slurm_conf, tmp_path):
    """Submits launch/slurm.sbatch; flags before it replace the sizes of a real cluster."""
    arguments, environment, workdir = train
    conf, path, daemons = slurm_conf
    log = tmp_path / "job.log"
    flags = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gres=none", "--parsable"]
    flags += ["--time=4", f"--output={log}", f"--chdir={ROOT}", "--export=ALL"]
    environment |= {"SLURM_CONF": str(conf), "PATH": path}

    def said(*command):
        given = {"env": environment, "capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, **given).stdout.strip()

    def submit(*more, during=lambda workdir: None, **variables):
        """The words of the job, which ended well; ``during`` is called until then."""
        environment.update(variables)
        script = str(ROOT / "launch" / "slurm.sbatch")
        job = said("sbatch", *flags, script, *arguments, *more)
        ends = time.monotonic() + 200
        while said("squeue", "--noheader", f"--jobs={job}") and time.monotonic() < ends:
            during(workdir)
            time.sleep(0.2)  # sbatch --wait looks every 32 s in the end
        words = log.read_text() if log.exists() else daemons.read_text()
        assert "ExitCode=0:0" in said("scontrol", "show", "job", job), words
        return words, workdir

    return submit


def test_slurm(sbatch):
    words, workdir = sbatch()
    check(workdir, words, "SLURM", "hierarchical(complete, one_peer_exp)")


def test_slurm_with_a_supervisor_loses_a_process_and_goes_on_from_memory(sbatch):
    """No checkpoint is there to go on from."""
    settings = {"steps": 9, "data.pause": 0.25, "recovery.every": 2, "checkpoint.every": 0}
    settings |= {"log.every": 1, "schedule": "static_exp"}
    killed = []

    def kill_the_second_once(workdir):
        metrics = workdir / "metrics.jsonl"
        if killed or not metrics.exists() or len(tiny.rows(workdir)) < 5:
            return
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.readlink(f"/proc/{process.pid}/fd/1") == str(workdir / "process-1.log"):
                    process.kill()
                    killed.append(process.pid)

    words, workdir = sbatch(
        *(f"--config.{name}={value}" for name, value in settings.items()),
        during=kill_the_second_once,
        SUPERVISE="1",
    )
    assert len(killed) == 1 and "process 1 (node2) died of SIGKILL" in words
    assert int(re.findall(r"resuming after step (\d+)", words)[0]) >= 3
    assert tiny.summary(workdir)["processes"] == 2
    assert [row["step"] for row in tiny.rows(workdir)] == list(range(1, 10))


def test_open_mpi(train):
    found("mpirun")
    arguments, environment, workdir = train
    environment |= {"COORDINATOR": f"localhost:{free_port()}"}
    before = ["-np", "2", "--oversubscribe", "--allow-run-as-root"]
    done = subprocess.run(
        [str(ROOT / "launch" / "mpirun.sh"), *before, "--", *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    words = done.stdout + done.stderr
    assert done.returncode == 0, words
    check(workdir, words, f"coordinator {environment['COORDINATOR']}", "one_peer_exp")
