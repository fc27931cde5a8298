"""The time of the update of a step, over the time that its bytes take.

    python benchmarks/speed/update.py [--parameters 50] [--json FILE]

One replica on one device (a GPU where there is one), with the arrays of a GPT-2 of --parameters
million in float32. Bytes are those that have to be read and written once: of parameters, mixed
parameters, gradients and the moments, and of the window of Accumulated Adam. The floor is these
bytes at the rate of a copy of one large array, measured in turn with the rest. A program repeats
what it does, so that starting one, which takes longer than an update on a GPU, does not count.

guarded     as in training: rejected where a gradient or an update is not finite.
unguarded   the inner optimizer alone, added to the mixed parameters.
"""

import math
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax import optim, replicas, topology
from decent_jax.ground.command_line import output_file
from decent_jax.train import xla

SCHEDULE = topology.make("one_peer_exp", 8)
LENGTH = 10  # repetitions within a program
OPTIMIZERS = {
    "adamw": optim.accum_adamw(1e-3, weight_decay=0.1, accum_steps=1),
    "accum_adamw": optim.accum_adamw(1e-3, weight_decay=0.1, accum_steps=4),
}


def main(arguments: list[str]) -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--parameters", type=float, default=50, help="in millions")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="for the JSON lines")
    parsed = parser.parse_args(arguments)
    if parsed.repeats < 1 or not 0 < parsed.parameters < 1e5:
        parser.error("--repeats is at least 1; --parameters, in millions, above 0 and below 1e5")
    params = arrays_of(parsed.parameters * 1e6)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    cases = {"copy": copy_of(size)}
    for name, inner in OPTIMIZERS.items():
        for guarded in (True, False):
            cases[f"{name}, {'' if guarded else 'un'}guarded"] = update_of(inner, params, guarded)
    seconds = {name: [] for name in cases}
    for repeat in tqdm(range(parsed.repeats + 2), desc="measuring", file=sys.stderr):
        for name, case in cases.items():
            took = case.run()
            if repeat >= 2:
                seconds[name].append(took)
    rate = cases["copy"].nbytes / statistics.median(seconds["copy"])
    rows = [row_of(name, cases[name], times, rate) for name, times in seconds.items()]
    print("| | ms | GB | of the time of its bytes |\n|---|---|---|---|")
    for row in rows:
        numbers = f"{1e3 * row['seconds']:.2f} | {row['bytes'] / 1e9:.2f} | {row['of_floor']:.2f}"
        print(f"| {row['update']} | {numbers} |")
    if parsed.json:
        commands.write_rows(parsed.json, rows)


def arrays_of(parameters: float) -> dict:
    """The matrices of GPT-2 without biases, with 12 width^2 parameters per layer; one at least."""
    width = max(1, min(768, math.isqrt(int(parameters / 12))))
    layers = max(1, round(parameters / (12 * width**2)))
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "norm": (width,)}
    shapes |= {"widen": (width, 4 * width), "narrow": (4 * width, width)}
    keys = iter(jax.random.split(jax.random.key(0), layers * len(shapes)))
    return [
        {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
        for _ in range(layers)
    ]


class Case:
    """A compiled program, its donated state, and the bytes that it has to move."""

    def __init__(self, program, state, fixed, nbytes: int):
        self.nbytes, self._state, self._fixed = nbytes, state, fixed
        options = xla.options_of_step(
            replicas.place(1, jax.devices()[:1]), SCHEDULE, optim.as_method(OPTIMIZERS["adamw"])
        )

        def repeated(state, *fixed):
            return jax.lax.fori_loop(0, LENGTH, lambda _, state: program(state, *fixed), state)

        donating = jax.jit(repeated, donate_argnums=0, compiler_options=options)
        self._program = donating.lower(state, *fixed).compile()

    def run(self) -> float:
        """The seconds of one repetition."""
        jax.block_until_ready(self._state)
        began = time.perf_counter()
        self._state = jax.block_until_ready(self._program(self._state, *self._fixed))
        return (time.perf_counter() - began) / LENGTH


def copy_of(nbytes: int) -> Case:
    """Reads and writes as many bytes as the parameters have, in place."""
    x = jnp.ones(nbytes // 4, jnp.float32)
    return Case(lambda x: x * jnp.float32(1.0001), x, (), 2 * nbytes)


def update_of(inner, params, guarded: bool) -> Case:
    """One update from mixed parameters and gradients."""
    tx = optim.decentralized(inner, SCHEDULE) if guarded else inner

    def step(state, grads, mixed):
        params, opt_state = state
        if guarded:
            updates, opt_state = tx.update(grads, opt_state, params, round=0, mixed=mixed)
            return optim.apply_updates(params, updates), opt_state
        updates, opt_state = tx.update(grads, opt_state, mixed)
        return optim.apply_updates(mixed, updates), opt_state

    state = jax.tree.map(jnp.copy, (params, tx.init(params)))
    other = jax.tree.map(lambda x: 0.01 * x, params)
    own, kept = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in state)
    # Read: gradients, mixed and own parameters (the guard's, which adds a difference) and the
    # optimizer's state. Written: parameters and the state.
    return Case(step, state, (other, params), (3 + guarded) * own + 2 * kept)


def row_of(name: str, case: Case, times: list[float], rate: float) -> dict:
    """``rate``: bytes per second of a copy."""
    seconds = statistics.median(times)
    row = {"update": name, "seconds": seconds, "bytes": case.nbytes, "bytes_per_s": rate}
    return row | {"of_floor": seconds * rate / case.nbytes, "device": jax.devices()[0].device_kind}


if __name__ == "__main__":
    main(sys.argv[1:])
