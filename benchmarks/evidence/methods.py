"""Loss against bytes: methods that send seldom or little, on real text, simulated on one device.

    decent-jax prepare text --input TRAIN --val_input VALID --tokenizer bytes --out FOLDER
    python benchmarks/evidence/methods.py --data FOLDER [--json FILE] [--out FIGURE.png]

8 replicas train a small GPT on bytes, each method on the same batches in the same order, so with
equal tokens. Methods with local steps average every 10 steps (--every); their outer numbers are the
published ones, or the library's defaults. All-reduce in float32 is one replica with all batches.
The learning rate is tuned for each row at seed 0, by validation loss, among factors of 2, tried
outwards until both neighbours are worse; then the other seeds run with it. It warms up for a tenth
of the steps and falls along a cosine to a tenth. Adam has b2 0.95, or 0.999 where momentum is
gossiped; gradients are clipped to norm 1.

The loss is that of the consensus model, in nats per token, on the same validation windows. Bytes
are those that the busiest replica sends per step, as methods declare them (tests compare this with
the compiled programs). A row of --json is written per run as it comes, and a run that stands there
already, with the same sizes, is not run again; --figure draws such a file, as it did
benchmarks/records/methods.jsonl, whose rows stand in docs/algorithms.md.
"""

import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax import optim, topology
from decent_jax.data.text.token_folder import TokenWindows
from decent_jax.gossip import Simulated, codecs
from decent_jax.ground.command_line import picture_file
from decent_jax.models import decoders, gpt2
from decent_jax.models.pieces import cross_entropy
from decent_jax.optim import METHODS, Parts
from decent_jax.plots.style import BLUE, GREY, frame, new_figure, plain_numbers, save
from decent_jax.replicas import consensus_mean
from decent_jax.train.algorithm import hidden_matrices

N, EVERY = 8, 10
HELD_OUT = 2**15  # tokens of validation
LARGE = 10**6  # parameters above which replicas are computed one after the other


class Variant(NamedTuple):
    """A row: a method with its numbers; ``centre`` is where the search of the rate begins."""

    label: str
    method: str
    optimizer: str = "adam"
    schedule: str = "complete"
    every: int = EVERY
    numbers: tuple = ()
    centre: float = 4e-3
    codec: str = "float32"


PAIRS = "random_matching(rounds=64)"
MUON_INT8 = Variant("", "decentralized_sgd", "muon", "one_peer_exp", 1, (), 8e-3, "int8")
LONG_INT8 = Variant("", "gossiped_momentum", "long_adam", "one_peer_exp", 1, (), 1.6e-2, "int8")
SPARSE_MUON = Variant("", "sparseloco", "muon", every=2, centre=3.2e-2)
VARIANTS = (
    Variant("all_reduce, Adam", "all_reduce", every=1),
    Variant("accumulated Adam", "accum_adam", "accum_adam", "one_peer_exp", 1),
    LONG_INT8._replace(label="Adam, gossiped momentum, int8"),
    Variant("all_reduce, Muon", "all_reduce", "muon", every=1, centre=8e-3),
    Variant("Muon, gossip", "decentralized_sgd", "muon", "one_peer_exp", 1, centre=8e-3),
    MUON_INT8._replace(label="Muon, gossip, int8"),
    MUON_INT8._replace(label="Muon, gossip every 4, int8", every=4),
    MUON_INT8._replace(label="Muon, gossip every 8, int8", every=8),
    Variant("DiLoCo", "diloco"),
    Variant("MuLoCo", "diloco", "muon", centre=8e-3),
    Variant("NoLoCo", "noloco", schedule=PAIRS),
    Variant("NoLoCo, Muon", "noloco", "muon", PAIRS, centre=8e-3),
    Variant("SparseLoCo", "sparseloco"),
    Variant("SparseLoCo every 2", "sparseloco", every=2),
    Variant("SparseLoCo, Muon", "sparseloco", "muon", centre=8e-3),
    SPARSE_MUON._replace(label="SparseLoCo every 2, Muon"),
    SPARSE_MUON._replace(label="SparseLoCo of 2.2% every 2, Muon", numbers=(("density", 0.022),)),
    SPARSE_MUON._replace(
        label="SparseLoCo of 1% every step, Muon", every=1, numbers=(("density", 0.0105),)
    ),
    Variant("all_reduce, Adam, int8", "all_reduce", every=1, codec="int8"),
    Variant("DiLoCo, int4", "diloco", codec="int4"),
    Variant("MuLoCo, int4", "diloco", "muon", centre=8e-3, codec="int4"),
    Variant("DiLoCo, late", "diloco", numbers=(("delay", 5),)),
)


