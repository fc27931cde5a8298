"""What goes wrong between processes is one sentence that names the process, in bounded time."""

import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import tiny
from several import free_port, said

from decent_jax.cluster import rendezvous, watch
from decent_jax.cluster import start as cluster
from decent_jax.errors import PEER_LOST
from decent_jax.train import ConfigError

ROOT = Path(__file__).resolve().parents[1]
HEARTBEAT_S = 4


# --- Meeting, in threads ------------------------------------------------------------------------


def meet(facts, *, count=None, indices=None, timeout_s=20, port=None):
    """What every process got: hosts, or the sentence of its ConfigError."""
    port = port or free_port()
    count = len(facts) if count is None else count
    results = {}

    def one(place, index):
        try:
            address = f"localhost:{port}"
            results[place] = rendezvous.meet(address, count, index, facts[place], timeout_s)
        except ConfigError as error:
            results[place] = str(error)

    indices = range(len(facts)) if indices is None else indices
    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(indices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[place] for place in range(len(facts))]


def test_processes_that_agree_learn_their_hosts():
    assert meet([{"jax": "1"}] * 3) == [[socket.gethostname()] * 3] * 3


def test_all_hear_what_differs():
    facts = [{"jax": "1", "config.seed": "0"}, {"jax": "1", "config.seed": "7"}]
    here = socket.gethostname()
    said = f"config.seed: 0 on process 0 ({here}), 7 on process 1 ({here})"
    assert meet(facts) == [f"the processes differ in {said}"] * 2


def test_many_differences_are_counted():
    sentence = rendezvous.difference([{f"f{k}": v for k in range(9)} for v in "ab"], ["x", "y"])
    assert sentence.endswith("in f2: a on process 0 (x), b on process 1 (y); and in 6 more")


def test_the_process_that_does_not_come_is_named():
    began = time.monotonic()
    results = meet([{}, {}], count=4, indices=[0, 2], timeout_s=1.5)
    assert time.monotonic() - began < 10
    for result in results:
        assert result.startswith("processes 1 and 3 of 4 did not come within 1.5 s")


def test_process_0_that_does_not_come():
    [result] = meet([{}], count=2, indices=[1], timeout_s=1)
    assert "process 0 does not answer at localhost:" in result and "Connection refused" in result


def test_two_processes_of_one_number():
    results = meet([{}, {}, {}], indices=[0, 1, 1])
    assert any("say that they are process 1" in result for result in results)


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        [result] = meet([{}], port=server.getsockname()[1])
    assert "cannot listen on port" in result and "Address already in use" in result


def test_strangers_at_the_port_are_ignored():
    port = free_port()

    def knock():
        time.sleep(0.3)
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n[1]\n")

    thread = threading.Thread(target=knock)
    thread.start()
    facts = [{"jax": "1"}] * 2
    late = threading.Timer(1.0, rendezvous.meet, (f"localhost:{port}", 2, 1, facts[0], 20))
    late.start()
    assert len(rendezvous.meet(f"localhost:{port}", 2, 0, facts[0], 20)) == 2
    thread.join()
    late.join()


def test_a_host_name_that_does_not_exist(monkeypatch):
    monkeypatch.setattr(rendezvous, "_RESOLVE_S", 0.5)
    with pytest.raises(ConfigError, match=r"host 'no-such-host.invalid' of cluster.coordinator"):
        rendezvous.meet("no-such-host.invalid:9876", 2, 1, {}, 60)


@pytest.mark.parametrize("address", ["host", "host:", "host:port", "host:99999", ":80"])
def test_addresses_that_are_none(address):
    with pytest.raises(ConfigError, match="must be host:port"):
        rendezvous.meet(address, 2, 0, {}, 1)


@pytest.mark.parametrize("wanted", ["", "lo", "eth,lo", "=lo", "^eth0", "l"])
def test_network_cards_that_are_there(monkeypatch, wanted):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    cluster.check_interface(wanted)


@pytest.mark.parametrize("wanted", ["ib0", "=l", "^lo,eth", "ib,en"])
def test_network_cards_that_are_not(monkeypatch, wanted):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with pytest.raises(ConfigError, match=r"has no such network card, only lo, eth0$"):
        cluster.check_interface(wanted)


# --- What jax says about a lost process ---------------------------------------------------------

SILENT = """F1121 18:17:05.6 26181 client.h:80] Terminating process because the JAX distributed \
service detected fatal errors. absl::Status: UNAVAILABLE: The following tasks are unhealthy \
(stopped sending heartbeats):
{}
The tasks have crashed. Check the task logs for an earlier error."""


@pytest.mark.parametrize("task", ["{}", "/job:jax_worker/replica:0/task:{}"])
def test_silent_processes_are_named(task):
    hosts = ["a", "b", "c"]
    one = watch.explain(SILENT.format(task.format(2)), hosts, 30)
    assert one.startswith("process 2 (c) was lost: no sign of life for 30 s;")
    two = watch.explain(SILENT.format("\n".join(task.format(k) for k in (1, 2))), hosts, 30)
    assert two.startswith("processes 1 (b) and 2 (c) were lost:")


def test_other_ends_of_the_service():
    text = "absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. Either"
    assert watch.explain(text, ["a", "b"], 30).startswith("process 0 (a) was lost: its connection")
    text = "Shutdown barrier has failed. Barrier result: Task 1 heartbeat timeout. This indicates"
    assert watch.explain(2 * text, ["a", "b"], 30).startswith("process 1 (b) was lost: no sign")
    text = "absl::Status: INTERNAL: something new"
    sentence = "another process was lost: INTERNAL: something new"
    assert watch.explain(text, ["a", "b"], 30) == sentence


