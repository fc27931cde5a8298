"""Actors: how Ray is started, and what an actor's process does."""

import importlib.machinery
import os
import signal
import socket
import stat
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from refusals import refused, refuses

from decent_jax import train
from decent_jax.actors import ray_cluster
from decent_jax.ground import machine
from decent_jax.ground.errors import ConfigError, Interrupted


@pytest.fixture
def config():
    return train.default_config()


def test_a_ray_of_our_own_asks_for_a_token_that_no_file_has(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    ray_cluster.prepare("")
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert dict(os.environ)["RAY_worker_niceness"] == "0"  # as nice as `train.py`, not 15 more
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["", "disabled"])
def test_ray_that_was_imported_without_a_token_is_not_started(mode, monkeypatch):
    """It has read its environment, and would let anybody in."""
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_MODE": mode} if mode else {})
    there = types.ModuleType("ray")
    there.__spec__ = importlib.machinery.ModuleSpec("ray", None)
    monkeypatch.setitem(sys.modules, "ray", there)
    monkeypatch.setitem(sys.modules, "ray.exceptions", types.SimpleNamespace(RayError=OSError))
    ray_cluster.prepare("")
    with (
        refuses("RAY_AUTH_MODE=token", error=ConfigError),
        ray_cluster.running(train.default_config().ray, [0]),
    ):
        pass


def test_the_token_of_a_cluster_is_for_its_owner_only(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    ray_cluster.prepare("auto")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    token.unlink()
    ray_cluster.prepare("auto")  # Ray says itself what it misses


def test_more_actors_than_this_machine_has_memory_for_are_refused(monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 2e9)
    ray_cluster.check_memory(7 * [0])
    for needs in (9 * [0], 7 * [10**9 / 7], [10**9, *6 * [0]]):
        with refuses(len(needs), "2.00GB", error=ConfigError):
            ray_cluster.check_memory(needs)


@pytest.mark.parametrize("address", ["host", "host:port", ":1", "127.0.0.1:9", "127.0.0.1:99999"])
def test_an_address_where_nobody_listens_is_refused(address, config):
    config.ray.address = address
    with refused("ray.address", address):
        ray_cluster.check_address(config.ray)


@pytest.mark.parametrize("answer", [b"", b"220 mail.example ESMTP\r\n", None])
def test_an_address_where_something_else_listens_is_refused(answer, config, monkeypatch):
    """One that closes, one that speaks, one that waits; Ray would try for minutes."""
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda place, timeout: connect(place, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:

        def serve():
            there, _ = server.accept()
            if answer is None:
                there.recv(1000), there.recv(1000)  # the preface, and the end
            else:
                there.sendall(answer)
            there.close()

        served = pool.submit(serve)
        config.ray.address = f"127.0.0.1:{server.getsockname()[1]}"
        with refused("ray.address", config.ray.address):
            ray_cluster.check_address(config.ray)
        served.result()


@pytest.mark.parametrize(("cpus", "gpus", "field"), [(0.8, 0.0, "cpus"), (0.5, 0.8, "gpus")])
def test_more_actors_than_ray_has_room_for_are_refused(cpus, gpus, field, config):
    config.ray.update(cpus=cpus, gpus=gpus)
    with refused(f"ray.{field}", 0.8):
        ray_cluster.check_resources(config.ray, 4 * [0], {"CPU": 3.0})
    there = {"CPU": 3.0, "GPU": 2.0, "memory": 1e9}
    ray_cluster.check_resources(config.ray, 2 * [1e9], there)  # of one machine, see above
    config.ray.address = "auto"
    ray_cluster.check_resources(config.ray, 2 * [2e8], there)
    with refuses(2, "1.00GB", error=ConfigError):
        ray_cluster.check_resources(config.ray, 2 * [3e8], there)


@pytest.fixture
def ray_of_one_cpu(monkeypatch):
    """What it is called for, in order; like Ray, it puts its own handler of SIGTERM in place."""
    calls = []
    there = types.SimpleNamespace(
        init=lambda **_: calls.append(signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))),
        cluster_resources=lambda: {"CPU": 1.0, "memory": 1e9},
        shutdown=lambda: calls.append("shutdown"),
        exceptions=types.SimpleNamespace(RayError=OSError),
    )
    monkeypatch.setitem(sys.modules, "ray", there)
    monkeypatch.setitem(sys.modules, "ray.exceptions", there.exceptions)
    before = signal.getsignal(signal.SIGTERM)
    yield calls
    signal.signal(signal.SIGTERM, before)


def test_ray_ends_where_it_has_no_room(ray_of_one_cpu, config):
    """Or this process could not start it again."""
    config.ray.update(address="auto", cpus=0.8)
    with refused("ray.cpus", 0.8), ray_cluster.running(config.ray, [0, 0]):
        pass
    assert ray_of_one_cpu[1:] == ["shutdown"]


def test_sigterm_while_ray_starts_and_afterwards(ray_of_one_cpu, config, monkeypatch):
    """A run ends with the code of the signal, and its own handler is in place again."""
    config.ray.address = "auto"
    handler = signal.getsignal(signal.SIGTERM)
    with ray_cluster.running(config.ray):
        assert signal.getsignal(signal.SIGTERM) is handler
    starts = sys.modules["ray"].init
    monkeypatch.setattr(
        sys.modules["ray"], "init", lambda **_: (starts(), os.kill(os.getpid(), 15))
    )
    with pytest.raises(Interrupted) as told, ray_cluster.running(config.ray):
        pass
    assert told.value.code == 143 and signal.getsignal(signal.SIGTERM) is handler


def test_an_actor_reads_relative_paths_from_where_train_py_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the output stays here
    ray_cluster.enter(tmp_path / "workers" / "0.txt", str(tmp_path / "there"))
    assert os.getcwd() == str(tmp_path / "there")
    ray_cluster.enter(tmp_path / "workers" / "0.txt", str(tmp_path / "only on another machine"))
    assert os.getcwd() == str(tmp_path / "there")


def test_a_call_that_fails_names_the_error_of_the_method(monkeypatch):
    """Not that of Ray, in which it travels."""
    ray = pytest.importorskip("ray")
    from decent_jax.actors import handles

    failed = ray.exceptions.RayTaskError("train", "", ValueError("no number"), ip="127.0.0.1")

    def get(_, timeout):
        assert timeout == 2.5
        raise failed.as_instanceof_cause()

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(handles.Lost) as lost:
        handles.Call(None).result(2.5)
    assert type(lost.value.cause) is ValueError and not lost.value.killed


@pytest.mark.parametrize("count", [1, 2])
def test_all_calls_that_have_ended_are_named_at_once(count, monkeypatch):
    """Ray names as many as were waited for; peers that end together would be taken for lost."""
    ray = pytest.importorskip("ray")
    from decent_jax.actors import handles

    def wait(references, num_returns, timeout):
        assert num_returns == count or timeout == 0
        over = [one for one in references if one != "r0"][:num_returns]
        return over, [one for one in references if one not in over]

    monkeypatch.setattr(ray, "wait", wait)
    calls = {slot: handles.Call(f"r{slot}") for slot in range(4)}
    assert sorted(handles.Actors().ended(calls, 0.2, count)) == [1, 2, 3]