class Task:
    """The model, its data and a run of a variant."""

    def __init__(self, folder: Path, steps: int, batch: int, width: int, layers: int, context: int,
                 vocab: int):  # fmt: skip
        self.steps, self.batch, self.programs = steps, batch, {}
        self.windows = TokenWindows(folder / "train.bin", context)
        held_out = TokenWindows(folder / "val.bin", context)
        chosen = np.linspace(0, len(held_out) - 1, HELD_OUT // context).astype(int)
        self.held_out = jnp.asarray(np.stack([held_out[i] for i in chosen]), jnp.int32)
        self.config = gpt2.GPT2Config(
            vocab_size=vocab,
            context=context,
            layers=layers,
            heads=max(1, width // 32),
            width=width,
            bias=False,
            dtype="float32",
            attention="xla",
            init_std=width**-0.5,
        )
        self.large = decoders.num_params(self.config) > LARGE

    def one_by_one(self, f):
        """``f``, in a large model such that `jax.vmap` loops: its arrays stay in the caches."""
        return jax.custom_batching.sequential_vmap(f) if self.large else f

    def loss(self, params, tokens):
        logits = decoders.apply(self.config, params, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]).mean()

    def batches(self, seed: int) -> np.ndarray:
        """(steps, N, batch, context + 1)."""
        shape = (self.steps, N, self.batch)
        drawn = np.random.default_rng(seed).integers(len(self.windows), size=math.prod(shape))
        rows = np.stack([self.windows[i] for i in drawn]).astype(np.int32)
        return rows.reshape(*shape, -1)

    def parts(self, variant: Variant, schedule, rate) -> Parts:
        inner = {
            "adam": lambda: optax.adam(rate, b2=0.95),
            "long_adam": lambda: optax.adam(rate, b2=0.999),
            "accum_adam": lambda: optim.accum_adamw(rate, b2=0.95, accum_steps=2),
            "muon": lambda: optax.contrib.muon(
                rate,
                adam_b2=0.95,
                consistent_rms=0.2,
                muon_weight_dimension_numbers=hidden_matrices,
            ),
        }[variant.optimizer]()
        inner = optax.chain(optax.clip_by_global_norm(1.0), inner)
        inner = optax.GradientTransformation(inner.init, self.one_by_one(inner.update))
        return Parts(
            schedule,
            rate,
            inner,
            mix_every=variant.every,
            gradient=optax.clip_by_global_norm(1.0),
            codec=codecs.NAMED[variant.codec],
            numbers=dict(variant.numbers),
        )

    def bytes_per_step(self, variant: Variant) -> float:
        params = jax.eval_shape(lambda: decoders.init(self.config, jax.random.key(0)))
        method, schedule = METHODS[variant.method], schedule_of(variant)
        if schedule.num_replicas == 1:
            schedule = topology.make("complete", N)
        return method.bytes_sent(params, self.parts(variant, schedule, 0.1))

    def run(self, variant: Variant, rate: float, seed: int) -> float:
        """The validation loss of the consensus model at the end; inf where it diverged."""
        if variant not in self.programs:
            self.programs[variant] = self._program(variant)
        program, phases = self.programs[variant]
        schedule = schedule_of(variant)
        cycle, n = phases * variant.every, schedule.num_replicas
        cut = self.batches(seed).reshape(
            self.steps // cycle, phases, variant.every, n, self.batch * N // n, -1
        )
        rounds = range(self.steps // variant.every)
        mixing = np.stack([schedule.matrix(r % schedule.period) for r in rounds])
        params = decoders.init(self.config, jax.random.key(seed))
        found = float(program(jnp.float32(rate), params, cut, mixing.reshape(-1, phases, n, n)))
        return found if math.isfinite(found) else math.inf

    def _program(self, variant: Variant):
        """(jitted (rate, params, batches, matrices) -> loss, rounds of a cycle)."""
        method, schedule = METHODS[variant.method], schedule_of(variant)
        phases = method.phases({**method.numbers, **dict(variant.numbers)})
        n = schedule.num_replicas
        warmup, delay = self.steps // 10, dict(variant.numbers).get("delay", 0)

        def run(rate, params, batches, mixing):
            decay = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, self.steps, 0.1)
            tx = method.build(self.parts(variant, schedule, lambda t: rate * decay(t)))

            def step(round, carry, tokens):
                def one(x, state, tokens):
                    loss, grads = self.one_by_one(jax.value_and_grad(self.loss))(x, tokens)
                    updates, state = tx.update(grads, state, x, round=round, value=loss)
                    return optim.apply_updates(x, updates), state

                return jax.vmap(one, axis_name="replica")(*carry, tokens), None

            def cycle(carry, given):
                tokens, matrices = given
                for k in range(phases):
                    rnd, alone = Simulated(k, matrices[k]), functools.partial(step, None)
                    before, *last = jnp.split(tokens[k], [variant.every - max(delay, 1)])
                    carry, _ = jax.lax.scan(alone, carry, before)
                    if delay:
                        late = carry
                        carry, _ = jax.lax.scan(alone, carry, *last)
                        carry = landed(tx, rnd, late, carry)
                    else:
                        carry, _ = step(rnd, carry, tokens[k, -1])
                return carry, None

            x = jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), params)
            (x, _), _ = jax.lax.scan(cycle, (x, jax.vmap(tx.init)(x)), (batches, mixing))
            held_out = self.held_out.reshape(16, -1, self.held_out.shape[1])
            return jax.lax.map(functools.partial(self.loss, consensus_mean(x)), held_out).mean()

        return jax.jit(run), phases


