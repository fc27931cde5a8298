"""What goes wrong between processes is one sentence that names the process, in bounded time."""

import os
import signal
import socket
import subprocess
import sys

import jax
import pytest
import tiny
from refusals import refused, refuses
from several import free_port, said, until

from decent_jax import train
from decent_jax.cluster import rendezvous, watch
from decent_jax.cluster import start as cluster
from decent_jax.ground.errors import PEER_LOST, ConfigError
from decent_jax.train import config as config_lib

HEARTBEAT_S = 4


# --- Network cards -----------------------------------------------------------------------------


def test_network_cards(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    for wanted in ("", "lo", "eth,lo", "=lo", "^eth0", "l"):
        cluster.check_interface(wanted)
    for wanted in ("ib0", "=l", "^lo,eth", "ib,en"):
        with refused("NCCL_SOCKET_IFNAME", wanted):
            cluster.check_interface(wanted)


def test_a_name_that_stands_for_its_own_host_alone():
    """Debian's default; on one host, it does for all."""
    cluster.check_addresses(["a", "a"], ["127.0.1.1", "127.0.1.1"])
    cluster.check_addresses(["a", "b"], ["10.0.0.1", ""])
    with refuses("b resolves", "127.0.1.1", "/etc/hosts"):
        cluster.check_addresses(["a", "b"], ["10.0.0.1", "127.0.1.1"])


# --- jax's own settings ---------------------------------------------------------------------------


def test_jax_that_has_been_used_is_found_before_the_others_are_waited_for():
    jax.devices()
    config = config_lib.default_config()
    config.cluster.update(coordinator=f"localhost:{free_port()}", num_processes=2, process_id=0)
    with refuses("used jax"):
        cluster.start(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_disable_jit", True),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_transfer_guard", "disallow"),
        ("jax_transfer_guard_device_to_host", "disallow_explicit"),
    ],
)
def test_settings_under_which_no_step_compiles(name, value):
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        with refuses(name.upper()):
            train.run(tiny.waves(), "nowhere")
        with refuses(name.upper()):
            train.dry_run(tiny.waves())
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize(
    ("variable", "value", "command"),
    [
        ("JAX_ENABLE_X64", "maybe", "train --config x --workdir y"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "best", "sample --workdir y"),
    ],
)
def test_a_variable_that_jax_refuses_is_one_sentence(command, variable, value):
    """jax raises as it is imported, so every command meets it before its own work."""
    done = subprocess.run(
        [sys.executable, "-m", "decent_jax.commands.main", *command.split()],
        env=os.environ | {variable: value},
        capture_output=True,
        text=True,
        check=False,
    )
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and value in line


def test_processes_with_other_settings_of_jax_are_told_apart(monkeypatch, joins):
    """Under another generator or 64 bits the same seed gives other replicas."""
    described = []

    def barrier(address, count, index, description, *rest):
        described.append(description)
        raise ConfigError("enough")

    monkeypatch.setattr(rendezvous, "barrier", barrier)
    config = config_lib.default_config()
    config.cluster.update(coordinator="localhost:99", num_processes=2, process_id=1)
    for enabled in (False, True):
        with jax.enable_x64(enabled), refuses("enough"):
            cluster.start(config_lib.parse(config))
    told = rendezvous.difference(described, ["a", "b"])
    sides = "False on process 0 (a), True on process 1 (b)"
    assert told == f"the processes differ in JAX_ENABLE_X64: {sides}"


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize backend"), AssertionError()])
def test_devices_that_are_not_there(monkeypatch, error):
    """A jax without the plugin fails in an assertion, one without a driver in a RuntimeError."""

    def fails():
        raise error

    monkeypatch.setattr(jax, "local_devices", fails)
    with refuses("JAX_PLATFORMS"):
        cluster.start(config_lib.default_config())


# --- Sentences ----------------------------------------------------------------------------------


