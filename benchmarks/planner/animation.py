"""Draw the README's animation: gossip agrees while all-reduce waits for a slow link.

    python benchmarks/planner/animation.py [--out docs/figures/gossip.gif]

Eight replicas, and one of the links between them has a third of the bandwidth of the others. The
planner's simulator says when each replica computes and waits; the colours are the parameters of
replicas that begin apart and only mix.
"""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands
from decent_jax import topology
from decent_jax.ground.command_line import output_file
from decent_jax.planner import network
from decent_jax.planner.runtime import AllReduce, Gossip, Workload
from decent_jax.planner.simulator import SimulatedSteps, simulate
from decent_jax.plots.style import GREY, INK, ORANGE

OUT = Path(__file__).resolve().parents[2] / "docs" / "figures" / "gossip.gif"
N, SLOW = 8, (0, 1)  # replicas; the link that is slow, from and to
MODEL_BYTES = 1e8
COMPUTE_S, MESSAGE_S, SLOWER = 1.0, 0.8, 3.0
END_S, FRAMES_PER_S, SPEED = 12.0, 4, 1.5  # simulated; of the film; simulated seconds in one
WORDS = "a step computes for 1 s; the orange link is three times as slow; orange rings wait"


class Panel(NamedTuple):
    """One algorithm: its run, the matrices of its rounds, and the parameters after each step."""

    title: str
    run: SimulatedSteps
    matrices: list[np.ndarray]
    values: list[np.ndarray]  # of the replicas, (n,)


def panels() -> list[Panel]:
    """All-reduce and gossip on the same hosts."""
    even = network.cluster([1] * N, network.NVLINK, network.Link(1e-6, MODEL_BYTES / MESSAGE_S))
    bandwidth = even.bandwidth_bytes_per_s.copy()
    bandwidth[SLOW] /= SLOWER
    where = dataclasses.replace(even, bandwidth_bytes_per_s=bandwidth)
    work = Workload(MODEL_BYTES, COMPUTE_S / 3, 2 * COMPUTE_S / 3)
    schedule = topology.make("one_peer_exp", N)
    rounds = [schedule.matrix(r) for r in range(schedule.period)]
    found = []
    for title, algorithm, matrices in (
        ("all-reduce over a ring", AllReduce("ring"), [np.full((N, N), 1 / N)]),
        ("gossip, one_peer_exp", Gossip(schedule), rounds),
    ):
        run = simulate(where, work, algorithm, steps=48, warm_up=0, record=True)
        values = [np.linspace(0.0, 1.0, N)[[0, 5, 2, 7, 4, 1, 6, 3]]]
        for step in range(len(run.ends_s)):
            values.append(matrices[step % len(matrices)] @ values[-1])
        found.append(Panel(title, run, matrices, values))
    return found


def frame(axes: Axes, shown: Panel, seconds: float) -> None:
    """The replicas at this moment: coloured by their parameters, hollow where they wait."""
    angles = np.pi / 2 - 2 * np.pi * np.arange(N) / N
    place = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    done = (shown.run.ends_s <= seconds).sum(axis=0)  # steps, of each replica
    waiting = {
        event.replica
        for event in shown.run.events
        if event.kind == "wait" and event.start_s <= seconds < event.end_s
    }
    axes.plot(*place[list(SLOW)].T, color=ORANGE, lw=5, alpha=0.45, zorder=1)
    for receiver in range(N):
        senders = np.flatnonzero(shown.matrices[done[receiver] % len(shown.matrices)][receiver])
        if len(shown.matrices) == 1:  # the ring of an all-reduce
            senders = [(receiver - 1) % N]
        for sender in senders:
            if sender != receiver:
                colour = ORANGE if (sender, receiver) == SLOW else "#9a9a9a"
                look = {"arrowstyle": "-|>", "color": colour, "lw": 1.4}
                look |= {"shrinkA": 13, "shrinkB": 13}
                axes.annotate("", place[receiver], place[sender], arrowprops=look)
    values = [shown.values[done[i]][i] for i in range(N)]
    edges = [ORANGE if i in waiting else INK for i in range(N)]
    colours = {"c": values, "cmap": "viridis", "vmin": 0, "vmax": 1}
    axes.scatter(*place.T, s=430, ec=edges, lw=2.2, zorder=3, **colours)
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.6, 1.2), aspect="equal")
    axes.axis("off")
    axes.set_title(shown.title, size=13, color=INK)
    axes.text(0, -1.5, f"{done.min()} steps done", ha="center", va="center", size=17, color=INK)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = commands.parser(__doc__)
    parser.add_argument("--out", type=output_file, default=OUT, metavar="FILE.gif")
    options = parser.parse_args(arguments)
    shown, figure, images = panels(), Figure(figsize=(8.4, 5.2)), []
    canvas = FigureCanvasAgg(figure)
    for seconds in np.arange(0, END_S, SPEED / FRAMES_PER_S):
        figure.clear()
        for k, one in enumerate(shown):
            frame(figure.add_axes((0.03 + 0.49 * k, 0.1, 0.45, 0.82)), one, seconds)
        figure.text(0.5, 0.04, f"{seconds:4.1f} s   {WORDS}", ha="center", size=11, color=GREY)
        canvas.draw()
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        images.append(image.quantize(64, dither=Image.Dither.NONE))
    film = {"save_all": True, "append_images": images[1:], "duration": 1000 // FRAMES_PER_S}
    images[0].save(options.out, loop=0, optimize=True, **film)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
