"""What docs/accelerators.md computes, measured: one command, under six minutes on one GPU, offline.

    python benchmarks/speed/gpu_report.py [--out FOLDER] [--minutes 5.5] [--parts gpt2,...]

Writes FOLDER/report.md, a page to read, and FOLDER/report.jsonl, a row per number, after each part,
in the order of their worth. Each part is a process of its own: where one fails or the time is up,
the page says so and the others go on.

gpt2      GPT-2 124M in bfloat16 with cuDNN's attention, 16 sequences of 1024 tokens a step: a plain
          optax loop, all_reduce and gossip with one replica, gossip with eight on the GPU; and
          gossip with 64 sequences.
resnet50  ResNet-50 in bfloat16, 128 images of 176 pixels a step: a plain loop, and ours.
update    the guarded update of a step, over the time of its bytes (update.py).
formats   encoding and decoding of a model of 124M parameters in each format of messages.
trace     of three steps of gossip, for TensorBoard or Perfetto, in FOLDER/trace.

Steps of all variants of a part are timed in turn, and the number is the median; compiling is timed
the first time, into an empty cache. --tiny is a self-check of the script, on any device.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from benchmarks.speed import update
from benchmarks.speed.step_time import Parts, Variant
from decent_jax import replicas
from decent_jax.gossip.codecs import NAMED, bytes_sent
from decent_jax.monitor.goodput import peak
from decent_jax.train import config as config_lib
from decent_jax.train import default_config

Row = dict[str, Any]
GPT2 = {"preset": "small", "vocab_size": 50304, "bias": False, "context": 1024}
GPT2 |= {"dtype": "bfloat16", "attention": "cudnn"}
TINY_GPT2 = {"layers": 1, "heads": 2, "width": 32, "context": 32}
REPLICAS = 8  # on one GPU
MANY = 64  # sequences a step


# --- Variants of a step ---------------------------------------------------------------------------


class Plain:
    """The loop that a user of optax would write, with the interface of `Variant`."""

    def __init__(self, config, folder: str, device: jax.Device):
        placement = replicas.place(1, [device])
        parts = Parts.of(config, folder, placement, [0])
        task, options = parts.task, config.optimizer
        tx = optax.adamw(
            parts.rate, options.b1, options.b2, options.eps, weight_decay=options.weight_decay
        )
        if options.clip_norm:
            tx = optax.chain(optax.clip_by_global_norm(options.clip_norm), tx)

        def step(state, batch, t):
            params, model_state, opt_state = state
            key = jax.random.fold_in(jax.random.key(0), t)
            found, grads = jax.value_and_grad(task.loss, has_aux=True)(
                params, model_state, batch, key
            )
            loss, model_state = found
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), model_state, opt_state), loss

        params, model_state = task.init(jax.random.key(0))
        state = jax.device_put((params, model_state, tx.init(params)), device)
        self.state = jax.tree.map(jax.numpy.copy, state)
        self.batch = jax.device_put(jax.tree.map(lambda x: x[0], parts.batch), device)
        lowered = jax.jit(step, donate_argnums=0).lower(self.state, self.batch, np.int32(0))
        began = time.perf_counter()
        self.step = lowered.compile()
        self.compile_s = [time.perf_counter() - began]
        self.units = config.batch_size * task.units_per_example
        self.seconds: list[float] = []
        self.run(2)
        self.seconds.clear()

    def run(self, steps: int) -> None:
        """As `Variant.run`."""
        jax.block_until_ready(self.state)
        began = time.perf_counter()
        for t in range(steps):
            self.state, loss = self.step(self.state, self.batch, np.int32(t))
        jax.block_until_ready((self.state, loss))
        self.seconds.append((time.perf_counter() - began) / steps)


def in_turn(variants: dict[str, Any], steps: int, repeats: int) -> None:
    for _ in range(repeats):
        for variant in variants.values():
            variant.run(steps)


def row_of(name: str, variant, unit: str, flops_a_unit: float, devices: list[jax.Device]) -> Row:
    seconds = statistics.median(variant.seconds)
    row = {"name": name, "ms": 1e3 * seconds, f"{unit}_per_s": variant.units / seconds}
    if at_most := peak(devices):
        row["mfu"] = flops_a_unit * row[f"{unit}_per_s"] / at_most
    return row | {"compile_s": sum(variant.compile_s)}


def beside(rows: list[Row], name: str) -> list[Row]:
    """With the time of a token or image over that of the row of this name."""
    base = next(row for row in rows if row["name"] == name)
    (rate,) = (key for key in base if key.endswith("_per_s"))
    return [row | {f"of_{name.replace(' ', '_')}": base[rate] / row[rate]} for row in rows]


def gpt2(tiny: bool, n: int, **changes: Any):
    """A config with n replicas; of gossip, with Accumulated Adam, if nothing else is said."""
    config = default_config("language_modeling")
    config.data.path = "stdlib"
    config.model.update(TINY_GPT2 if tiny else GPT2)
    config.num_replicas, config.batch_size = n, 16
    config.optimizer.clip_norm = 1.0
    config.algorithm, config.optimizer.accum_steps = "accum_adam", 4
    config.update(changes)
    config_lib.validate(config)
    return config_lib.parse(config)


# --- The parts ------------------------------------------------------------------------------------


def part_update(parsed: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        size = ["--parameters", "0.1", "--repeats", "2"] if parsed.tiny else ["--parameters", "124"]
        update.main([*size, "--json", str(path)])
        for line in path.read_text().splitlines():
            row = json.loads(line)
            yield {
                "name": row["update"],
                "ms": 1e3 * row["seconds"],
                "gigabytes": row["bytes"] / 1e9,
                "of_its_bytes": row["of_floor"],
            }


def part_gpt2(parsed: argparse.Namespace) -> Iterator[Row]:
    devices = jax.devices()[:1]
    alone = gpt2(parsed.tiny, 1, algorithm="all_reduce")
    with tempfile.TemporaryDirectory() as folder:
        variants = {
            "plain optax": Plain(alone, folder, devices[0]),
            "all_reduce": Variant(alone, folder, [None], devices),
            "gossip": Variant(gpt2(parsed.tiny, 1), folder, [0], devices),
            f"gossip, {REPLICAS} replicas": Variant(
                gpt2(parsed.tiny, REPLICAS), folder, [0], devices
            ),
            f"gossip, {MANY} sequences": Variant(
                gpt2(parsed.tiny, 1, batch_size=MANY), folder, [0], devices
            ),
        }
        flops = Parts.of(alone, folder, replicas.place(1, devices), [0]).task
        # Many steps at a time: the GPU waits for the first to be started, and for no other.
        in_turn(variants, *((1, 1) if parsed.tiny else (30, 3)))
    each = flops.flops_per_example / flops.units_per_example
    rows = [row_of(name, one, "tokens", each, devices) for name, one in variants.items()]
    yield from beside(rows, "plain optax")


def part_formats(parsed: argparse.Namespace) -> Iterator[Row]:
    tiny = [np.ones((8, 768), np.float32)]
    arrays = tiny if parsed.tiny else jax.tree.leaves(update.arrays_of(124e6))
    keys = list(jax.random.split(jax.random.key(0), len(arrays)))
    for name, codec in NAMED.items():
        if codec is None:
            continue

        def encode(arrays, keys, codec=codec):
            noise = [codec.noise(k, x.shape) for k, x in zip(keys, arrays, strict=True)]
            return [codec.encode(x, u) for x, u in zip(arrays, noise, strict=True)]

        def decode(parts, arrays, codec=codec):
            return [codec.decode(p, x) for p, x in zip(parts, arrays, strict=True)]

        parts, there = timed(jax.jit(encode), arrays, keys)
        _, back = timed(jax.jit(decode), parts, arrays)
        sent = sum(bytes_sent(codec, x.shape) for x in arrays)
        row = {"name": name, "gigabytes": sent / 1e9}
        yield row | {"encode_ms": 1e3 * there, "decode_ms": 1e3 * back}


def timed(program: Callable, *arguments: Any) -> tuple[Any, float]:
    """Its result, and the median of its seconds once it is compiled."""
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        found = jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - began)
    return found, statistics.median(seconds[1:])


def part_resnet50(parsed: argparse.Namespace) -> Iterator[Row]:
    config = default_config("image_classification")
    config.data.update(path="generated", train_images=256, val_images=16)
    config.data.update(eval_size=0, eval_resize=0)
    config.algorithm, config.num_replicas = "all_reduce", 1
    if parsed.tiny:
        config.model.update(blocks="1", width=4, small_images=True)
        config.data.image_size, config.batch_size = 32, 8
    else:
        config.model.update(preset="resnet50", dtype="bfloat16")
        config.data.image_size, config.batch_size = 176, 128
    config_lib.validate(config)
    config = config_lib.parse(config)
    devices = jax.devices()[:1]
    with tempfile.TemporaryDirectory() as folder:
        variants = {
            "plain optax": Plain(config, folder, devices[0]),
            "all_reduce": Variant(config, folder, [None], devices),
        }
        in_turn(variants, *((1, 1) if parsed.tiny else (20, 5)))
        task = Parts.of(config, folder, replicas.place(1, devices), [0]).task
    flops = task.flops_per_example
    rows = [row_of(name, one, "images", flops, devices) for name, one in variants.items()]
    yield from beside(rows, "plain optax")


def part_trace(parsed: argparse.Namespace) -> Iterator[Row]:
    where = parsed.out / "trace"
    with tempfile.TemporaryDirectory() as folder:
        variant = Variant(gpt2(parsed.tiny, 1), folder, [0], jax.devices()[:1])
        with jax.profiler.trace(str(where)):
            variant.run(3)
    size = sum(path.stat().st_size for path in where.rglob("*") if path.is_file())
    yield {"name": "gossip", "ms": 1e3 * variant.seconds[-1], "megabytes": size / 1e6}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "gpt2": part_gpt2,
    "resnet50": part_resnet50,
    "update": part_update,
    "formats": part_formats,
    "trace": part_trace,
}


# --- The report -----------------------------------------------------------------------------------


def machine() -> Row:
    """What the numbers were measured on."""
    device = jax.devices()[0]
    row = {"device": device.device_kind, "devices": len(jax.devices())}
    row |= {"jax": jax.__version__, "platform": device.client.platform_version.splitlines()[0]}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        row["driver"] = subprocess.check_output(query, text=True).splitlines()[0]
    return row


def run_part(name: str, parsed: argparse.Namespace, seconds: float, cache: str) -> list[Row]:
    """The rows of a part, made in another process; with the reason if it did not end well."""
    if seconds <= 0:
        return [{"part": name, "failure": "was not begun, as the time was up"}]
    argv = [sys.executable, __file__, "--only", name, "--out", str(parsed.out)]
    argv += ["--tiny"] if parsed.tiny else []
    own = {"JAX_COMPILATION_CACHE_DIR": cache, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    log = parsed.out / f"{name}.log"
    with log.open("w") as words, tempfile.TemporaryFile("w+") as file:
        try:
            done = subprocess.run(
                argv, env=os.environ | own, stdout=file, stderr=words, timeout=seconds
            )
            why = log.read_text(errors="replace").strip().rpartition("\n")[2][:200]
            failure = f"failed with code {done.returncode}: {why}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"was stopped after {seconds:.0f} s, as the time was up"
        file.seek(0)
        rows = [json.loads(line) for line in file.read().splitlines() if line.startswith("{")]
    if failure:
        rows.append({"failure": failure})
    return [{"part": name} | row for row in rows]


def page(rows: list[Row]) -> str:
    """The rows as tables, one per part and set of columns."""
    lines = ["# What this GPU does", ""]
    lines += [f"- {name}: {value}" for name, value in rows[0].items() if name != "part"]
    heads: tuple[str, ...] = ()
    part = None
    for row in rows[1:]:
        if row["part"] != part:
            part, heads = row["part"], ()
            lines += ["", f"## {part}"]
        if "failure" in row:
            lines += ["", f"**This part {row['failure']}.**"]
            continue
        cells = {name: value for name, value in row.items() if name != "part"}
        if tuple(cells) != heads:
            heads = tuple(cells)
            titles = ("" if head == "name" else head.replace("_", " ") for head in heads)
            lines += ["", f"| {' | '.join(titles)} |", "|---" * len(heads) + "|"]
        shown = (x if isinstance(x, str) else f"{x:.4g}" for x in cells.values())
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = commands.parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=5.5, help="for all parts together")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="models that any device computes")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)  # in its own process
    parsed = parser.parse_args(arguments)
    if parsed.only:
        for row in PARTS[parsed.only](parsed):
            print(json.dumps(row), flush=True)
        return 0
    names = parsed.parts.split(",")
    if not set(names) <= set(PARTS):
        parser.error(f"--parts takes some of {','.join(PARTS)}, got {parsed.parts}")
    if parsed.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {parsed.minutes:g}")
    end = time.monotonic() + 60 * parsed.minutes
    parsed.out.mkdir(parents=True, exist_ok=True)
    about = subprocess.run(
        [sys.executable, "-c", "import gpu_report, json; print(json.dumps(gpu_report.machine()))"],
        cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip  # this process must not hold the memory of the GPU
    rows = [json.loads(about.stdout.splitlines()[-1])]
    with tempfile.TemporaryDirectory() as cache:
        for name in tqdm(names, file=sys.stderr):
            rows += run_part(name, parsed, end - time.monotonic(), cache)
            commands.write_rows(parsed.out / "report.jsonl", rows)
            (parsed.out / "report.md").write_text(page(rows))
    print(page(rows))
    return int(any("failure" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