def test_errors_of_an_exchange_are_told_from_others():
    assert watch.concerns_an_exchange(ValueError("UNKNOWN: Gloo collective permute failed: Read"))
    assert not watch.concerns_an_exchange(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert not watch.concerns_an_exchange(ValueError("connection"))
    wrapped = RuntimeError("a checkpoint could not be written")
    wrapped.__cause__ = RuntimeError("DEADLINE_EXCEEDED: Barrier timed out")
    assert watch.concerns_an_exchange(wrapped)


# --- Processes ----------------------------------------------------------------------------------

# What train.py does, without its model: joins, and exchanges until somebody is watch.
DRIVER = """
import sys, time
import jax, numpy as np
from jax.sharding import PartitionSpec as P
sys.path.insert(0, sys.argv[1])
import tiny
from several import free_port, said
from decent_jax.cluster import start as cluster, watch
from decent_jax.errors import PEER_LOST, PeerLost

config = tiny.config("DATA")
config.cluster.update(coordinator=sys.argv[2], num_processes=3, process_id=int(sys.argv[3]))
config.cluster.heartbeat_s = int(sys.argv[4])
cluster.start(config)
mesh = jax.make_mesh((3,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
send = lambda x: jax.lax.ppermute(x, "r", [(0, 1), (1, 2), (2, 0)])
send = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=P("r"), out_specs=P("r")))
x = np.zeros((1, 100_000), np.float32)
x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P("r")), x)
code = 0
try:
    with cluster.lost_peers_told():
        for step in range(100_000):
            x = jax.block_until_ready(send(x))
            if step == 3:
                print("ready", flush=True)
            if sys.argv[3] == sys.argv[5] and step == 20:
                raise ValueError("a mistake in the program of one process")
            time.sleep(0.02)
except PeerLost as error:
    code = PEER_LOST
watch.leave(code)
"""


def start_three(start_process, tmp_path, who_fails=-1):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    address = f"localhost:{free_port()}"
    common = [driver, ROOT / "tests", address]
    group = [start_process([*common, index, HEARTBEAT_S, who_fails]) for index in range(3)]
    end = time.monotonic() + 120
    while not all("ready" in process.words.read_text() for process in group):
        assert time.monotonic() < end and all(process.poll() is None for process in group), "".join(
            process.words.read_text() for process in group
        )
        time.sleep(0.05)
    return group


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number", "why"),
    [
        (2, signal.SIGKILL, f"no sign of life for {HEARTBEAT_S} s"),
        (1, signal.SIGSTOP, f"no sign of life for {HEARTBEAT_S} s"),
        (0, signal.SIGKILL, "its connection broke"),
    ],
)
def test_a_process_that_dies_is_named_by_the_others(start_process, tmp_path, victim, number, why):
    group = start_three(start_process, tmp_path)
    group[victim].send_signal(number)
    began = time.monotonic()
    others = [process for process in group if process is not group[victim]]
    codes = [process.wait(timeout=60) for process in others]
    print(f"\nafter {time.monotonic() - began:.1f} s")
    sentence = f"driver.py: process {victim} ({socket.gethostname()}) was lost: {why}; "
    sentence += "the same command resumes from the last checkpoint\n"
    assert [said(process) for process in others] == [sentence] * 2
    assert codes == [PEER_LOST] * 2


@pytest.mark.slow
def test_a_process_that_fails_on_its_own_does_not_wait_for_the_others(start_process, tmp_path):
    group = start_three(start_process, tmp_path, who_fails=1)
    assert group[1].wait(timeout=60) == 1
    assert "ValueError: a mistake" in said(group[1])
    codes = [group[k].wait(timeout=60) for k in (0, 2)]
    assert codes == [PEER_LOST] * 2
    for k in (0, 2):
        assert said(group[k]).startswith(f"driver.py: process 1 ({socket.gethostname()}) was lost")
        assert said(group[k]).count("\n") == 1


def train_flags(tmp_path, tiny_data, index, count, port):
    path = tiny.write_config(tmp_path / "config_file.py", tiny_data)
    cluster = f"--config.cluster.coordinator=localhost:{port}"
    flags = [ROOT / "train.py", "--config", path, "--workdir", tmp_path / "run", cluster]
    return [
        *flags,
        f"--config.cluster.num_processes={count}",
        f"--config.cluster.process_id={index}",
    ]


@pytest.mark.slow
def test_train_refuses_different_configs(start_process, tmp_path, tiny_data):
    port = free_port()
    group = []
    for index in range(2):
        flags = train_flags(tmp_path, tiny_data, index, 2, port)
        group.append(start_process([*flags, f"--config.learning_rate=0.0{index + 1}"]))
    assert [process.wait(timeout=60) for process in group] == [2, 2]
    here = socket.gethostname()
    for process in group:
        assert said(process).endswith(
            "train.py: the processes differ in config.learning_rate: 0.01 on process 0 "
            f"({here}), 0.02 on process 1 ({here})\n"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_train_names_a_host_that_never_comes(start_process, tmp_path, tiny_data):
    flags = train_flags(tmp_path, tiny_data, 0, 2, free_port())
    process = start_process([*flags, "--config.cluster.timeout_s=2"])
    assert process.wait(timeout=60) == 2
    assert "train.py: process 1 of 2 did not come within 2 s" in process.words.read_text()
    assert "Traceback" not in process.words.read_text()
