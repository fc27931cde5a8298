"""Gossip in MaxText's own training loop, beside its data parallelism and its DiLoCo.

    PYTHONPATH=. MAXTEXT/bin/python benchmarks/evidence/maxtext_gossip.py --out runs/maxtext

MAXTEXT is an environment with MaxText, see docs/trainers.md.

Four simulated devices, a replica on each; a decoder of 0.16M parameters over bytes; the same
sequences in the same order in every run: Python's standard library. `gossip_step` is all that
MaxText is given. Prints a line of JSON per run, in which `eval_loss` is that of the model a user
would export: the only one, DiLoCo's outer parameters, or the mean of the replicas.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands

LENGTH, HELD_OUT, DEVICES, PERIOD = 128, 256, 4, 10
STACKED = {"enable_diloco": True, "ici_diloco_parallelism": DEVICES}
ALONE = STACKED | {"diloco_sync_period": 10**9}  # never
RUNS = {
    "data parallel": {"ici_data_parallelism": DEVICES},
    "diloco": STACKED | {"diloco_sync_period": PERIOD},
    "gossip": ALONE,
    "no messages": ALONE,
}
FIXED = """
hardware=cpu skip_jax_distributed_system=True enable_checkpointing=False
dataset_type=grain grain_file_type=parquet grain_worker_count=0 tokenize_train_data=False
packing=False vocab_size=256 base_emb_dim=64 base_num_decoder_layers=2 base_num_query_heads=4
base_num_kv_heads=4 head_dim=16 base_mlp_dim=256 attention=dot_product dtype=float32
per_device_batch_size=4 learning_rate=3e-3 ici_fsdp_parallelism=1
"""


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for data and metrics")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--schedule", default="one_peer_exp")
    parser.add_argument("--run", choices=RUNS, help="this one, in this process; else all of them")
    parsed = parser.parse_args(arguments)
    if parsed.run is None:
        write_data(parsed.out)
        environment = os.environ | {
            "DECOUPLE_GCLOUD": "TRUE",  # MaxText asks no service of Google Cloud
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(DEVICES),
            "PJRT_NPROC": "32",
        }
        for name in RUNS:
            log = parsed.out / f"{name.replace(' ', '_')}.log"
            with log.open("w") as out:
                command = [sys.executable, __file__, *arguments, "--run", name]
                subprocess.run(command, env=environment, stdout=out, stderr=out, check=True)
            print(log.read_text().splitlines()[-1], flush=True)
        return
    print(json.dumps({"run": parsed.run} | train(parsed)))


def write_data(out: Path) -> None:
    """Sequences of bytes of Python's standard library as parquet, and others held out."""
    import pyarrow
    from pyarrow import parquet

    out.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in sources), np.uint8)
    rows = text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int32)
    rows = np.random.default_rng(0).permutation(rows)
    np.save(out / "held_out.npy", rows[:HELD_OUT])
    parquet.write_table(pyarrow.table({"text": list(rows[HELD_OUT:])}), out / "train.parquet")


def gossip_step(schedule):
    """What takes the place of MaxText's ``diloco.build_diloco_train_step``.

    MaxText's loop keeps n replicas stacked along its mesh axis "diloco" and takes their local
    steps; with a ``diloco_sync_period`` longer than the run it never averages them. The movement of
    such a step is the update of a local optimizer, so `optim.decentralized` of the identity mixes:
    ``x_i <- sum_j W_ij x_j + (x_i' - x_i)``.
    """
    import jax
    import optax
    from flax import nnx
    from maxtext.trainers.diloco import diloco

    from decent_jax import gossip, optim

    tx = optim.decentralized(optax.identity(), schedule, axis_name="diloco")
    build_local_step = diloco.build_diloco_train_step

    def build(config, train_step, mesh):
        local_step = build_local_step(config, train_step, mesh)

        def mixed(before, after, round):  # for one replica
            moved = jax.tree.map(lambda old, new: new - old, before, after)
            updates, _ = tx.update(moved, tx.init(before), before, round=round)
            return optim.apply_updates(before, updates)

        def step(state, batch, key):
            before = nnx.filter_state(state.inner_state, nnx.Param)
            state, metrics = local_step(state, batch, key)
            after = nnx.filter_state(state.inner_state, nnx.Param)
            mix = gossip.on_mesh(mixed, mesh, "diloco")
            rounds = [functools.partial(mix, round=r) for r in range(schedule.period)]
            # MaxText compiles one step, so the round is chosen while it runs.
            params = jax.lax.switch((state.step - 1) % schedule.period, rounds, before, after)
            return state.replace(inner_state=nnx.merge_state(state.inner_state, params)), metrics

        return step

    return build


