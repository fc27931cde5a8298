"""Numbers of real runs of the reference implementation (``data/golden``)."""

import json

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from datafiles import DATA

from decent_jax import optim, topology

GOLDEN = DATA / "golden"
CASES = json.loads((GOLDEN / "optimizers.json").read_text())["cases"]
RUNS = json.loads((GOLDEN / "decent_dp_4_replicas.json").read_text())["cases"]


def relative_error(got, wanted):
    return np.abs(np.asarray(got) - wanted).max() / np.abs(wanted).max()


def make_optimizer(case, mask=None):
    decay = case.get("weight_decay", case.get("wd"))
    make = optim.accum_adamw if case["opt"].endswith("W") else optim.accum_adam
    steps = case["accum_iter"] if case["opt"].startswith("Accum") else 1
    b1, b2 = case["betas"]
    return make(case["lr"], b1, b2, case["eps"], decay, mask, steps)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 3e-6), ("float64", 1e-12)])
def test_local_optimizers(dtype, limit, x64):
    """All cases side by side in one program."""
    data = np.load(GOLDEN / "optimizers.npz")
    cases = {case["id"]: case for case in CASES if case["dtype"] == dtype}
    tx = harness.together({key: make_optimizer(case) for key, case in cases.items()})

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(dict.fromkeys(cases, g), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    start = dict.fromkeys(cases, jnp.asarray(data[f"init_{dtype}"]))
    gradients = jnp.asarray(data[f"grads_{dtype}"])
    _, params = jax.jit(lambda *carry: jax.lax.scan(step, carry, gradients))(start, tx.init(start))
    for key in cases:
        wanted = data[f"{key}_params"]
        assert wanted.dtype == dtype
        assert relative_error(params[key], wanted[1:]) < limit, key


SCHEDULES = {"one-peer-exp": "hypercube", "alternating-exp-ring": "alternating_exp_ring"}


@pytest.mark.parametrize("name", RUNS)
def test_decentralized_trajectories(name, x64):
    """The reference's rounds are none, 1, 3, 4, 5, ... (it skips one); see data/README.md."""
    data = np.load(GOLDEN / "decent_dp_4_replicas.npz")
    case = RUNS[name]
    schedule = topology.make(
        SCHEDULES.get(case["topology"], case["topology"]), 4, replicas_per_node=case["local"]
    )
    decays_all = "wdall" in name
    sizes = [48, 8, 24, 3]  # fc1.weight, fc1.bias, fc2.weight, fc2.bias
    is_bias = np.repeat([False, True, False, True], sizes)
    start, gradients, wanted = (data[f"{name}/{k}"] for k in ("start", "grads", "params"))

    def tree_of(flat):
        return np.split(flat, np.cumsum(sizes)[:-1], axis=-1)

    mask = [decays_all or bool(part[0]) for part in tree_of(is_bias)]
    tx = optim.decentralized(make_optimizer(case, mask), schedule)
    rounds = [None, 1, *range(3, 21)]
    matrices = [np.eye(4) if r is None else schedule.matrix(r % schedule.period) for r in rounds]
    history = harness.simulated(
        tx,
        lambda _, g: g,
        tree_of(start[None]),
        tree_of(gradients.swapaxes(0, 1)),
        np.stack(matrices)[None],
    )
    got = np.concatenate([leaf[0] for leaf in history], axis=-1)
    assert got.dtype == wanted.dtype
    mixed = harness.matrices_of(schedule, 1)[0]
    for t in range(1, 20):
        limit = 1e-12 if case["dtype"] == "float64" else 1e-5
        assert relative_error(got[t], wanted[:, t]) < limit, f"step {t + 1}"
        assert relative_error((mixed @ got[t]).mean(0), wanted[:, t].mean(0)) < 1e-6
