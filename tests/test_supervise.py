"""The supervisor: which processes start again, with which config, and that none outlives it."""

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from refusals import refused
from several import until

from decent_jax import topology
from decent_jax.cluster.supervise import Member, Supervisor, verdict
from decent_jax.commands import supervise
from decent_jax.ground.errors import PEER_LOST
from decent_jax.plan.plan_file import Plan
from decent_jax.train import saved_model

ROOT = Path(__file__).resolve().parents[1]
SUPERVISE = ["-m", "decent_jax.commands.main", "supervise", "--processes"]
KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT

# --- What changes with the number of processes ----------------------------------------------------


def test_replicas_keep_their_share():
    config = tiny.config("DATA", num_replicas=8, batch_size=32, schedule="one_peer_exp")
    config.update(eval={"batch_size": 16}, mesh={"devices": 8})
    assert supervise.fit(config, 4, 4) == {}
    wanted = {"num_replicas": 6, "batch_size": 24, "eval.batch_size": 12, "mesh.devices": 6}
    assert supervise.fit(config, 4, 3) == wanted
    with refused("num_replicas", 8):
        supervise.fit(config, 3, 3)


def test_a_plan_is_for_devices_that_are_gone(tmp_path):
    plan = Plan(("a/0", "b/0", "c/0", "d/0"), topology.make("ring", 4), mix_every=2)
    plan.save(tmp_path / "plan.json")
    config = tiny.config("DATA", cluster={"plan": str(tmp_path / "plan.json")})
    changes = supervise.fit(config, 4, 2)
    assert changes["cluster.plan"] == "" and changes["mix_every"] == 2
    assert changes["schedule"] == "ring"
    assert "schedule" not in supervise.fit(config, 4, 3)  # ring needs an even number


# --- What the exit codes mean ---------------------------------------------------------------------

ENDS = {
    (0, 0, 0): 0,
    (2, 2, 2): 2,
    (2, None, None): 2,
    (1, PEER_LOST, PEER_LOST): 1,
    (1, None, 0): 1,
    (143, 143, 143): 143,
    (130, 130, KILLED): 130,
}
# The members a, b and c that are left.
GOES_ON = {
    (PEER_LOST, KILLED, PEER_LOST): "ac",
    (1, KILLED, PEER_LOST): "ac",  # could not write a checkpoint with the dead one
    (2, KILLED, PEER_LOST): "ac",  # waited in vain for the dead one
    (1, 128 + signal.SIGKILL, ABORTED): "ac",
    (0, KILLED, 0): "ac",
    (PEER_LOST, 255, 128 + signal.SIGABRT): "ac",  # ssh that lost its host
    (None, PEER_LOST, PEER_LOST): "bc",  # a host that fell silent
    (None, KILLED, ABORTED): "c",
    (PEER_LOST, PEER_LOST, PEER_LOST): "abc",  # a network that broke for a while
}
ORDERS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize(("codes", "code"), ENDS.items())
def test_codes_that_end_the_run_in_any_order(codes, code):
    assert {verdict([codes[k] for k in order]) for order in ORDERS} == {code}


# --- The supervisor, with processes of a script and its clock -------------------------------------


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Scripted:
    """Ends with a code (None: never) at a time, or when it gets a signal or a line."""

    def __init__(self, clock, code, seconds=1.0, on_signal=None, on_line=None):
        self.clock, self.code, self.ends = clock, code, clock.now + seconds
        self.on_signal, self.on_line = on_signal, on_line
        self.signals, self.lines, self.closed = [], [], False

    def poll(self):
        return self.code if self.clock.now >= self.ends else None

    def _end(self, code):
        if code is not None and self.poll() is None:
            self.code, self.ends = code, self.clock.now

    def signal(self, number):
        self.signals.append(number)
        self._end(self.on_signal)

    def tell(self, line):
        self.lines.append(line)
        self._end(self.on_line)

    def close(self):
        self.closed = True


