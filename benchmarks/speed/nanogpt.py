"""nanoGPT's CPU recipe in plain PyTorch, beside `configs/shakespeare.py:cpu,all_reduce`.

    TORCH/bin/python benchmarks/speed/nanogpt.py --data DIR/data/shakespeare

TORCH is an environment of its own with PyTorch and NumPy; this project needs neither. Trains with
the published settings. Prints a line of JSON: the loss of the whole validation set every 250 steps,
with the seconds of training before it, and the median time of a step.
"""

import json
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
RATE, LEAST_RATE, WARMUP, STEPS = 1e-3, 1e-4, 100, 2000
BETAS, DECAY, CLIP = (0.9, 0.99), 0.1, 1.0
EVERY, TIMED = 250, 50  # steps between evaluations, and between two looks at the clock


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--data", required=True, type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch; 0: its default")
    parsed = parser.parse_args(arguments)
    print(json.dumps(trained(parsed.data, parsed.steps, parsed.seed, parsed.threads)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.into_stream = nn.ModuleList(
            nn.Linear(inputs, WIDTH, bias=False) for inputs in (WIDTH, 4 * WIDTH)
        )

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))  # (B, T, 3, heads, D)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.into_stream[0](y.transpose(1, 2).flatten(2))
        return x + self.into_stream[1](functional.gelu(self.wide(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, x in self.named_parameters():
            if x.ndim == 2:
                narrow = math.sqrt(2 * LAYERS) if "into_stream" in name else 1
                nn.init.normal_(x, std=0.02 / narrow)

    def forward(self, windows):
        x = self.tokens(windows[:, :-1]) + self.positions.weight
        logits = self.norm(self.blocks(x)) @ self.tokens.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def trained(data: Path, steps: int, seed: int, threads: int) -> dict:
    """The row that is printed."""
    torch.manual_seed(seed)
    if threads:
        torch.set_num_threads(threads)
    files = (np.fromfile(data / f"{name}.bin", "<u2").astype(np.int64) for name in ("train", "val"))
    train, val = map(torch.from_numpy, files)
    held_out = val[: (len(val) - 1) // CONTEXT * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)
    model = GPT(int(train.max()) + 1)
    parameters = list(model.parameters())
    decayed = [x for x in parameters if x.ndim == 2]
    others = [x for x in parameters if x.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS)

    def loss_of_all() -> float:
        with torch.no_grad():
            parts = [(model(part).item(), len(part)) for part in held_out.split(120)]
        return sum(loss * count for loss, count in parts) / len(held_out)

    def step(t: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate(t)
        starts = torch.randint(len(train) - CONTEXT, (BATCH,))
        loss = model(torch.stack([train[i : i + CONTEXT + 1] for i in starts]))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times, losses, spent = [], [], 0.0
    for t in range(0, steps, TIMED):
        began = time.perf_counter()
        for k in range(TIMED):
            step(t + k)
        spent += time.perf_counter() - began
        times.append((time.perf_counter() - began) / TIMED)
        if (t + TIMED) % EVERY == 0 or t + TIMED >= steps:
            losses.append((t + TIMED, spent, loss_of_all()))
    losses = [[t, round(seconds, 1), round(loss, 4)] for t, seconds, loss in losses]
    return {"seed": seed, "step_time_s": statistics.median(times[1:] or times), "losses": losses}


def rate(t: int) -> float:
    """The published learning rate at step t: a linear warm-up, then a cosine."""
    if t < WARMUP:
        return RATE * (t + 1) / (WARMUP + 1)
    share = (1 + math.cos(math.pi * (t - WARMUP) / (STEPS - WARMUP))) / 2
    return LEAST_RATE + share * (RATE - LEAST_RATE)


if __name__ == "__main__":
    main(sys.argv[1:])
