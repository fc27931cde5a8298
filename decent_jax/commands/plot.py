"""Draw the curves of one run, or compare several.

    decent-jax plot RUN [RUN ...] [--out FILE.png] [--mean]

One run is drawn into RUN/curves.png, several into comparison.png in the current folder. With --mean
runs that differ in their seed become one line with a band, against steps, time and bytes sent.
"""

from decent_jax.ground.command_line import Parser, check_replaceable, command
from decent_jax.ground.run_folder import load_run


@command("plot")
def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = Parser(prog="decent-jax plot", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="the --workdir of a run")
    where = "default: RUN/curves.png, or comparison.png here for several runs"
    add("--out", metavar="FILE", help=f"a .png, .pdf or .svg; {where}")
    add("--mean", action="store_true", help="a line for runs that differ in the seed")
    options = parser.parse_args(arguments)
    from decent_jax.plots import runs, style  # here, as matplotlib takes a while

    if options.out is not None or options.mean or len(options.runs) > 1:
        check_replaceable(options.out or runs.COMPARISON, "--out")
    if options.mean:
        curves = runs.curves_of([load_run(run) for run in options.runs])
        print(style.save(runs.draw_means(curves), options.out or runs.COMPARISON, dpi=150))
    else:
        print(runs.plot_runs(options.runs, options.out))
    return 0
