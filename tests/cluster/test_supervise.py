"""The supervisor: which processes start again, with which config, and that none outlives it."""

import itertools
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import tiny
from refusals import refused
from several import until

from decent_jax.cluster import rendezvous
from decent_jax.cluster.supervise import PLACE, Member, Supervisor, verdict
from decent_jax.commands import supervise
from decent_jax.ground.errors import PEER_LOST
from decent_jax.train.config import parse

ROOT = Path(__file__).resolve().parents[2]
SUPERVISE = ["-m", "decent_jax.commands.main", "supervise", "--processes"]
KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT

# --- What changes with the number of processes ----------------------------------------------------


def test_replicas_keep_their_share():
    config = tiny.config("DATA", num_replicas=8, batch_size=32, schedule="one_peer_exp")
    config.update(eval={"batch_size": 16}, mesh={"devices": 8})
    assert supervise.fit(parse(config), 4, 4) == {}
    wanted = {"num_replicas": 6, "batch_size": 24, "eval.batch_size": 12, "mesh.devices": 6}
    assert supervise.fit(parse(config), 4, 3) == wanted
    with refused("num_replicas", 8):
        supervise.fit(parse(config), 3, 3)


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
# Those of a, b and c that were lost.
GOES_ON = {
    (PEER_LOST, KILLED, PEER_LOST): "b",
    (1, KILLED, PEER_LOST): "b",  # could not write a checkpoint with the dead one
    (2, KILLED, PEER_LOST): "b",  # waited in vain for the dead one
    (1, 128 + signal.SIGKILL, ABORTED): "b",
    (0, KILLED, 0): "b",
    (PEER_LOST, 255, 128 + signal.SIGABRT): "b",  # ssh that lost its host
    (None, PEER_LOST, PEER_LOST): "a",  # a host that fell silent
    (None, KILLED, ABORTED): "ab",
    (PEER_LOST, PEER_LOST, PEER_LOST): "",  # a network that broke for a while
}
ORDERS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize(("codes", "code"), ENDS.items())
def test_codes_that_end_the_run_in_any_order(codes, code):
    assert {verdict([codes[k] for k in order]) for order in ORDERS} == {code}


# --- The supervisor, with processes of a script and its clock -------------------------------------


class Clock:
    """Calls the second part of ``at`` when it is the second of the first."""

    def __init__(self):
        self.now, self.at = 0.0, (math.inf, None)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        moment, call = self.at
        if self.now >= moment:
            self.at = math.inf, None
            call()


class Scripted:
    """The agent of a member, with processes that end as a script says.

    A script has for each process its code (None: never), the second after which it ends, the code
    with which it ends at a signal, the step it reaches, and whether it takes its agent with it.
    """

    def __init__(self, clock, ready=True):
        self.clock, self.ready, self.gone, self.here = clock, ready, False, ready
        self.signals, self.closed, self.reached = [], False, -1

    def start(self, code, seconds=1.0, on_signal=None, reached=-1, gone=False, silent=False):
        self.code, self.ends = code, self.clock.now + seconds
        self.on_signal, self.reached, self.silent, self._takes = on_signal, reached, silent, gone
        self.signals = []

    def poll(self):
        if self.clock.now < self.ends:
            return None
        self.gone = self._takes
        return self.code

    def imported(self):
        self.ready = True

    def is_ready(self):
        return self.ready and not self.gone

    def is_here(self):
        return self.here and not self.gone

    def is_gone(self):
        return self.gone

    def signal(self, number):
        self.signals.append(number)
        if self.poll() is not None or self.silent:
            return
        if number == signal.SIGKILL:
            self.code, self.ends = KILLED, self.clock.now
        elif self.on_signal is not None:
            self.code, self.ends = self.on_signal, self.clock.now

    def close(self):
        self.closed = self.gone = True