def landed(tx, rnd, late, now):
    """(parameters, states) of all replicas, with the message that departed from ``late``."""

    def one(late, now):
        (x, departed), (y, state) = late, now
        message = tx.delayed.depart(x, departed.own, departed.count, rnd)
        y, own = tx.delayed.arrive(y, state.own, x, message, rnd)
        return y, state._replace(own=own)

    return jax.vmap(one, axis_name="replica")(late, now)


@functools.cache
def schedule_of(variant: Variant):
    """The schedule of a cycle; all_reduce in float32 is one replica with the batches of all."""
    method = METHODS[variant.method]
    phases = method.phases({**method.numbers, **dict(variant.numbers)})
    n = 1 if variant.method == "all_reduce" and variant.codec == "float32" else N
    return topology.repeat(topology.make(variant.schedule, n), phases)


def tune(measure, variant: Variant, factors: list[float]) -> float:
    """The best learning rate at seed 0, among these factors of the first if there are any."""

    def at(k: float) -> float:
        return measure(variant, variant.centre * 2.0**k, 0)

    if factors:
        return variant.centre * 2.0 ** min(map(math.log2, factors), key=at)
    best = 0
    while (better := min((best, best - 1, best + 1), key=at)) != best:
        best = better
    return variant.centre * 2.0**best


def best_rows(rows: list[dict]) -> dict[str, list[dict]]:
    """By label, the runs of all seeds with the learning rate that is best at seed 0."""
    found = {}
    for label in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == label]
        rate = min((r for r in mine if r["seed"] == 0), key=lambda r: r["loss"])["learning_rate"]
        found[label] = [row for row in mine if row["learning_rate"] == rate]
    return found


def by_size(rows: list[dict]) -> dict[int, list[dict]]:
    """The rows of each model, by its number of parameters."""
    sizes = sorted({row["parameters"] for row in rows})
    return {size: [row for row in rows if row["parameters"] == size] for size in sizes}


def print_tables(rows: list[dict]) -> None:
    """A table for each model."""
    for size, of_size in by_size(rows).items():
        found = best_rows(of_size)
        base = found.get("all_reduce, Adam")
        print(f"{size:,} parameters\n")
        print("| method | schedule | learning rate | tried | loss | MB per step | times fewer |")
        print("|---|---|---|---|---|---|---|")
        for label, mine in found.items():
            tried = sorted({row["learning_rate"] for row in of_size if row["method"] == label})
            losses = ", ".join(f"{row['loss']:.3f}" for row in mine)
            sent = mine[0]["bytes_per_step"]
            fewer = f"{base[0]['bytes_per_step'] / sent:.3g}" if base else ""
            print(
                f"| {label} | `{mine[0]['schedule']}` | {mine[0]['learning_rate']:g} | "
                f"{', '.join(map('{:g}'.format, tried))} | {losses} | {sent / 1e6:.3g} | {fewer} |"
            )


def draw(rows: list[dict]):
    """A mark per method, its name beside it, over the range of its seeds; a panel for each model.

    Bytes are on a logarithmic axis. Blue are the methods of the front: no other one ends below the
    mean loss with as few bytes. Runs that diverged, above the loss of equal chances, are left out.
    """
    rows = [row for row in rows if row["loss"] < math.log(row["vocab"])]
    panels = by_size(rows)
    figure = new_figure(6.6 * len(panels), 5.4)
    for axes, (size, of_size) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        found = {
            label: (mine[0]["bytes_per_step"] / 1e6, np.array([row["loss"] for row in mine]))
            for label, mine in best_rows(of_size).items()
        }
        means = {label: (sent, losses.mean()) for label, (sent, losses) in found.items()}
        front = _front(means)
        line = np.transpose([means[label] for label in front])
        axes.plot(*line, color=BLUE, lw=1, ls=":", zorder=1)
        for label, (sent, losses) in found.items():
            colour = BLUE if label in front else GREY
            axes.vlines(sent, losses.min(), losses.max(), color=colour, lw=1, alpha=0.5)
            axes.plot(*means[label], "o", color=colour, ms=6, mec="white", mew=0.7)
        axes.set_xscale("log")
        axes.set_xlim(right=axes.get_xlim()[1] * 2)
        plain_numbers(axes.xaxis, (1,))
        frame(axes, f"{size / 1e6:.2g}M parameters, equal tokens")
        axes.set_xlabel("MB that a replica sends per step", color=GREY)
        unit = "byte" if of_size[0]["vocab"] == 256 else "token"
        axes.set_ylabel(f"validation loss, nats per {unit}", color=GREY)
        _name(axes, means, front)
    return figure


