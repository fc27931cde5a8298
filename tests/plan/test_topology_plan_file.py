"""The file of a plan: read back as it was written, and refused where it is not for this cluster."""

import json

import numpy as np
import pytest
from refusals import refuses

from decent_jax import topology
from decent_jax.plan import plan_file

HOSTS = tuple(f"host{i // 4}/{i % 4}" for i in range(8))


@pytest.mark.parametrize(
    ("name", "replicas_per_node"),
    [
        ("one_peer_exp", 1),
        ("complete", 1),
        ("alternating_exp_ring", 4),
        ("hierarchical(complete, one_peer_exp)", 2),
        ("hierarchical(ring, one_peer_exp)", 4),  # no groups that average first
    ],
)
def test_plans_are_read_back_as_they_were(tmp_path, name, replicas_per_node):
    schedule = topology.make(name, 8, replicas_per_node=replicas_per_node)
    path = tmp_path / "plan.json"
    expected = {"step_time_s": 0.25, "why": "fast links"}
    plan_file.Plan(HOSTS, schedule, mix_every=2, expected=expected).save(path)
    again = plan_file.load(path)
    assert (again.devices, again.mix_every, again.expected) == (HOSTS, 2, expected)
    assert (again.schedule.name, again.schedule.period) == (schedule.name, schedule.period)
    for r in range(schedule.period):
        np.testing.assert_array_equal(again.schedule.matrix(r), schedule.matrix(r))
    assert again.schedule.bytes_sent(1) == schedule.bytes_sent(1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_plan_of_pipelines_is_read_back(replicas, tmp_path):
    schedule, path = topology.make("one_peer_exp", replicas), tmp_path / "plan.json"
    stages = 8 // replicas
    plan_file.Plan(HOSTS, schedule, stages=stages).save(path)
    again = plan_file.load(path)
    assert (again.schedule.num_replicas, again.stages) == (replicas, stages)


@pytest.mark.parametrize("name", ["mine", "hypercube"])
def test_a_schedule_that_its_name_does_not_give_is_refused(tmp_path, name):
    ring = topology.make("bidirectional_ring", 8).matrix(0)
    schedule = topology.Schedule.from_matrices([ring], name)
    with refuses(name):
        plan_file.Plan(HOSTS, schedule).save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_a_plan_puts_replicas_on_its_devices_in_any_order_they_are_listed():
    schedule = topology.make("one_peer_exp", 8)
    order = np.random.default_rng(0).permutation(8)
    devices = tuple(HOSTS[i] for i in order)
    assert plan_file.Plan(devices, schedule).device_order(HOSTS) == order.tolist()
    assert plan_file.Plan(devices, schedule).device_order(devices) == list(range(8))


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        (HOSTS[:4], ("8", "4")),
        ([*HOSTS, "other/3"], ("8", "9")),
        ([*HOSTS[:7], "other/3"], ("host1/3", "other/3")),
    ],
)
def test_a_plan_for_another_cluster_is_refused(devices, named):
    mine = plan_file.Plan(HOSTS, topology.make("one_peer_exp", 8))
    with refuses(*named):
        mine.device_order(devices)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "decent_jax.plan/0"}, "format"),
        ({"devices": list(HOSTS[:7])}, "hypercube"),
        ({"devices": [HOSTS[0]] * 8}, "device"),
        ({"schedule": {"name": "starfish", "replicas_per_node": 1}}, "starfish"),
        ({"schedule": {"name": "ring"}}, "replicas_per_node"),
        ({"schedule": None}, "is not a plan"),
        ({"mix_every": 0}, "mix_every"),
        ({"stages": 0}, "is not a plan"),
    ],
)
def test_damaged_plans_are_refused_in_one_sentence(tmp_path, change, named):
    path = tmp_path / "plan.json"
    plan_file.Plan(HOSTS, topology.make("hypercube", 8)).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refuses(path, named):
        plan_file.load(path)


@pytest.mark.parametrize("text", [None, "{"])
def test_a_plan_that_is_not_there_or_not_json_is_named(tmp_path, text):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with refuses(path):
        plan_file.load(path)
