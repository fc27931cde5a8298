"""The file of a plan: read back as it was written, and refused where it is not for this cluster."""

import json

import numpy as np
import pytest

from decent_jax import topology
from decent_jax.plan import plan_file

HOSTS = tuple(f"host{i // 4}/{i % 4}" for i in range(8))


def written_out(name):
    """A schedule of its own, which a file cannot give by its name."""
    return topology.Schedule.from_matrices([topology.make("bidirectional_ring", 8).matrix(0)], name)


def test_plans_are_read_back_as_they_were(tmp_path):
    grouped = topology.make("alternating_exp_ring", 8, local_size=4)
    odd = written_out("hypercube")
    schedules = [
        topology.make("one_peer_exp", 8),
        grouped,
        topology.make("complete", 8),
        topology.Schedule("built", 8, grouped.rounds),
        written_out("mine"),
        odd,
    ]
    for schedule in schedules:
        path = tmp_path / "plan.json"
        expected = {"step_time_s": 0.25, "why": "fast links"}
        plan_file.Plan(HOSTS, schedule, mix_every=2, expected=expected).save(path)
        again = plan_file.load(path)
        assert (again.devices, again.mix_every, again.expected) == (HOSTS, 2, expected)
        assert (again.schedule.name, again.schedule.period) == (schedule.name, schedule.period)
        for r in range(schedule.period):
            np.testing.assert_allclose(again.schedule.matrix(r), schedule.matrix(r), atol=1e-15)
        assert again.schedule.bytes_sent(1) == schedule.bytes_sent(1)
        named = schedule.name in topology.NAMES and schedule is not odd
        assert ("rounds" in json.loads(path.read_text())["schedule"]) != named


def test_a_plan_puts_replicas_on_its_devices_in_any_order_they_are_listed():
    schedule = topology.make("one_peer_exp", 8)
    order = np.random.default_rng(0).permutation(8)
    devices = tuple(HOSTS[i] for i in order)
    assert plan_file.Plan(devices, schedule).device_order(HOSTS) == order.tolist()
    assert plan_file.Plan(devices, schedule).device_order(devices) == list(range(8))


def test_a_plan_for_another_cluster_is_refused():
    mine = plan_file.Plan(HOSTS, topology.make("one_peer_exp", 8))
    with pytest.raises(ValueError, match=r"plan is for 8 replicas .* but this run has 4;") as error:
        mine.device_order(HOSTS[:4])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"names host1/3, and .* has other/3 instead") as error:
        mine.device_order([*HOSTS[:7], "other/3"])
    assert "1 of 8 devices differ" in str(error.value) and "\n" not in str(error.value)


def edited(path, schedule, change):
    """The plan of a schedule, changed in the file."""
    plan_file.Plan(HOSTS, schedule).save(path)
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "decent_jax.plan/0"}, 'does not say "format"'),
        ({"devices": list(HOSTS[:7])}, "is not a plan: "),
        ({"devices": [HOSTS[0]] * 8}, "a device occurs twice"),
        ({"schedule": {"name": "starfish", "local_size": 1}}, "unknown schedule 'starfish'"),
        ({"schedule": None}, "is not a plan: "),
        ({"mix_every": 0}, "mix_every must be a whole number from 1 to .*, got 0"),
        ({"mix_every": 1.5}, "mix_every must be a whole number from 1 to .*, got 1.5"),
        ({"mix_every": None}, "mix_every must be a whole number"),
        (lambda rnd: rnd["self_weights"].pop(), "a weight for each"),
        (lambda rnd: rnd.update(group_size=3), "groups that divide 8"),
        (lambda rnd: rnd["self_weights"].__setitem__(0, 0.9), "row 0 must sum to 1"),
        (lambda rnd: rnd["sends"][0]["sources"].__setitem__(0, 2), "all different"),
        (lambda rnd: rnd["sends"][0]["sources"].__setitem__(0, 99), "is not a plan"),
        (lambda rnd: rnd.pop("sends"), "lacks 'sends'"),
    ],
)
def test_damaged_plans_are_refused_in_one_sentence(tmp_path, change, words):
    """Changes of a plan's fields, and of a round of a schedule that is written out."""
    path = tmp_path / "plan.json"
    if isinstance(change, dict):
        edited(path, topology.make("hypercube", 8), lambda fields: fields.update(change))
    else:
        edited(path, written_out("mine"), lambda fields: change(fields["schedule"]["rounds"][0]))
    with pytest.raises(ValueError, match=words) as error:
        plan_file.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_plan_that_is_not_there_or_not_json_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the plan .*: No such file"):
        plan_file.load(tmp_path / "no.json")
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        plan_file.load(tmp_path / "no.json")
