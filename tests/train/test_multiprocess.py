"""Two real processes on this machine, over gloo: the numbers of one process; one of them dies.

The groups of three in test_faults show that all others notice a death.
"""

import json
import signal
import socket

import jax
import numpy as np
import pytest
import tiny
from several import children_of, cluster_flags, finish, free_port, starting, until

from decent_jax import topology
from decent_jax.ground.errors import PEER_LOST
from decent_jax.plan.plan_file import Plan
from decent_jax.train import saved_model

STEPS = 8
CHANGES = {"steps": STEPS, "eval": {"every": 4}}
FLAGS = [f"--config.steps={STEPS}", "--config.eval.every=4", "--config.mesh.devices=0"]
FLAGS += ["--config.checkpoint.every=0", "--config.cluster.heartbeat_s=5"]
SAVES = ["--config.checkpoint.every=2"]
SLOW = [*SAVES, "--config.data.pause=0.5"]  # steps long enough to die in
# Bytes swapped in pairs.
INT8 = {"schedule": "hypercube", "codec": "int8"}
# Reduce-scatter, permutes of parts and all-gather, two replicas per node.
NODES = {"schedule": "hierarchical", "replicas_per_node": 2}
BOUND_S = 40  # seconds within which the others end after one has died

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# What train.py does, several times in the same processes, until one run fails. The checkpoints of
# the run "written" are finished only once the test allows it.
SEVERAL_RUNS = """
import json, os, sys, time
from decent_jax.checkpoints import on_disk
from decent_jax.commands import main as command
from decent_jax.plots import runs
runs.plot_runs = lambda paths: None  # saves a second each
finish = on_disk.finish
def finish_once_allowed(draft, *given):
    run = draft.parent.parent
    if run.name == "written":
        (run / "writing").touch()
        while not (run / "allowed").exists():
            time.sleep(0.05)
    finish(draft, *given)
on_disk.finish = finish_once_allowed
sys.argv[0] = "train.py"  # its name stands before what the watch says
for os.environ["EXTRA_POINTS"], *argv in json.loads(sys.argv[1]):
    code = command.train(argv + sys.argv[2:], "train.py")
    print("ended with", code, flush=True)
    if code not in (0, 2, 143):
        command.leave(code)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory, compile_once):
    """Starts processes that do one run after the other."""
    folder = tmp_path_factory.mktemp("processes")
    path = str(tiny.write_config(folder / "config_file.py"))
    with starting(folder) as start_one:

        def start(*runs, **variables):
            """A run is (folder, flags, training points besides), {} in which is the process."""
            environment = compile_once | {"JAX_NUM_CPU_DEVICES": "2"} | variables
            port, group = free_port(), []
            for index in range(2):
                each = (
                    [*(points or "0"), "--config", path, *FLAGS, "--workdir", str(workdir), *own]
                    for workdir, own, *points in runs
                )
                each = json.dumps([[word.format(index) for word in words] for words in each])
                program = ["-c", SEVERAL_RUNS, each, *cluster_flags(port, 2, index)]
                group.append(start_one(program, **environment))
            return group

        yield start


@pytest.fixture(scope="module")
def alone(tmp_path_factory, compile_once):
    """``alone(name, **changes)``: the run of one process with one device."""
    folder = tmp_path_factory.mktemp("alone")
    return lambda name, **changes: tiny.run(tiny.waves(**CHANGES, **changes), folder / name)


@pytest.fixture(scope="module")
def two(start, tmp_path_factory):
    """(folder of runs, flags of "whole" and "killed", output of each process) of two processes.

    The first two are refused: each process has a folder, or data, of its own. A plan puts replicas
    out of the order of the processes, so that those of a node are in both. In the last run,
    "killed", process 1 is.
    """
    folder = tmp_path_factory.mktemp("two")
    here = [f"{socket.gethostname()}/{k}" for k in (2, 0, 3, 1)]

    def planned(name, **changes):
        replicas_per_node = changes.get("replicas_per_node", 1)
        schedule = topology.make(changes["schedule"], 4, replicas_per_node=replicas_per_node)
        Plan(tuple(here), schedule).save(folder / f"{name}.json")
        return [f"--config.cluster.plan={folder / name}.json"]

    whole = [*planned("int8", **INT8), f"--config.codec={INT8['codec']}"]
    runs = (folder / "whole", whole), (folder / "nodes", planned("nodes", **NODES))
    refused = (folder / "of {}", []), (folder / "of all", [], "{}")
    # As the folders differ, the secret comes from the environment.
    group = start(*refused, *runs, (folder / "killed", whole + SLOW), DECENT_JAX_SECRET=32 * "s")
    until((folder / "killed" / "checkpoints" / "2").exists, *group)
    group[1].send_signal(signal.SIGKILL)
    finish(group, [PEER_LOST, -signal.SIGKILL], BOUND_S)
    return folder, whole, [process.words.read_text() for process in group]


def test_nodes_in_both_processes_give_the_losses_of_one(two, alone):
    one = alone("nodes", **NODES)
    np.testing.assert_allclose(tiny.losses(two[0] / "nodes"), tiny.losses(one), rtol=1e-5)


def test_processes_that_differ_in_folder_or_data_are_refused_before_a_step(two):
    """Each has a folder of its own, or other data in it."""
    folder, _, words = two
    for said in words:
        for named in ("--workdir is another folder", "the training data: 400 records on process 0"):
            assert said.count(named) == 1, said
        assert f"401 records on process 1 ({socket.gethostname()})" in said
    assert not any((folder / f"of {k}" / "metrics.jsonl").exists() for k in ("0", "1", "all"))


def assert_same_model(together, alone):
    """The same losses, and the same end."""
    np.testing.assert_allclose(tiny.losses(together), tiny.losses(alone), rtol=1e-5)
    for row, other in zip(tiny.rows(together), tiny.rows(alone), strict=True):
        # Several processes also measure their messages.
        assert {name for name in row if not name.startswith("comm/")} == other.keys()
        if "eval/loss" in row:
            assert row["eval/loss"] == pytest.approx(other["eval/loss"], rel=1e-5)
    assert_same_end(together, alone)


def assert_same_end(together, alone):
    """The same consensus model, read by one process as export does."""
    params, _, meta = saved_model.restore_model(together, "last")
    wanted, *_ = saved_model.restore_model(alone, "last")
    assert meta["step"] == STEPS
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_two_processes_give_the_model_of_one(two, alone):
    folder, _, words = two
    assert_same_model(folder / "whole", alone("int8", **INT8))
    # Only process 0 writes, and prints where every replica lives.
    assert "process 0 of 2 (coordinator localhost:" in words[0]
    places = [line.split()[:2] for line in words[0].splitlines() if " cpu:" in line]
    assert places[-4:] == [["0", "1"], ["1", "0"], ["2", "1"], ["3", "0"]]
    assert "step 1/" in words[0] and "step 1/" not in words[1] and "validation" not in words[1]


@pytest.fixture(scope="module")
def again(start, two, tmp_path_factory):
    """(folder, output of both) of two processes started after the death of one.

    They resume "killed"; then two replicas of two devices train "whole", and three runs until
    signals come: "evaluated" in an evaluation, to one process; "written" while a checkpoint is
    written, to both and twice; "stopped" to one and to all that read data, far from the next row.
    Four replicas train "damaged", in which point 282 is for process 1 alone, after three steps.
    """
    folder = tmp_path_factory.mktemp("again")
    shards = ["--config.mesh.fsdp=2", "--config.num_replicas=2"]
    slow_eval = [*shards, "--config.data.slow_eval=0.3", "--config.eval.batch_size=2"]
    far = [*shards, *SLOW, "--config.log.every=1000", "--config.data.workers=1"]
    damaged = folder / "damaged", [*SAVES, "--config.data.damaged=282"]
    group = start(
        *((two[0] / "killed", two[1]), (folder / "whole", shards)),
        *((folder / "evaluated", slow_eval), (folder / "written", [*shards, *SLOW])),
        *((folder / "stopped", far), damaged),
    )
    until(lambda: "reading point" in group[1].words.read_text(), *group)
    group[1].send_signal(signal.SIGTERM)
    until((folder / "written" / "writing").exists, *group)
    for each in (*group, *group):
        each.send_signal(signal.SIGTERM)
    (folder / "written" / "allowed").touch()
    until((folder / "stopped" / "checkpoints" / "2").exists, *group)
    for each in [*children_of(group[0]), *children_of(group[1]), group[1]]:
        each.send_signal(signal.SIGTERM)
    return folder, finish(group, [1, 1], 180)


def test_one_of_two_processes_dies_and_both_resume(two, again):
    """The other ends with a sentence; both start again, to the state of the undisturbed run."""
    folder, _, words = two
    last = words[0].splitlines()[-1]
    assert last.startswith(f"train.py: process 1 ({socket.gethostname()}) was lost: ")
    assert "Traceback" not in words[0]
    killed, whole = folder / "killed", folder / "whole"
    assert "resuming after step" in again[1] and again[1].count("ended with 143") == 6
    tiny.assert_same_state(killed, whole, STEPS)
    assert [row["step"] for row in tiny.rows(killed)] == list(range(1, STEPS + 1))
    np.testing.assert_array_equal(tiny.losses(killed), tiny.losses(whole))


@pytest.fixture(scope="module")
def pair(alone):
    """The run of two replicas in one process."""
    return alone("pair", num_replicas=2)


def test_shards_in_two_processes(again, pair):
    assert "a replica is sharded over 2 devices" in again[1]
    assert_same_model(again[0] / "whole", pair)


@pytest.mark.parametrize("name", ["evaluated", "written", "stopped"])
def test_a_signal_ends_both_after_the_same_step(name, again, pair):
    """With one checkpoint, which one process resumes."""
    stopped, words = again[0] / name, again[1]
    step = tiny.saved_steps(stopped)[-1]
    assert step == 4 if name == "evaluated" else step < STEPS
    assert words.count(f"interrupted after step {step}; a checkpoint is saved") >= 2
    assert words.count("; a checkpoint is saved") == 6 and "Traceback" not in words
    assert not list(stopped.glob("checkpoints/.*.draft"))
    assert_same_end(tiny.run(tiny.waves(**CHANGES, num_replicas=2), stopped), pair)


# A signal arrives while the run is built.
EARLY = """
import os, signal, sys, time
from decent_jax.commands import main as command
from decent_jax.train import experiment
experiment.facts_of = lambda *_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60))
command.leave(command.train(sys.argv[1:], "train.py"))
"""


def test_a_signal_before_the_loop_ends_both(start_process, tmp_path):
    """jax would take it as it connects them, and tell nobody."""
    config, port = tiny.write_config(tmp_path / "c.py"), free_port()
    own = "-c", EARLY, "--config", config, "--workdir", tmp_path / "run", *FLAGS
    group = [start_process([*own, *cluster_flags(port, 2, index)]) for index in range(2)]
    assert finish(group, [143, 143], 100).count("interrupted; the same command resumes") == 2


def test_a_record_that_one_process_cannot_read_ends_both_with_its_sentence(again, start, tmp_path):
    """Of training, or of the first evaluation: point 5 is for process 1.

    The other one waits in an exchange, for 600 s if nobody tells it.
    """
    group = start((tmp_path / "damaged", [*SAVES, "--config.data.damaged_eval=5"]))
    of_evaluation = tmp_path, finish(group, [1, 1], 120)
    for (folder, words), point in ((again, 282), (of_evaluation, 5)):
        assert words.count(f"point {point} is damaged") == 2 and "Traceback" not in words
        assert f"process 1 ({socket.gethostname()}) failed" in words
        assert tiny.saved_steps(folder / "damaged") == [2]
