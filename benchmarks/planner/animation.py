"""Draw the README's animation: gossip agrees while all-reduce waits for a slow link.

    python benchmarks/planner/animation.py [--out docs/figures/gossip.gif]

Eight replicas, and one of the links between them has a third of the bandwidth of the others. The
planner's simulator says when each replica computes and waits; the colours are the parameters of
replicas that begin apart and only mix.
"""

import dataclasses
import sys
from pathlib import Path

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
from decent_jax.planner.runtime import Algorithm, AllReduce, Gossip, Workload
from decent_jax.planner.simulator import SimulatedSteps, simulate
from decent_jax.plots.style import GREY, INK, ORANGE

OUT = Path(__file__).resolve().parents[2] / "docs" / "figures" / "gossip.gif"
N, SLOW = 8, (0, 1)  # replicas; the link that is slow, from and to
MODEL_BYTES = 1e8
COMPUTE_S, MESSAGE_S, SLOWER = 1.0, 0.8, 3.0
END_S, FRAMES_PER_S, SPEED = 12.0, 4, 1.5  # simulated; of the film; simulated seconds in one


def hosts() -> network.Network:
    """Eight hosts; a model takes `MESSAGE_S` on all links except the slow one."""
    even = network.cluster([1] * N, network.NVLINK, network.Link(1e-6, MODEL_BYTES / MESSAGE_S))
    bandwidth = even.bandwidth_bytes_per_s.copy()
    bandwidth[SLOW] /= SLOWER
    return dataclasses.replace(even, bandwidth_bytes_per_s=bandwidth)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One algorithm: its run, and the parameters of the replicas after each step, (steps, n)."""

    title: str
    run: SimulatedSteps
    values: np.ndarray
    matrices: list[np.ndarray] | None

    def steps_done(self, seconds: float) -> np.ndarray:
        """(n,) steps that each replica has finished."""
        return (self.run.ends_s <= seconds).sum(axis=0)

    def waits(self, seconds: float) -> set[int]:
        """The replicas that wait."""
        return {
            event.replica
            for event in self.run.events
            if event.kind == "wait" and event.start_s <= seconds < event.end_s
        }


def panels() -> list[Panel]:
    """All-reduce and gossip on the same hosts."""
    where = hosts()
    work = Workload(MODEL_BYTES, COMPUTE_S / 3, 2 * COMPUTE_S / 3)
    schedule = topology.make("one_peer_exp", N)
    rounds = [schedule.matrix(r) for r in range(schedule.period)]
    return [
        panel("all-reduce over a ring", where, work, AllReduce("ring"), None),
        panel("gossip, one_peer_exp", where, work, Gossip(schedule), rounds),
    ]


def panel(
    title: str,
    where: network.Network,
    work: Workload,
    algorithm: Algorithm,
    matrices: list[np.ndarray] | None,
) -> Panel:
    run = simulate(where, work, algorithm, steps=48, warm_up=0, record=True)
    values = [np.linspace(0.0, 1.0, N)[[0, 5, 2, 7, 4, 1, 6, 3]]]
    for step in range(len(run.ends_s)):
        matrix = np.full((N, N), 1 / N) if matrices is None else matrices[step % len(matrices)]
        values.append(matrix @ values[-1])
    return Panel(title, run, np.array(values), matrices)


def frame(axes: Axes, shown: Panel, seconds: float) -> None:
    """The replicas at this moment: coloured by their parameters, hollow where they wait."""
    angles = np.pi / 2 - 2 * np.pi * np.arange(N) / N
    place = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    done, waiting = shown.steps_done(seconds), shown.waits(seconds)
    axes.plot(*place[list(SLOW)].T, color=ORANGE, lw=5, alpha=0.45, zorder=1)
    for receiver, sender in messages(shown, done):
        slow = (sender, receiver) == SLOW
        axes.annotate(
            "", place[receiver], place[sender],
            arrowprops={
                "arrowstyle": "-|>", "color": ORANGE if slow else "#9a9a9a", "lw": 1.4,
                "shrinkA": 13, "shrinkB": 13,
            },
        )  # fmt: skip
    values = shown.values[done, np.arange(N)]
    edges = [ORANGE if i in waiting else INK for i in range(N)]
    colours = {"c": values, "cmap": "viridis", "vmin": 0, "vmax": 1}
    axes.scatter(*place.T, s=430, ec=edges, lw=2.2, zorder=3, **colours)
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.6, 1.2), aspect="equal")
    axes.axis("off")
    axes.set_title(shown.title, size=13, color=INK)
    axes.text(0, -1.5, f"{done.min()} steps done", ha="center", va="center", size=17, color=INK)


def messages(shown: Panel, done: np.ndarray) -> list[tuple[int, int]]:
    """(receiver, sender) of the messages of each receiver's step; of all-reduce, of its ring."""
    if shown.matrices is None:
        return [((i + 1) % N, i) for i in range(N)]
    period = len(shown.matrices)
    return [
        (i, j)
        for i in range(N)
        for j in range(N)
        if i != j and shown.matrices[done[i] % period][i, j] > 0
    ]


def film(out: Path) -> None:
    """Write the GIF."""
    shown = panels()
    figure = Figure(figsize=(8.4, 5.2))
    canvas = FigureCanvasAgg(figure)
    images = []
    for seconds in np.arange(0, END_S, SPEED / FRAMES_PER_S):
        figure.clear()
        for k, one in enumerate(shown):
            frame(figure.add_axes((0.03 + 0.49 * k, 0.1, 0.45, 0.82)), one, seconds)
        words = "a step computes for 1 s; the orange link is three times as slow; orange rings wait"
        figure.text(0.5, 0.04, f"{seconds:4.1f} s   {words}", ha="center", size=11, color=GREY)
        canvas.draw()
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        images.append(image.quantize(64, dither=Image.Dither.NONE))
    images[0].save(
        out, save_all=True, append_images=images[1:], duration=1000 // FRAMES_PER_S, loop=0,
        optimize=True,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = commands.parser(__doc__)
    parser.add_argument("--out", type=output_file, default=OUT, metavar="FILE.gif")
    options = parser.parse_args(arguments)
    film(Path(options.out))
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