class Run:
    """A supervisor of members a, b, ... whose processes end as the script of each attempt says.

    A script is a list of arguments of `Scripted.start`, one for each process. ``spare`` members
    stand at the end of the names. The agents of those in ``dead`` end, those of ``silent`` hosts
    never begin and those of ``slow`` ones need 20 s when they are connected again.
    """

    def __init__(self, *scripts, names="abc", spare=0, dead="", silent="", slow="", **options):
        self.clock, self.started, self.said, self.began = Clock(), [], [], []
        self.agents, self.connected = [], []

        def connect(member):
            self.connected.append(member.name)
            again = self.connected.count(member.name) > 1
            agent = Scripted(self.clock, not (again and member.name in dead + silent + slow))
            agent.gone = again and member.name in dead
            if again and member.name in slow:
                agent.here, self.clock.at = True, (self.clock.now + 20, agent.imported)
            self.agents.append(agent)
            return agent

        def start(members, attempt):
            self.began.append(self.clock.now)
            self.started.append("".join(member.name for member in members))
            self.agents_now = [member.agent for member in members]
            for agent, one in zip(self.agents_now, scripts[attempt], strict=False):
                agent.start(**one)

        options = {"patience_s": 90, "say": self.said.append} | options
        members = [Member(name, name, []) for name in names]
        count = len(members) - spare
        self.supervisor = Supervisor(members, count, connect, start, clock=self.clock, **options)

    def run(self):
        code = self.supervisor.run()
        assert all(agent.closed for agent in self.agents)
        return code


def script(*codes, **given):
    return [{"code": code} | given for code in codes]


FINISHES = script(0, 0, 0)


@pytest.mark.parametrize(("codes", "lost"), GOES_ON.items())
def test_all_start_again_in_any_order_of_the_deaths(codes, lost):
    """The order of the numbers does not matter, and nobody waits for the patience."""
    for order in ORDERS:
        for others in (1, 2):  # the second at which those end that notice
            deaths = [
                {"code": codes[k], "silent": codes[k] is None}
                | {"seconds": 1 if "abc"[k] in lost else others}
                for k in order
            ]
            run = Run(deaths, FINISHES, names=["abc"[k] for k in order])
            assert run.run() == 0 and run.began[1] < 15
            assert [sorted(started) for started in run.started] == [list("abc")] * 2
            assert {name for name in "abc" if f"({name}) " in " ".join(run.said)} == set(lost)
            silent = {"abc"[k] for k in order if codes[k] is None}  # its agent may be, too
            assert {name for name in "abc" if run.connected.count(name) == 2} == silent


B_DIES, C_DIES = script(0, KILLED, 0), script(0, 0, KILLED)
FURTHER = [script(0, KILLED, 0, reached=step) for step in (10, 20, 20, 30, 30)]
LOST = [{"code": 0}, {"code": 255, "gone": True}, {"code": 0}]  # b, with its agent
AGAIN, SPARE = {"again": 1}, {"names": "abcd", "spare": 1}
# The deaths of each attempt but the last, options, who takes part in each attempt, and the seconds
# between which the second one begins.
ATTEMPTS = {
    "who dies again is left out": ([B_DIES, B_DIES], AGAIN, "abc abc ac"),
    "but where the run got further": (FURTHER, AGAIN, 6 * "abc "),
    "until it gets no further": ([*FURTHER, FURTHER[-1]], AGAIN, 6 * "abc " + "ac"),
    "a spare host instead": ([B_DIES, B_DIES], AGAIN | SPARE, "abc abc adc"),
    "who was left out is no spare host": (
        [B_DIES, B_DIES, C_DIES, C_DIES],
        AGAIN | SPARE,
        "abc abc adc adc ad",
    ),
    "a spare host for a lost one": ([LOST], SPARE | {"dead": "b"}, "abc adc", 0, 3),
    "for a silent one": ([LOST], SPARE | {"silent": "b"}, "abc adc", 3, 12),
    "no spare host": ([LOST], {"dead": "b", "patience_s": 50}, "abc ac", 50, 52),
    # Its memory has the copies, also where the new agent needs a while.
    "an agent alone died": ([LOST], {}, "abc abc"),
    "a slow agent": ([LOST], {"slow": "b"}, "abc abc"),
    "an agent beside a spare host": ([LOST], SPARE, "abc abc"),
    "a slow agent beside a spare host": ([LOST], SPARE | {"slow": "b"}, "abc abc"),
    # Also one that waits in the start-up barrier, where nobody watches the others.
    "survivors are ended at once": ([script(None, KILLED, None)], {}, "abc abc", 0, 2),
}


