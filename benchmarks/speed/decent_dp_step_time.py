"""The model of step_time.py under PyTorch: no communication, DDP, and Decent-DP, on the same hosts.

    benchmarks/hosts.sh up 4 200mbit
    python benchmarks/run_on_hosts.py benchmarks/speed/step_time.py
    TORCH/bin/python benchmarks/run_on_hosts.py benchmarks/speed/decent_dp_step_time.py

TORCH is an environment of its own with PyTorch and `pip install decent-dp` (the reference's
implementation); this project needs neither. The same GPT of 4.03M parameters in float32, the
same number of sequences per step, AdamW, gloo. Decent-DP calls the hypercube "one-peer-exp". Prints
a line of JSON per algorithm: medians over measurements that take all algorithms in turn, as in
step_time.py.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import optim_fn_accum_adamw
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands

ALGORITHMS = ("none", "ddp", "complete", "ring", "one-peer-exp")
LAYERS, HEADS, WIDTH, CONTEXT, VOCAB = 5, 4, 256, 128, 256


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=8, help="sequences, over all processes")
    parser.add_argument("--steps", type=int, default=6, help="steps a measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch; 0: its default")
    for name in ("coordinator", "num_processes", "process_id"):  # from run_on_hosts.py
        parser.add_argument(f"--config.cluster.{name}", dest=name)
    parsed = parser.parse_args(arguments)
    if parsed.threads:
        torch.set_num_threads(parsed.threads)
    n, rank = int(parsed.num_processes), int(parsed.process_id)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{parsed.coordinator}", world_size=n, rank=rank
    )
    tokens = torch.randint(VOCAB, (parsed.batch_size // n, CONTEXT + 1))
    steps = {name: step_of(name, tokens) for name in ALGORITHMS}
    seconds = {name: [] for name in ALGORITHMS}
    for repeat in range(1 + parsed.repeats):  # the first warms up
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(parsed.steps):
                step()
            if repeat:
                seconds[name].append((time.perf_counter() - began) / parsed.steps)
    if rank == 0:
        for name, times in seconds.items():
            row = {"framework": "pytorch", "algorithm": name, "num_replicas": n}
            print(
                json.dumps(row | {"step_time_s": statistics.median(times), "step_times_s": times})
            )
    dist.barrier()
    dist.destroy_process_group()


def step_of(name: str, tokens: torch.Tensor):
    """A function that makes one step."""
    torch.manual_seed(0)
    model = GPT()
    if name in ("none", "ddp"):
        model = model if name == "none" else DistributedDataParallel(model)
        optimizer = optim_fn_accum_adamw(list(model.named_parameters()))

        def step():
            optimizer.zero_grad()
            loss_of(model, tokens).backward()
            optimizer.step()

        return step
    model = DecentralizedDataParallel(
        model, optim_fn_accum_adamw, topology=name, _local_world_size=1
    )
    model.train()

    def step():
        model.zero_grad()
        loss_of(model, tokens).backward()  # updates by itself

    return step


def loss_of(model, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class GPT(nn.Module):
    """As `decent_jax.models.gpt2` without biases, except that the output layer has its own 65,536
    parameters: Decent-DP needs each parameter to be used once.
    """

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.attention, self.out = (nn.Linear(WIDTH, k * WIDTH, bias=False) for k in (3, 1))
        self.widen = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.attention(self.norms[0](x)).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.norms[1](x)), approximate="tanh"))


if __name__ == "__main__":
    main(sys.argv[1:])
