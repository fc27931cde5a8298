"""Draw the README's figure: who receives from whom, how replicas agree, where training ends.

    python benchmarks/figure.py GOSSIP_RUN ALL_REDUCE_RUN [--out docs/figures/overview.png]

The two runs are --workdir folders of train.py, made of one config with and without
--config.algorithm=all_reduce. The left and middle panels are computed here in a second.
"""

import functools
import sys
from pathlib import Path

import commands
import jax
import numpy as np
from matplotlib.figure import Figure

from decent_jax import gossip, replicas, topology
from decent_jax.ground.command_line import picture_file
from decent_jax.ground.errors import RunError
from decent_jax.ground.run_folder import load_run, smoothed
from decent_jax.plots.style import BLUE, COLOURS, INK, ORANGE, PINK, frame, new_figure

OUT = Path(__file__).resolve().parents[1] / "docs" / "figures" / "overview.png"


def draw(gossip_run, all_reduce_run) -> Figure:
    """The figure of two loaded runs."""
    figure = new_figure(13, 4.1, w_pad=0.1, wspace=0.05)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.2, 1.3))
    _rounds(left)
    _agreement(middle)
    _training(right, gossip_run, all_reduce_run)
    return figure


def _rounds(axes, n: int = 8) -> None:
    """The rounds of one_peer_exp over each other, on a circle."""
    schedule = topology.make("one_peer_exp", n)
    angles = np.pi / 2 - 2 * np.pi * np.arange(n) / n
    at = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for r in range(schedule.period):
        for receiver, sender in np.argwhere(schedule.matrix(r) > 0):
            if receiver != sender:
                axes.annotate(
                    "",
                    at[receiver],
                    at[sender],
                    arrowprops={
                        "arrowstyle": "-|>,head_width=0.25,head_length=0.5",
                        "color": COLOURS[r],
                        "lw": 1.6,
                        "shrinkA": 11,
                        "shrinkB": 11,
                    },
                )
        axes.plot([], [], color=COLOURS[r], lw=2.5, label=f"step {r + 1}")
    axes.scatter(*at.T, s=330, color="white", ec=INK, lw=1.2, zorder=3)
    for i in range(n):
        axes.annotate(
            i, at[i], ha="center", va="center_baseline", size=11, color=INK, annotation_clip=False
        ).set_zorder(4)
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.2, 1.2), aspect="equal")
    axes.axis("off")
    axes.set_title("Each replica receives from one other per step", loc="left", size=12, color=INK)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=3, frameon=False, handlelength=1.2
    )


def _agreement(axes, n: int = 16, rounds: int = 16) -> None:
    """Measured consensus distance of replicas that only mix."""
    shown = (("bidirectional_ring", PINK), ("ring", ORANGE), ("one_peer_exp", BLUE))
    for name, colour in shown:
        schedule = topology.make(name, n)
        distances = np.maximum(_distances(schedule, n, rounds), 1e-7)
        exact = schedule.consensus_rate() == 0
        stop = schedule.period + 1 if exact else rounds + 1
        axes.plot(distances[:stop], "o-", ms=4.5, lw=1.4, color=colour)
        text = f"{name}: exact after\n{schedule.period} rounds" if exact else name
        place = (stop - 0.4, 1.3e-7) if exact else (rounds, distances[-1])
        offset = {"bidirectional_ring": (0, 12), "ring": (0, -17)}.get(name, (0, 0))
        axes.annotate(
            text,
            place,
            xytext=offset,
            textcoords="offset points",
            ha="left" if exact else "right",
            va="center",
            color=colour,
            size=11,
        )
    axes.set(yscale="log", ylim=(3e-8, 3))
    axes.set_xlabel("round")
    frame(axes, f"{n} replicas agree: consensus distance")


def _distances(schedule, n: int, rounds: int) -> np.ndarray:
    """Relative to the start; (rounds + 1,)."""

    @functools.partial(jax.jit, static_argnames="r")
    def mix(x, r):
        x = jax.vmap(lambda own: gossip.mix(own, schedule, r), axis_name="replica")(x)
        return x, replicas.consensus_distance(x).distance

    x = jax.random.normal(jax.random.key(0), (n, 4096))
    values = [float(replicas.consensus_distance(x).distance)]
    for t in range(rounds):
        x, distance = mix(x, r=t % schedule.period)
        values.append(float(distance))
    return np.array(values) / values[0]


def _training(axes, gossip_run, all_reduce_run) -> None:
    """Loss by step: training as lines, validation of the consensus model as dots and rings."""
    ring = {"ms": 11, "mfc": "none", "mec": ORANGE, "mew": 2}
    dot = {"ms": 7, "mec": "white", "mfc": BLUE}
    runs = ((gossip_run, "gossip", BLUE, dot), (all_reduce_run, "all-reduce", ORANGE, ring))
    late = []
    for run, label, colour, mark in runs:
        steps, loss = run.series("train/loss")
        axes.plot(steps, smoothed(loss), color=colour, lw=1.4, alpha=0.6)
        late.append(loss[len(loss) // 20 :])
        steps, loss = run.series("eval/loss")
        final = f", at the end {loss[-1]:.3f}" if len(loss) else ""
        axes.plot(steps, loss, "o", zorder=3, label=label + final, **mark)
        late.append(loss)
    values = np.concatenate(late)
    values = values[np.isfinite(values)]
    margin = 0.06 * np.ptp(values)
    axes.set_ylim(values.min() - margin, values.max() + margin)
    axes.legend(
        title="validation loss", title_fontsize=11, frameon=False, alignment="left", fontsize=11
    )
    axes.set_xlabel("step")
    frame(axes, "Training: loss, nats per byte")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = commands.parser(__doc__)
    parser.add_argument("gossip_run", metavar="GOSSIP_RUN", help="--workdir of the gossip run")
    parser.add_argument("all_reduce_run", metavar="ALL_REDUCE_RUN", help="of the baseline")
    parser.add_argument("--out", type=picture_file, default=str(OUT), metavar="FILE.png")
    options = parser.parse_args(arguments)
    try:
        figure = draw(load_run(options.gossip_run), load_run(options.all_reduce_run))
        figure.savefig(options.out, dpi=110, facecolor="white")
    except (RunError, OSError) as error:
        print(f"figure.py: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