@pytest.mark.parametrize("case", ATTEMPTS)
def test_who_takes_part_after_deaths(case):
    deaths, options, started, *seconds = ATTEMPTS[case]
    run = Run(*deaths, FINISHES, **options)
    assert run.run() == 0 and run.started == started.split()
    least, most = seconds or (0, math.inf)
    assert least <= run.began[1] <= most
    if "agent" in case:
        assert run.connected == [*options.get("names", "abc"), "b"]
    if case == "no spare host":
        assert run.connected.count("b") == pytest.approx(50, abs=2)  # once per second


def test_a_run_whose_processes_all_die_again_and_again_gives_up():
    assert Run(script(KILLED, KILLED, KILLED), again=0).run() == 1
    run = Run(*100 * [script(PEER_LOST, PEER_LOST, PEER_LOST)])
    assert run.run() == 1 and run.started == ["abc"] * 21


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(
    ("answer", "code"), [(77, None), (143, 143), (None, None)], ids=["ends", "saves", "is killed"]
)
def test_an_interruption_is_passed_on_and_ends_the_run(number, answer, code):
    run = Run(2 * [{"code": None, "on_signal": answer}], names="ab")
    run.clock.at = 0.5, lambda: run.supervisor.stop(number)
    assert run.run() == (1 if code is None else code)  # 143 means that all have saved
    passed = signal.SIGTERM if number == signal.SIGHUP else number
    assert [agent.signals for agent in run.agents] == [[passed]] * 2  # they may all save
    assert run.started == ["ab"] and (run.clock.now > 599) == (answer is None)


# --- The command ----------------------------------------------------------------------------------


def test_what_each_host_is_told_to_start(monkeypatch, tmp_path):
    """At first, and once b is left out: another port, two thirds of the replicas."""
    made = Mock(return_value=SimpleNamespace(run=lambda: 0, stop=None))
    monkeypatch.setattr(supervise.signal, "signal", Mock())
    monkeypatch.setattr(supervise, "AgentLink", lambda argv, _: argv)
    monkeypatch.setattr(supervise, "Supervisor", made)
    monkeypatch.setenv(rendezvous.SECRET, 32 * "s")
    config, run = tiny.write_config(tmp_path / "config_file.py"), tmp_path / "run"
    program = [str(ROOT / "train.py"), "--config", str(config), f"--workdir={run}"]
    program += ["--config.num_replicas=6", "--config.batch_size=12"]
    hosts = ["--hosts", "a=10.0.0.1,b,c", "--spares", "d", "--port", "7000", "--again", "2"]
    hosts += ["--via", "ssh {host} 'cd /x &&'"]
    assert supervise.main([*hosts, "--", *program]) == 0
    (members, count, connect, start), given = made.call_args
    assert [member.name for member in members] == [*"abcd"]
    assert (count, given["again"], given["patience_s"]) == (3, 2, 2 * 30 + 30)
    *via, command = connect(members[1])
    assert (
        via == ["ssh", "b", "cd /x &&"] and " decent_jax.cluster.agent decent_jax.train" in command
    )
    for member in members:
        member.agent = Mock()
    fewer = {"--config.batch_size=8", "--config.num_replicas=4"}
    for names, attempt, place, more in (
        ("abc", 0, "10.0.0.1:7000", set()),
        ("ca", 103, "c:7003", fewer),
    ):
        start([members["abc".index(name)] for name in names], attempt)
        for k, name in enumerate(names):
            flags, variables, log = members["abc".index(name)].agent.start.call_args[0]
            own = {"coordinator": place, "num_processes": len(names), "process_id": k}
            own = {f"--config.cluster.{field}={value}" for field, value in own.items()}
            assert flags[: len(program)] == program and {*flags[len(program) :]} == own | more
            assert variables == {rendezvous.SECRET: 32 * "s", PLACE: name}
            assert log == (run / f"process-{k}.log" if k else None)


