"""What starts processes: the files for SLURM, Open MPI and Kubernetes."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from refusals import refused, refuses
from several import slurm, until

from decent_jax.cluster import launchers, start
from decent_jax.ground.errors import ConfigError
from decent_jax.train import config as config_lib
from decent_jax.train import flags

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"


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
    script(tools / "srun", 'echo "$*"')
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


def test_slurm_starts_a_process_for_each_gpu_or_for_each_node(tools):
    said = run_sbatch(tools)
    assert said == "--no-kill --kill-on-bad-exit=0 python train.py --config a b.py\n"
    said = run_sbatch(tools, PER="node")
    assert said.startswith("--ntasks-per-node=1 --ntasks=2 ")


def test_slurm_with_the_supervisor(tools):
    script(tools / "decent-jax", 'printf "%s\\n" "$@"')
    words = run_sbatch(tools, SUPERVISE="1").splitlines()
    assert words[:4] == ["supervise", "--hosts", "gpu1,gpu2", "--via"]
    assert words[4].endswith("--nodelist={host} --gres=gpu:4 sh -c")
    assert words[5:] == ["--", "train.py", "--config", "a b.py"]


def open_mpi_4(port, index):
    own = {"OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_LOCAL_RANK": str(index)}
    uri = "1531576320.0;tcp://127.0.0.1:34911"
    own |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": uri}
    return own | {"JAX_COORDINATOR_PORT": str(port)}


@pytest.fixture
def place(monkeypatch):
    """The place of a process that has these variables."""

    def of(launcher, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return start._place(config_lib.default_config().cluster, launcher)

    return of


@pytest.mark.parametrize(
    ("launcher", "host", "variables"),
    [
        ("SLURM", "localhost", lambda index: slurm(9876, 2, index)),
        ("Open MPI", "127.0.0.1", lambda index: open_mpi_4(9876, index)),
    ],
)
def test_the_place_of_a_process_by_the_variables_of(place, launcher, host, variables):
    """Processes with those of SLURM find each other in test_preflight."""
    for index in range(2):
        assert place(launcher, variables(index)) == (f"{host}:9876", 2, index, [index])
        assert launchers.detect_launcher() == launcher


@pytest.mark.parametrize(
    ("launcher", "variables", "devices"),
    [
        ("SLURM", {"SLURM_STEP_NUM_NODES": "2"}, None),
        ("SLURM", {"SLURM_STEP_NUM_NODES": "1"}, [1]),
        ("SLURM", {"SLURM_STEP_NUM_NODES": "1", "SLURM_GPUS_PER_TASK": "2"}, None),
        ("SLURM", {"SLURM_STEP_NUM_NODES": "2", "JAX_LOCAL_DEVICE_IDS": "0,3"}, [0, 3]),
        ("Open MPI", {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, [1]),
        ("Open MPI", {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, None),
    ],
)
def test_a_process_that_sees_no_devices_of_others_takes_all(place, launcher, variables, devices):
    """jax gives it the one of its number, so that the others idle, or that it does not see."""
    started = {"SLURM": slurm(9876, 2, 1), "Open MPI": open_mpi_4(9876, 1)}[launcher]
    steps = {"SLURM_STEP_NUM_TASKS": "2"} if launcher == "SLURM" else {}
    assert place(launcher, started | steps | variables).devices == devices


@pytest.mark.parametrize(
    ("listed", "host"), [("c[0-1][0-3]", "c00"), ("gpu[007,009-011],login1", "gpu007")]
)
def test_the_first_host_of_what_slurm_lists(place, listed, host):
    found = place("SLURM", slurm(9876, 2, 1) | {"SLURM_STEP_NODELIST": listed})
    assert found.address == f"{host}:9876"


@pytest.mark.parametrize("index", [-1, 2])
def test_a_process_beyond_the_number_of_all_is_refused(place, index):
    with refuses("SLURM", index, "cluster.coordinator", error=ConfigError):
        place("SLURM", slurm(9876, 2, index))


def test_the_interactive_shell_of_salloc_is_one_process(place):
    """SLURM_NTASKS is what srun could start from there; a step of srun has its own count."""
    place("SLURM", slurm(9876, 4, 0) | {"SLURM_STEP_NUM_TASKS": "1"})
    assert launchers.detect_launcher() is None
    assert place("SLURM", {"SLURM_STEP_NUM_TASKS": "2"}).count == 2


def test_mpirun_in_a_job_of_slurm(place, monkeypatch):
    """Its daemons are a step with one task on each of two nodes, whose variables stay."""
    step = slurm(9876, 2, 1) | {"SLURM_STEP_NUM_TASKS": "2"}
    found = place("Open MPI", step | open_mpi_4(9876, 0) | {"OMPI_COMM_WORLD_SIZE": "8"})
    assert launchers.detect_launcher() == "Open MPI"
    assert found[:3] == ("127.0.0.1:9876", 8, 0)
    monkeypatch.delenv("OMPI_MCA_orte_hnp_uri")  # as of Open MPI 5, which jax cannot read
    with refuses("Open MPI", "cluster.coordinator", error=ConfigError):
        place("Open MPI", {})


@pytest.fixture
def without_launchers(monkeypatch):
    for variable in launchers.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


SEVERAL = "WORLD_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE JSM_NAMESPACE_SIZE FLUX_JOB_SIZE HOROVOD_SIZE"
SEVERAL += " PET_NNODES MPI_LOCALNRANKS OMPI_COMM_WORLD_SIZE JAX_NUM_PROCESSES"
ONE_OF_SEVERAL = "PMIX_RANK PMI_RANK ALPS_APP_PE PALS_RANKID JSM_NAMESPACE_RANK"
ONE_OF_SEVERAL += " FLUX_TASK_RANK LSF_PM_TASKID JAX_PROCESS_ID SLURM_PROCID"
ONE_OF_SEVERAL += " JAX_COORDINATOR_ADDRESS MEGASCALE_COORDINATOR_ADDRESS"


@pytest.mark.usefixtures("without_launchers")
@pytest.mark.parametrize("variable", [*SEVERAL.split(), *ONE_OF_SEVERAL.split()])
def test_processes_of_a_launcher_that_is_not_read_do_not_train_alone(variable, monkeypatch, joins):
    """Four processes of torchrun trained four models, one of them into the folder."""
    told = "host:99" if variable.endswith("ADDRESS") else "4"
    monkeypatch.setenv(variable, f" {told} " if variable in SEVERAL.split() else told)
    config = config_lib.default_config()
    with refused(variable, told):
        start.start(config)
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # srun started one task, and that the variable knows
    monkeypatch.setenv("SLURM_NTASKS", "1")
    if variable in SEVERAL.split():
        monkeypatch.setenv(variable, "1")
    assert "one process" in start.start(config)


@pytest.mark.usefixtures("without_launchers")
@pytest.mark.parametrize("told", ["2", "8"])
def test_torchrun_on_each_node_of_slurm(told, place):
    count = place("SLURM", slurm(9876, 2, 0) | {"WORLD_SIZE": told}).count
    # Of as many processes, a script of SLURM exports it for others.
    with contextlib.nullcontext() if told == "2" else refused("WORLD_SIZE", told):
        launchers.check_unread(count)


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
    command = container["command"]
    assert (ROOT / command[0]).stat().st_mode & 0o111 and command[1:3] == ["python", "train.py"]
    flags.parse(["--config=quickstart", "--workdir=w", *command[-6:-3]])  # of recovery


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
        found = start._place(config.cluster, launchers.detect_launcher())
        assert found == ("decent-jax-0.decent-jax:9876", 4, index, None)


# Ends with one code after the other, and notes how often it was started.
ENDING = """
read -r code rest < "$1"
echo "$rest" > "$1"
echo started
[[ $code == wait ]] && { trap 'exit 143' TERM; touch "$1.waits"; sleep 60 & wait; }
exit "$code"
"""


@pytest.mark.parametrize(
    ("codes", "starts", "code"),
    [
        ("75 137 0 0", 3, 0),
        ("134 1 0", 2, 1),
        ("2 0", 1, 2),
        ("75 75 75 75 75", 4, 75),
        ("75 143 0", 2, 143),  # the process got the signal, and not this shell
        ("130 0", 1, 130),
    ],
)
def test_a_process_starts_again_in_its_container(tmp_path, codes, starts, code):
    program = script(tmp_path / "program", ENDING)
    (tmp_path / "codes").write_text(f"{codes}\n")
    done = subprocess.run(
        [LAUNCH / "again.sh", program, tmp_path / "codes"],
        env=os.environ | {"AGAIN": "4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.count("started")) == (code, starts)


def test_a_container_that_is_stopped_passes_it_on(tmp_path):
    program = script(tmp_path / "program", ENDING)
    (tmp_path / "codes").write_text("75 wait 0\n")
    with subprocess.Popen([LAUNCH / "again.sh", program, tmp_path / "codes"]) as process:
        until((tmp_path / "codes.waits").exists)
        process.terminate()
        assert process.wait(60) == 143
    assert (tmp_path / "codes").read_text() == "0\n"  # not started again