class Run:
    """A supervisor of members a, b, ... that ends as the script of each attempt says.

    A script is a list of `Scripted`'s arguments, one for each process.
    """

    def __init__(self, *scripts, names="abc", **options):
        self.clock, self.started, self.said, self.began = Clock(), [], [], []
        self.processes = []

        def start(members, attempt):
            self.began.append(self.clock.now)
            self.started.append("".join(member.name for member in members))
            script = scripts[attempt][: len(members)]
            self.processes = [Scripted(self.clock, **one) for one in script]
            return self.processes

        options = {"patience_s": 90, "stop_s": 600, "say": self.said.append} | options
        members = [Member(name, name, []) for name in names]
        self.supervisor = Supervisor(members, start, clock=self.clock, **options)

    def run(self):
        code = self.supervisor.run()
        assert all(process.closed for process in self.processes)
        return code


def script(*codes, **given):
    return [{"code": code} | given for code in codes]


FINISHES = script(0, 0, 0)


@pytest.mark.parametrize(("codes", "left"), GOES_ON.items())
def test_who_starts_again_does_not_depend_on_the_order(codes, left):
    """Neither on that of the numbers, nor on that of the deaths."""
    for order in ORDERS:
        for seconds in ((1, 1, 1), (1, 2, 3), (3, 2, 1)):
            deaths = [{"code": codes[k], "seconds": s} for k, s in zip(order, seconds, strict=True)]
            run = Run(deaths, FINISHES, names=[("abc")[k] for k in order])
            assert run.run() == 0
            assert [sorted(started) for started in run.started] == [list("abc"), list(left)]


def test_members_get_another_chance_and_the_run_gives_up():
    dies = script(0, KILLED, 0)
    run = Run(dies, dies, FINISHES, again=1)
    assert run.run() == 0 and run.started == ["abc", "abc", "ac"]
    assert Run(script(KILLED, KILLED, KILLED)).run() == 1
    run = Run(*100 * [script(PEER_LOST, PEER_LOST, PEER_LOST)])
    assert run.run() == 1 and run.started == ["abc"] * 23


def test_a_host_that_is_silent_after_a_death_costs_the_patience():
    run = Run([{"code": KILLED}, {"code": PEER_LOST}, {"code": None}], FINISHES, patience_s=50)
    assert run.run() == 0 and run.started == ["abc", "b"]
    assert run.began[1] == pytest.approx(1 + 50, abs=1)


def test_survivors_are_told_and_need_not_wait():
    """Also one that waits in the start-up barrier, where nobody watches the others."""
    waits = {"code": None, "on_line": PEER_LOST}
    run = Run([waits, {"code": KILLED}, waits], FINISHES)
    assert run.run() == 0 and run.started == ["abc", "ac"] and run.began[1] < 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(
    ("answer", "code"), [(77, None), (143, 143), (None, None)], ids=["ends", "saves", "is killed"]
)
def test_an_interruption_is_passed_on_and_ends_the_run(number, answer, code):
    run = Run(2 * [{"code": None, "on_signal": answer, "on_line": 1}], names="ab", stop_s=100)
    run.supervisor.stop(number)
    assert run.run() == (128 + number if code is None else code)
    passed = signal.SIGTERM if number == signal.SIGHUP else number
    assert [process.signals for process in run.processes] == [[passed]] * 2
    assert [process.lines for process in run.processes] == [[]] * 2  # they may all save
    assert run.started == ["ab"] and (run.clock.now > 99) == (answer is None)


# --- The command ----------------------------------------------------------------------------------


