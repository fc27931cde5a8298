"""A run that follows a plan of `decent_jax.planner`."""

# ruff: noqa: F401, F811  (a fixture of another module)

import json
import socket

import numpy as np
import pytest
import tiny
from refusals import refused, refuses
from test_train import run

from decent_jax import topology
from decent_jax.commands import supervise
from decent_jax.plan.plan_file import Plan
from decent_jax.train import ConfigError
from decent_jax.train.config import make_schedule, parse

pytestmark = pytest.mark.usefixtures("compile_once")
HERE = [f"{socket.gethostname()}/{k}" for k in range(4)]


def save(folder, devices, schedule, mix_every=1):
    path = folder / "plan.json"
    Plan(tuple(devices), schedule, mix_every).save(path)
    return {"plan": str(path)}


@pytest.mark.slow
def test_the_order_of_devices_changes_no_number(run, tmp_path, capsys):
    settings = {"steps": 4, "mesh": {"devices": 4}, "mix_every": 2, "schedule": "one_peer_exp"}
    plain = run("plain", **settings)
    plan = save(tmp_path, [HERE[k] for k in (2, 0, 3, 1)], topology.make("one_peer_exp", 4), 2)
    # What the config says of schedule and mix_every gives way to the plan.
    planned = run("planned", **settings | {"mix_every": 1, "schedule": "ring"}, cluster=plan)
    np.testing.assert_allclose(tiny.losses(planned), tiny.losses(plain), rtol=1e-5)
    assert tiny.summary(planned)["schedule"] == "one_peer_exp"
    saved = json.loads((planned / "config.json").read_text())
    assert saved["schedule"] == "one_peer_exp" and saved["mix_every"] == 2
    table = capsys.readouterr().err.rpartition("replicas  process")[2].splitlines()[1:5]
    assert [line.split()[-1] for line in table] == [f"cpu:{k}" for k in (2, 0, 3, 1)]


def test_rounds_are_repeated_for_methods_that_count_them():
    plan = Plan(tuple(HERE), topology.make("one_peer_exp", 4))
    config = tiny.config("data", num_replicas=4, algorithm="decentralized_adam")
    assert make_schedule(config, plan) is plan.schedule
    config.algorithm, config.outer.fragments = "noloco", 3
    assert make_schedule(config, plan).period == 6


def test_a_plan_for_another_cluster_is_refused(run, tmp_path):
    for settings, *named in (
        ({"num_replicas": 2}, "plan.json", "num_replicas 2"),
        ({"mesh": {"devices": 2}}, "4 replicas", "2"),
    ):
        with refuses(*named, error=ConfigError):
            plan = save(tmp_path, HERE, topology.make("ring", 4))
            run(**{"mesh": {"devices": 4}} | settings, cluster=plan)
        assert not (tmp_path / "run").exists()


def test_a_plan_is_for_devices_that_are_gone(tmp_path):
    plan = save(tmp_path, ("a/0", "b/0", "c/0", "d/0"), topology.make("ring", 4), mix_every=2)
    config = tiny.config("DATA", cluster=plan)
    changes = supervise.fit(parse(config), 4, 2)
    assert changes["cluster.plan"] == "" and changes["mix_every"] == 2
    assert changes["schedule"] == "ring"
    assert "schedule" not in supervise.fit(parse(config), 4, 3)  # ring needs an even number