def test_errors_of_an_exchange_are_told_from_others():
    for yes in ("UNKNOWN: Gloo collective permute failed: Read", "INTERNAL: NCCL operation failed"):
        assert watch.concerns_an_exchange(ValueError(yes))
    assert not watch.concerns_an_exchange(RuntimeError("INTERNAL: CUDA error: illegal address"))
    assert not watch.concerns_an_exchange(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert not watch.concerns_an_exchange(ValueError("connection"))
    wrapped = RuntimeError("a checkpoint could not be written")
    wrapped.__cause__ = RuntimeError("DEADLINE_EXCEEDED: Barrier timed out")
    assert watch.concerns_an_exchange(wrapped)


# --- Processes ----------------------------------------------------------------------------------

# What train.py does, without its model: joins, and exchanges until a process is lost.
DRIVER = """
import sys, time
from pathlib import Path
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from types import SimpleNamespace
from decent_jax.cluster import start as cluster, watch
from decent_jax.ground.errors import PEER_LOST, PeerLost

index, count, heartbeat_s = map(int, sys.argv[2:5])
end, code = sys.argv[5], 0
own = dict(coordinator=sys.argv[1], num_processes=count, process_id=index)
own |= dict(heartbeat_s=heartbeat_s, timeout_s=300, exchange_s=600)
config = SimpleNamespace(cluster=SimpleNamespace(**own), by_name={})
if end == "1 fails":  # what process 1 waits for in vain
    watch._TOGETHER_S = 2
try:
    with watch.lost_peers_told():
        cluster.start(config, sys.path[0])  # the folder of this file
        if end == "1 fails" and index == 1:
            raise ValueError("a mistake in the program of one process")
        if end == "all finish":  # process 1 comes when process 0 waits for it
            here, there = (Path(sys.path[0], f"{k} is here") for k in (index, 1 - index))
            while index == 1 and not there.exists():
                time.sleep(0.05)
            here.touch()
            watch.barrier(60)
            assert there.exists(), f"process {index} did not wait"
        mesh = jax.make_mesh((count,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
        ring = [(k, (k + 1) % count) for k in range(count)]
        send = lambda x: jax.lax.ppermute(x, "r", ring)
        send = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=P("r"), out_specs=P("r")))
        x = np.zeros((1, 100_000), np.float32)
        x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P("r")), x)
        for step in range(100_000):
            x = jax.block_until_ready(send(x))
            if step == 3:
                print("ready", flush=True)
            if end.startswith("all") and step == 20:  # process 1 ends after process 0
                leaves = Path(sys.path[0], f"0 leaves as {end}")
                while index == 1 and not leaves.exists():
                    time.sleep(0.05)
                leaves.touch()
                if end == "all finish":
                    sys.exit(0)
                code = 2
                break
            time.sleep(0.02)
except PeerLost as error:
    code = PEER_LOST
watch.leave(code)
"""


def start_group(start_process, tmp_path, count, end=""):
    driver = tmp_path / "driver.py"
    if not driver.exists():  # a process of another group may be about to read it
        driver.write_text(DRIVER)
    common = [driver, f"localhost:{free_port()}"]
    return [start_process([*common, k, count, HEARTBEAT_S, end]) for k in range(count)]


def wait_until_ready(group):
    until(lambda: all("ready" in process.words.read_text() for process in group), *group)


def lost(process, why):
    sentence = f"driver.py: process {process} ({socket.gethostname()}) was lost: {why}; "
    return sentence + "the same command resumes from the last checkpoint\n"


@pytest.mark.slow
def test_a_process_that_falls_silent_is_named_by_the_others(start_process, tmp_path):
    """As one does that is stopped, or whose host is gone; test_how_groups_end kills one."""
    group = start_group(start_process, tmp_path, 3)
    wait_until_ready(group)
    group[2].send_signal(signal.SIGSTOP)
    codes = [process.wait(timeout=200) for process in group[:2]]
    sentence = lost(2, f"no sign of life for {HEARTBEAT_S} s")
    assert [said(process) for process in group[:2]] == [sentence] * 2
    assert codes == [PEER_LOST] * 2


@pytest.mark.slow
def test_how_groups_end(start_process, tmp_path):
    """Four groups of two at the same time."""
    ends = ("0 is killed", "1 fails", "all fail", "all finish")
    killed, one_fails, *alike = (start_group(start_process, tmp_path, 2, end) for end in ends)

    wait_until_ready(killed)  # the other ends at once, or by jax's abort where that is faster
    killed[0].kill()
    code = killed[1].wait(timeout=200)
    assert code in (PEER_LOST, -signal.SIGABRT)
    expected = lost(0, "its connection broke") if code == PEER_LOST else "client.h"
    assert expected in killed[1].words.read_text()

    # Before it has a device, for which the other waits: it does not wait for the other.
    assert one_fails[1].wait(timeout=200) == 1
    assert "ValueError: a mistake" in said(one_fails[1])
    assert one_fails[0].wait(timeout=200) == 1
    sentence = f"process 1 ({socket.gethostname()}) failed: ValueError: a mistake in the program"
    assert said(one_fails[0]) == f"driver.py: {sentence} of one process\n"

    for group, code in zip(alike, (2, 0), strict=True):  # for the same reason: each keeps its code
        assert [process.wait(timeout=200) for process in group] == [code] * 2
        assert [said(process) for process in group] == [""] * 2


@pytest.mark.parametrize(("flag", "threads"), [("", 8 * 4), ("device_count=12", 12 * 4)])
def test_simulated_devices_find_threads_to_wait_in(flag, threads, monkeypatch):
    """Asked for by jax's own option (8 in these tests) or XLA's.

    With a thread per core the evaluation of four devices on two cores would end in an abort.
    """
    monkeypatch.setenv("PJRT_NPROC", "")  # restored at the end of the test
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_{flag}")
    cluster.start(config_lib.default_config())
    assert os.environ["PJRT_NPROC"] == str(threads)
