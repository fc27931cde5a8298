"""Share of the time that four hosts compute, by the rate of their links and the pause in between.

    python benchmarks/speed/slow_links.py --out DIR  # as root, on idle cores: half an hour
    python benchmarks/speed/slow_links.py --out DIR --draw FILE.png  # from what is in DIR

Four hosts of hosts.sh with one replica each. step_time.py measures, in turn, a step without
communication and one with a message of each kind; DIR gets its JSON lines, a file per rate. A
method that communicates every H steps takes H - 1 of the former for each of the latter. In
brackets is what `decent-jax planner predict` says, given the rate and the step without messages.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import commands, run_on_hosts
from decent_jax import topology
from decent_jax.planner import costs, network, predict, runtime
from decent_jax.planner.network import Link
from decent_jax.planner.runtime import AllReduce, Gossip, Workload
from decent_jax.plots import style

HOSTS = 4
MBIT = (10, 50, 200, 1000)
PAUSES = (1, 8, 32, 128)
ARMS = {  # name: the label of step_time.py, steps between two messages
    "one_peer_exp": ("one_peer_exp", PAUSES[:3]),
    "one_peer_exp, int8": ("one_peer_exp:codec=int8", PAUSES[:3]),
    "diloco": ("complete:algorithm=diloco", PAUSES[1:]),
}
# {(arm, steps between messages): (share of the time that computes, the predicted one)}
Shares = dict[tuple[str, int], tuple[float, float]]


def main(arguments: list[str]) -> int:
    parser = commands.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--draw", type=Path, metavar="FILE.png", help="measure nothing")
    parser.add_argument("--mbit", type=_rates, default=MBIT, help="default: 10,50,200,1000")
    parser.add_argument("--repeats", type=int, default=3)
    parsed = parser.parse_args(arguments)
    parsed.out.mkdir(parents=True, exist_ok=True)
    files = {rate: parsed.out / f"{rate:g}.jsonl" for rate in parsed.mbit}
    if parsed.draw is None:
        for rate, file in files.items():
            measure(rate, file, parsed.repeats)
    cells = {rate: shares(commands.read_rows(file), rate) for rate, file in files.items()}
    print(table(cells))
    if parsed.draw is not None:
        draw(cells, parsed.draw)
    return 0


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def measure(rate: float, file: Path, repeats: int) -> None:
    """Make the hosts, measure on them, remove them."""
    labels = ["none", "all_reduce", *(label for label, _ in ARMS.values())]
    program = ["benchmarks/speed/step_time.py", f"--algorithms={','.join(labels)}", "--steps=2"]
    program += [f"--repeats={repeats}", f"--json={file}", f"--network={rate:g}mbit"]
    with run_on_hosts.hosts(HOSTS, rate, ray=False):
        if run_on_hosts.run_on_all(run_on_hosts.names_of_hosts(), program):
            sys.exit(f"step_time.py failed on links of {rate:g} Mbit/s")


def shares(rows: list[dict], rate: float) -> Shares:
    """The share of the time that computes, measured and predicted, of every arm and pause."""
    seconds = {row["algorithm"]: row["step_time_s"] for row in rows}
    compute, model_bytes = seconds["none"], rows[0]["model_bytes"]
    workload = Workload(model_bytes, compute / 3, 2 * compute / 3)
    link = Link(1e-4, rate * 1e6 / 8)
    links = network.cluster([1] * HOSTS, link, link)
    reduce = AllReduce(bucket_bytes=math.inf)  # XLA on CPUs sends gradients when it has all of them
    average_s = costs.total_s(runtime.phases_of(links, workload, reduce, model_bytes)[0])

    def predicted(arm: str, pause: int) -> float:
        if arm == "diloco":
            return compute + average_s / pause
        codec, schedule = ("int8" if "int8" in arm else "float32"), topology.make(arm[:12], HOSTS)
        return predict.step_s(links, workload, Gossip(schedule, pause, codec=codec))

    found = {("all_reduce", 1): (compute / seconds["all_reduce"], compute / (compute + average_s))}
    for arm, (label, pauses) in ARMS.items():
        for pause in pauses:
            step = compute + (seconds[label] - compute) / pause
            found[arm, pause] = compute / step, compute / predicted(arm, pause)
    return found


def table(cells: dict[float, Shares]) -> str:
    """In Markdown: percent, measured and in brackets predicted."""
    lines = [f"| | every | {' | '.join(f'{rate:g} Mbit/s' for rate in cells)} |"]
    lines.append("|---" * (2 + len(cells)) + "|")
    for arm, pause in next(iter(cells.values())):
        found = [of_rate[arm, pause] for of_rate in cells.values()]
        words = [f"{100 * own:.0f} ({100 * planned:.0f})" for own, planned in found]
        lines.append(f"| {arm} | {pause} | {' | '.join(words)} |")
    return "\n".join(lines)


def draw(cells: dict[float, Shares], file: Path) -> None:
    """A panel per arm: the share against the rate, a line per pause; predictions are dotted."""
    arms, pauses = ["all_reduce", *ARMS], [1, 8, 32, 128]
    figure, panels = style.grid(
        len(arms), 2, ["a message every step", *(f"every {n} steps" for n in pauses[1:])]
    )
    for arm, panel in zip(arms, panels, strict=True):
        style.frame(panel, arm, "dotted: predicted")
        panel.set(xscale="log", ylim=(0, 103), xticks=list(cells))
        panel.set_xlabel("Mbit/s", color=style.GREY, size=9)
        panel.set_ylabel("% of the time computing", color=style.GREY, size=9)
        style.plain_numbers(panel.xaxis)
        for k, pause in enumerate(pauses):
            found = [of_rate.get((arm, pause)) for of_rate in cells.values()]
            if None in found:
                continue
            measured, predicted = zip(*found, strict=True)
            panel.plot(list(cells), [100 * x for x in measured], **style.look(k), marker="o")
            panel.plot(
                list(cells), [100 * x for x in predicted], color=style.look(k)["color"], ls=":"
            )
    style.save(figure, file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
