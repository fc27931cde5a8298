"""What benchmarks/speed/programs.py computes from a program for GPUs, and what is found there."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "speed" / "programs.py"


needs_the_compiler = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda12_plugin"),
    reason="XLA's compiler for GPUs is not here: pip install -e '.[cuda12]'",
)


@pytest.mark.slow
@needs_the_compiler
def test_on_gpus_messages_are_hidden_and_the_update_is_one_pass(tmp_path):
    small = "--config.model.layers=2 --config.model.width=1024 --config.model.heads=4 "
    small += "--config.model.vocab_size=2048 --config.model.context=64 --batch_size 2 "
    small += "--config.model.attention=xla"
    command = [sys.executable, SCRIPT, "--algorithms", "one_peer_exp"]
    command += [*small.split(), "--json", tmp_path / "rows"]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    plain, own = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert (plain["options"], own["options"]) == ("XLA's", "ours")
    assert plain["first"] > 0.2 and plain["equal"] > 1.2
    # The last message carries whether all arrays are finite, which 20 short kernels find out first.
    assert own["first"] == 0 and own["last"] < 0.1 and own["equal"] < 1.02
    assert own["of_parameters"] < 1.05 * own["least"]
    assert own["update_passes"] < 1.25


@pytest.mark.slow
@needs_the_compiler
@pytest.mark.parametrize(
    ("schedule", "flags", "wanted"),
    [
        (
            "complete",
            "--config.algorithm=diloco --config.diloco.delay=7",
            (
                "3 collective-permute-start, loop, 3 collective-permute-done",
                "all-gather-start, loop, all-gather-done",
            ),
        ),
        (
            "one_peer_exp",
            "--config.algorithm=noloco --config.noloco.delay=7",
            ("collective-permute-start, loop", "loop, collective-permute-done"),
        ),
    ],
)
def test_on_gpus_a_message_travels_beside_a_loop_of_steps(schedule, flags, wanted, tmp_path):
    small = "--config.model.layers=1 --config.model.width=128 --config.model.heads=2 "
    small += "--config.model.vocab_size=256 --config.model.context=32 --batch_size 1 "
    small += f"--config.model.attention=xla --config.mix_every=8 {flags}"
    command = [sys.executable, SCRIPT, "--algorithms", schedule]
    command += [*small.split(), "--json", tmp_path / "rows"]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    _, own = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    for part in wanted:
        assert part in own["outline"], own["outline"]