def test_hosts_and_the_command_for_them():
    options, program = supervise._parse(
        ["--hosts", "a=10.0.0.1,b", "--via", "ssh {host} 'cd /x &&'", "--", str(ROOT / "train.py")]
    )
    first, second = supervise._members(options)
    assert (first.address, second.address) == ("10.0.0.1", "b")
    assert second.argv == ["ssh", "b", "cd /x &&"] and program == [str(ROOT / "train.py")]


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path, tiny_data, capsys):
    """As it is a folder; nothing starts."""
    workdir = tmp_path / "run"
    (workdir / "process-1.log").mkdir(parents=True)
    config = tiny.write_config(tmp_path / "config_file.py", tiny_data)
    program = ["--", str(ROOT / "train.py"), "--config", str(config), f"--workdir={workdir}"]
    assert supervise.main(["--processes", "2", *program]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(workdir) in said


# In place of train.py; process 0 ends on SIGTERM as train.py does, the others ignore it.
STAND_IN = """
import os, pathlib, signal, sys, time
from decent_jax.cluster import rendezvous, supervise
flags = dict(flag.split("=", 1) for flag in sys.argv[1:] if "=" in flag)
index, count = (int(flags[f"--config.cluster.{k}"]) for k in ("process_id", "num_processes"))
if index:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def end(lost):
    print(lost, flush=True)
    os._exit(75)

supervise.end_with_supervisor(2, end)
known = os.environ[rendezvous.SECRET]
path = pathlib.Path(flags["--workdir"], f"{index} of {count}")
path.with_suffix(".new").write_text(f"{os.getpid()} {known}")
path.with_suffix(".new").rename(path)
time.sleep(600)
"""


def test_processes_start_again_and_end_with_their_supervisor(start_process, tmp_path, tiny_data):
    """One is killed, and the others learn of it at once; then the supervisor is killed."""
    program = tmp_path / "program.py"
    program.write_text(STAND_IN)
    config = tiny.write_config(tmp_path / "config_file.py", tiny_data)
    flags = ["--config", config, f"--workdir={tmp_path}", "--config.num_replicas=3"]
    flags += ["--config.batch_size=6", "--config.schedule=static_exp"]
    process = start_process([*SUPERVISE, 3, "--", program, *flags])

    def wait_for(count):
        files = [tmp_path / f"{k} of {count}" for k in range(count)]
        until(lambda: all(path.exists() for path in files), process)
        return zip(*(path.read_text().split() for path in files), strict=True)

    pids, secrets = wait_for(3)
    assert len(set(secrets)) == 1 and len(secrets[0]) == 64
    os.kill(int(pids[2]), signal.SIGKILL)
    pids, _ = wait_for(2)
    process.kill()
    process.wait()
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids), seconds=60)
    first, second = (tmp_path / "process-1.log").read_text().splitlines()
    assert first.startswith("process 2 ") and "SIGKILL" in first
    assert second == "program.py: the supervisor is gone: stopping"


def test_a_standard_input_that_is_no_supervisor_ends_nothing():
    """Such as that of a launcher which does not pass the pipe on."""
    program = "import threading; from decent_jax.cluster import supervise; "
    program += "supervise.end_with_supervisor(0.1, print); "
    program += "[one.join() for one in threading.enumerate()[1:]]; print('alive')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"DECENT_JAX_SUPERVISED": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("alive\n", "")


# --- A host is lost -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_two_processes_is_killed_and_the_other_ends_the_run(
    start_process, tmp_path, compile_once
):
    """It goes on with half of the four replicas, where the last checkpoint was."""
    path, workdir = tiny.write_config(tmp_path / "config_file.py"), tmp_path / "run"
    changes = {"num_replicas": 4, "batch_size": 8, "schedule": "static_exp", "steps": 10}
    changes |= {"checkpoint.every": 3, "checkpoint.keep": 9, "log.every": 1, "mesh.devices": 0}
    changes["data.pause"] = 0.25  # time to die in
    flags = ["--config", path, "--workdir", workdir]
    flags += [f"--config.{name}={value}" for name, value in changes.items()]
    process = start_process([*SUPERVISE, 2, "--", ROOT / "train.py", *flags], **compile_once)
    until((workdir / "checkpoints" / "3").exists, process)
    pids = re.search(r"2 processes started \(pids (.*?)\)", process.words.read_text())[1]
    os.kill(int(pids.split(", ")[1]), signal.SIGKILL)
    assert process.wait(timeout=300) == 0, process.words.read_text()[-3000:]
    words = process.words.read_text()
    assert "train.py: process 1 (first 1) was lost: it died of SIGKILL; " in words
    assert "Traceback" not in words
    step = int(re.search(r"resuming after step (\d+)", words)[1])
    assert 3 <= step < 10
    summary = tiny.summary(workdir)
    assert (summary["num_replicas"], summary["processes"], summary["steps"]) == (2, 1, 10)
    assert [row["step"] for row in tiny.rows(workdir)] == list(range(1, 11))
    # The data goes on where the last checkpoint was: no example is left out.
    before, after = (saved_model.load_replicas(workdir, k).meta["examples"] for k in (step, 10))
    assert before == 8 * step and after == before + 4 * (10 - step)