def train(parsed) -> dict:
    """Losses of the run ``parsed.run``, and how far its replicas are apart."""
    from flax import nnx
    from maxtext.trainers.diloco import diloco
    from maxtext.trainers.pre_train import train as maxtext_train

    from decent_jax import replicas, topology

    if parsed.run == "gossip":
        schedule = topology.make(parsed.schedule, DEVICES)
        diloco.build_diloco_train_step = gossip_step(schedule)
    config, recorder = maxtext_train.initialize(options(parsed, RUNS[parsed.run]))
    state = maxtext_train.train_loop(config, recorder)
    rows = map(json.loads, Path(config.metrics_file).read_text().splitlines())
    losses = [row["learning/loss"] for row in rows]
    result = {"steps": len(losses), "last_losses": round(float(np.mean(losses[-20:])), 3)}
    if parsed.run == "data parallel":
        params = nnx.to_pure_dict(nnx.filter_state(state.model, nnx.Param))
    else:
        stacked = nnx.to_pure_dict(nnx.filter_state(state.inner_state.model, nnx.Param))
        distance = float(replicas.consensus_distance(stacked).relative)
        result["consensus_distance_relative"] = float(f"{distance:.2g}")
        params = state.params if parsed.run == "diloco" else replicas.consensus_mean(stacked)
    return result | {"eval_loss": round(evaluate(params, parsed), 3)}


def options(parsed, of_run: dict) -> list[str]:
    """The command line of MaxText."""
    import maxtext

    tokenizers = Path(maxtext.__file__).parent / "assets" / "tokenizers"
    name = parsed.run.replace(" ", "_")
    chosen = {
        "run_name": name,
        "base_output_directory": parsed.out.resolve(),
        "metrics_file": parsed.out.resolve() / f"{name}.jsonl",
        "grain_train_files": parsed.out.resolve() / "train.parquet",
        "tokenizer_path": tokenizers / "tokenizer.default",  # MaxText wants one; unused
        "max_target_length": LENGTH,
        "steps": parsed.steps,
    }
    return ["", *FIXED.split(), *(f"{key}={value}" for key, value in (chosen | of_run).items())]


def evaluate(params: dict, parsed) -> float:
    """The loss of one model, in nats per byte, on the sequences held out."""
    import jax
    from flax import nnx
    from flax.linen import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train.train import loss_fn
    from maxtext.utils import model_creation_utils

    config = pyconfig.initialize(options(parsed, RUNS["data parallel"]))
    rows = np.load(parsed.out / "held_out.npy")
    inputs, targets = rows[:, :-1], rows[:, 1:]
    positions = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    batch = {"inputs": inputs, "targets": targets}
    for name in batch.copy():
        batch[f"{name}_position"] = positions
        batch[f"{name}_segmentation"] = np.ones_like(inputs)
    with logical_axis_rules(config.logical_axis_rules):
        model = model_creation_utils.from_config(config, rngs=nnx.Rngs(0))
        state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(state, jax.device_get(params))
        nnx.update(model, state)
        size = config.micro_batch_size_to_eval_on
        with jax.set_mesh(model.mesh):
            losses = [
                loss_fn(model, config, part, None, None, is_train=False)[0]
                for k in range(0, len(rows), size)
                for part in [{name: x[k : k + size] for name, x in batch.items()}]
            ]
    return float(np.mean(losses))


if __name__ == "__main__":
    main(sys.argv[1:])