def _front(points: dict[str, tuple[float, float]]) -> list[str]:
    """The points (bytes, loss) of which no other is below both, fewest bytes first."""
    chosen, best = [], math.inf
    for label, (_, loss) in sorted(points.items(), key=lambda point: point[1]):
        if loss < best:
            chosen.append(label)
            best = loss
    return chosen


def _name(axes, points: dict[str, tuple[float, float]], front: list[str]) -> None:
    """Write each name beside its point, above it where another name is in the way."""
    height, letter = 0.035, 0.0115  # of a line and of a letter, in parts of the panel
    transform = axes.transData + axes.transAxes.inverted()
    taken: list[tuple[float, float, float]] = []  # left, right, y
    for label, point in sorted(points.items(), key=lambda one: one[1][1]):
        x, y = transform.transform(point)
        width = letter * len(label)
        left = x + 0.015 if x + 0.015 + width < 1.02 else x - 0.015 - width
        free = y
        while any(
            left < right and other < left + width and abs(free - at) < height
            for other, right, at in taken
        ):
            free += 0.2 * height
        taken.append((left, left + width, free))
        bold = "bold" if label in front else "normal"
        text = axes.text(left, free, label, transform=axes.transAxes, va="center", zorder=1)
        text.set(color=BLUE if label in front else GREY, size=8.5, weight=bold)
        text.set_bbox({"fc": "white", "ec": "none", "pad": 0.3, "alpha": 0.75})


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = commands.parser(__doc__)
    parser.add_argument("--data", type=Path, help="a folder of `prepare text --tokenizer bytes`")
    parser.add_argument("--steps", type=int, default=600, help="a multiple of 60 (600)")
    parser.add_argument("--batch", type=int, default=4, help="windows per replica and step (4)")
    parser.add_argument("--width", type=int, default=32, help="of the model (32)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (2)")
    parser.add_argument("--context", type=int, default=64, help="bytes (64)")
    parser.add_argument("--vocab", type=int, default=256, help="of the tokenizer (256)")
    parser.add_argument("--every", type=int, default=EVERY, help=f"local steps ({EVERY})")
    parser.add_argument("--rates", type=float, nargs="+", default=[], metavar="FACTOR",
                        help="try these factors of a method's first rate, no others")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="(3)")
    parser.add_argument("--only", default="", help="labels, separated by semicolons (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the numbers here")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw this, train nothing")
    parser.add_argument("--out", type=picture_file, metavar="FIGURE.png", help="draw here")
    options = parser.parse_args(arguments)
    rows: list[dict] = []
    if options.figure:
        rows = commands.read_rows(options.figure)
    else:
        if options.data is None or options.steps % 60 or options.steps < 60:
            parser.error("--data is needed, and --steps must be a multiple of 60")
        sizes = (options.batch, options.width, options.layers, options.context, options.vocab)
        task = Task(options.data, options.steps, *sizes)
        kept = ("steps", "batch", "width", "layers", "context", "vocab", "every")
        same = {name: getattr(options, name) for name in kept}
        began, known = time.perf_counter(), {}
        for row in commands.read_rows(options.json) if options.json else ():
            if same.items() <= row.items():
                known[row["method"], row["learning_rate"], row["seed"]] = row

        def measure(variant: Variant, rate: float, seed: int) -> float:
            if (row := known.get((variant.label, rate, seed))) is None:
                row = {"method": variant.label, "schedule": variant.schedule}
                row |= {"learning_rate": rate, "seed": seed}
                row |= {"loss": task.run(variant, rate, seed)}
                row |= {"bytes_per_step": task.bytes_per_step(variant)}
                row |= {"parameters": decoders.num_params(task.config), **same}
                known[variant.label, rate, seed] = row
                print(f"{time.perf_counter() - began:.0f} s {row}", file=sys.stderr, flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            if row not in rows:
                rows.append(row)
            return row["loss"]

        wanted = [label for label in options.only.split(";") if label]
        for variant in VARIANTS:
            if not wanted or variant.label in wanted:
                if variant.every == EVERY:
                    variant = variant._replace(every=options.every)
                rate = tune(measure, variant, options.rates)
                for seed in range(1, options.seeds):
                    measure(variant, rate, seed)
    print_tables(rows)
    if options.out:
        save(draw(rows), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
