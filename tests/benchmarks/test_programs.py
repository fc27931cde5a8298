"""What benchmarks/speed/programs.py computes from a program for GPUs, and what is found there."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "speed" / "programs.py"


pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda12_plugin"),
    reason="XLA's compiler for GPUs is not here: pip install -e '.[cuda12]'",
)


def rows_of(schedule, flags, tmp_path):
    """With XLA's options and with ours."""
    command = [sys.executable, SCRIPT, "--algorithms", schedule, "--json", tmp_path / "rows"]
    command += ["--config.model.attention=xla", *flags.split()]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    return map(json.loads, (tmp_path / "rows").read_text().splitlines())


@pytest.mark.slow
def test_on_gpus_messages_are_hidden_and_the_update_is_one_pass(tmp_path):
    small = "--config.model.layers=2 --config.model.width=1024 --config.model.heads=4 "
    small += "--config.model.vocab_size=2048 --config.model.context=64 --batch_size 2 "
    plain, own = rows_of("one_peer_exp", small, tmp_path)
    assert (plain["options"], own["options"]) == ("XLA's", "ours")
    assert plain["first"] > 0.2 and plain["equal"] > 1.2
    # The last message carries whether all arrays are finite, which 20 short kernels find out first.
    assert own["first"] == 0 and own["last"] < 0.1 and own["equal"] < 1.02
    assert own["of_parameters"] < 1.05 * own["least"]
    assert own["update_passes"] < 1.25


DILOCO = ("3 collective-permute-start, loop, 3 collective-permute-done",)
DILOCO += ("all-gather-start, loop, all-gather-done",)
NOLOCO = ("collective-permute-start, loop", "loop, collective-permute-done")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "method", "wanted"),
    [("complete", "diloco", DILOCO), ("one_peer_exp", "noloco", NOLOCO)],
)
def test_on_gpus_a_message_travels_beside_a_loop_of_steps(schedule, method, wanted, tmp_path):
    small = "--config.model.layers=1 --config.model.width=128 --config.model.heads=2 "
    small += "--config.model.vocab_size=256 --config.model.context=32 --batch_size 1 "
    small += f"--config.mix_every=8 --config.algorithm={method} --config.{method}.delay=7"
    _, own = rows_of(schedule, small, tmp_path)
    assert all(part in own["outline"] for part in wanted), own["outline"]
