"""Which replicas share a host, and the schedule that ``schedule=auto`` takes there."""

import json

import pytest
import tiny
from refusals import refuses

from decent_jax.cluster import launchers
from decent_jax.cluster import start as cluster
from decent_jax.planner import network, recommend
from decent_jax.planner.runtime import Workload
from decent_jax.train import config as config_lib
from decent_jax.train import experiment
from decent_jax.train.config import parse

pytestmark = pytest.mark.usefixtures("compile_once")

WITHIN = "hierarchical(complete, one_peer_exp)"


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (2, 4), (3, 4), (4, 4), (4, 1), (8, 1)])
def test_the_planner_chooses_the_same(nodes, devices, tmp_path):
    """GPT-2 small on 25 Gbit/s, as in the README, with a round per step in float32.

    Among schedules that the planner finds equally good, such as hypercube and one_peer_exp, auto's
    must be one.
    """
    n = nodes * devices
    there = network.cluster([devices] * nodes, network.NVLINK, network.ETHERNET_25G)
    workload = Workload(model_bytes=4 * 124e6, forward_s=0.06, backward_s=0.12)
    found = [
        choice
        for choice in recommend.choices(there, workload, mix_every=(1,))
        if choice.algorithm.name != "all_reduce"
    ]
    config = tiny.waves(num_replicas=n, batch_size=n, schedule="auto")
    auto = experiment.settle(parse(config), devices, tmp_path)
    name = auto.schedule.partition("(")[0]  # its brackets hold the defaults
    ours = next(choice for choice in found if choice.algorithm.name == name)
    fastest = min(choice.prediction.step_s for choice in found)
    assert ours.prediction.step_s <= 1.001 * fastest, [c.algorithm.name for c in found[:3]]
    names = [choice.algorithm.name for choice in found]
    if "hypercube" in names:  # as good, and in smaller cliques
        assert names.index("hypercube") < names.index("one_peer_exp")


# Runs of one device and four replicas, on hosts as the test says.
def on_hosts_of(monkeypatch, per_host):
    monkeypatch.setattr(experiment, "replicas_per_host", lambda hosts: per_host)


def chosen(folder):
    saved = json.loads((folder / "config.json").read_text())
    assert tiny.summary(folder)["schedule"] == saved["schedule"]
    return saved["schedule"], saved["replicas_per_node"]


def test_auto_suits_the_hosts_and_a_resumed_run_keeps_it(tmp_path, monkeypatch, capsys):
    folder, small = tmp_path / "run", {"steps": 2, "schedule": "auto"}
    on_hosts_of(monkeypatch, 2)
    tiny.run(tiny.waves(**small), folder)
    assert chosen(folder) == (WITHIN, 2)
    assert "(a node of 2 sends " in capsys.readouterr().err
    sent = [tiny.summary(folder)[f"bytes_sent_{of}per_step"] for of in ("", "by_node_")]
    assert sent == [1.5 * 33 * 4, 33 * 4]
    kept = sum(x.nbytes for x in tiny.saved(folder, 2).values()) / 4
    assert tiny.summary(folder)["state_bytes_per_replica"] == kept
    on_hosts_of(monkeypatch, 4)
    tiny.run(tiny.waves(**small), folder)  # a run that has ended compiles nothing
    assert chosen(folder) == (WITHIN, 2)
    tiny.run(tiny.waves(**small | {"steps": 3, "num_replicas": 2, "batch_size": 4}), folder)
    assert chosen(folder) == ("one_peer_exp", 1)


@pytest.mark.parametrize(
    ("n", "per_host", "settings", "wanted"),
    [
        (8, 1, {}, "hypercube"),  # pairs: communicators of two devices
        (8, 8, {}, "hypercube"),
        (8, 4, {}, WITHIN),
        (6, 6, {}, "one_peer_exp"),
        (2, 2, {}, "one_peer_exp"),
        (8, 8, {"algorithm": "all_reduce"}, "one_peer_exp"),
        (8, 8, {"algorithm": "diloco"}, "one_peer_exp"),
    ],
)
def test_auto_on_gpus(n, per_host, settings, wanted, tmp_path):
    config = tiny.waves(num_replicas=n, batch_size=n, schedule="auto", **settings)
    assert experiment.settle(parse(config), per_host, tmp_path, on_gpus=True).schedule == wanted


@pytest.mark.parametrize(
    "settings",
    [{"mesh": {"fsdp": 2}}, {"algorithm": "all_reduce"}],
)
def test_auto_within_one_host_where_the_other_schedule_cannot_be(settings, tmp_path):
    config = tiny.waves(schedule="auto", **settings)
    auto = experiment.settle(parse(config), 2, tmp_path)
    assert (auto.schedule, auto.replicas_per_node) == ("one_peer_exp", 1)


def test_a_method_that_needs_another_schedule_says_so_at_once(tmp_path):
    with refuses("swarm"):
        tiny.run(tiny.waves(schedule="auto", algorithm="swarm"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_a_tpu_pod_is_left_to_jax(count, monkeypatch):
    """The variables of a pod on GKE; a host by itself is one process."""
    for module in ("cloud_tpu_init", "clusters.cloud_tpu_cluster", "clusters.cluster"):
        monkeypatch.setattr(f"jax._src.{module}.running_in_cloud_tpu_vm", True)
    for name in ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", ",".join(["localhost", "other"][:count]))
    monkeypatch.setenv("TPU_WORKER_ID", str(count - 1))
    launcher = launchers.detect_launcher()
    assert launcher == (None if count == 1 else "Cloud TPU")
    if launcher:
        place = cluster._place(config_lib.default_config().cluster, launcher)
        assert place == ("localhost:8482", 2, 1, None)