# In place of train.py; process 0 ends on SIGTERM as train.py does, the others ignore it.
STAND_IN = """
import os, pathlib, signal, sys, time
from decent_jax.cluster import rendezvous, supervise
flags = dict(flag.split("=", 1) for flag in sys.argv[1:] if "=" in flag)
index, count = (int(flags[f"--config.cluster.{k}"]) for k in ("process_id", "num_processes"))
if index:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
supervise.end_with_supervisor(2)
known = os.environ[rendezvous.SECRET]
path = pathlib.Path(flags["--workdir"], f"{index} of {count}")
path.with_suffix(".new").write_text(f"{os.getpid()} {known}")
path.with_suffix(".new").rename(path)
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_processes_start_again_and_end_with_their_supervisor(start_process, tmp_path, tiny_data):
    """One is killed, then an agent, then the supervisor."""
    program = tmp_path / "program.py"
    program.write_text(STAND_IN)
    config = tiny.write_config(tmp_path / "config_file.py", tiny_data)
    flags = ["--config", config, f"--workdir={tmp_path}", "--config.num_replicas=2"]
    process = start_process([*SUPERVISE, 2, "--", program, *flags])
    files = [tmp_path / f"{k} of 2" for k in range(2)]

    def pids_once_all_have_started():
        until(lambda: all(path.exists() for path in files), process)
        pids, secrets = zip(*(path.read_text().split() for path in files), strict=True)
        assert len(set(secrets)) == 1 and len(secrets[0]) == 64
        for path in files:
            path.unlink()
        return list(map(int, pids))

    pids = pids_once_all_have_started()
    os.kill(pids[1], signal.SIGKILL)
    pids = pids_once_all_have_started()
    psutil.Process(psutil.Process(pids[1]).ppid()).kill()  # its agent: a new one takes over
    until(lambda: not psutil.pid_exists(pids[1]), process)  # before another one needs its devices
    pids = pids_once_all_have_started()
    process.kill()
    process.wait()
    until(lambda: not any(map(psutil.pid_exists, pids)), seconds=60)
    words = (tmp_path / "process-1.log").read_text()
    assert words.count("started\n") == 3
    assert words.endswith("program.py: the supervisor is gone: stopping\n")


@pytest.mark.parametrize("threads", [0, 1])
def test_a_process_is_a_fork_only_of_an_agent_without_threads(threads, tmp_path, monkeypatch):
    """A lock that a thread holds while its process is forked is never released in the fork."""
    module = (
        "import threading; thread = threading.Thread(target=threading.Event().wait, daemon=True)"
    )
    module += "; thread.start()" * threads
    (tmp_path / "imported_by_agent.py").write_text(module)
    (tmp_path / "program.py").write_text(
        "import os, sys; from decent_jax.cluster import supervise; supervise.reached(7); "
        "sys.exit(30 + ('imported_by_agent' in sys.modules) + len(sys.argv))"
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    agent = supervise._connect(["imported_by_agent"], Member("0", "localhost", []))
    try:
        until(agent.is_ready)
        agent.start([str(tmp_path / "program.py"), "argument"], {}, None)
        until(lambda: agent.poll() is not None)
        assert (agent.poll(), agent.reached) == (32 if threads else 33, 7)
    finally:
        agent.close()


@pytest.mark.parametrize(("said", "code"), [("", 0), ("supervised\n", -signal.SIGTERM)])
def test_only_a_supervisor_that_goes_ends_a_process_which_may_save(said, code):
    """A standard input without a greeting is that of a launcher which does not pass the pipe on."""
    program = "import threading; from decent_jax.cluster import supervise; "
    program += "supervise.end_with_supervisor(0.1); "
    program += "[one.join() for one in threading.enumerate()[1:]]; print('alive')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"DECENT_JAX_SUPERVISED": "1"},
        input=said,
        start_new_session=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code and (code or (done.stdout, done.stderr) == ("alive\n", ""))
