"""Draw the curves of one run, or compare several.

    decent-jax plot RUN [RUN ...] [--out FILE.png] [--mean]

One run is drawn to RUN/curves.png, several runs to comparison.png in the current folder. If plotly
is installed (extra "page"), the command also writes a self-contained HTML page next to the picture,
RUN/report.html or comparison.html: curves with values on hover, results, a breakdown of the time,
and the settings that differ. With --mean, runs that differ only in their seed are drawn as one line
with a band, against steps, time and bytes sent, and no page is written.
"""

import sys
from pathlib import Path

from decent_jax.ground import extras
from decent_jax.ground.command_line import Parser, check_replaceable, command
from decent_jax.ground.run_folder import label_runs, load_run


@command("plot")
def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = Parser(prog="decent-jax plot", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="the --workdir of a run")
    where = "default: RUN/curves.png, or ./comparison.png for several runs"
    add("--out", metavar="FILE", help=f"a .png, .pdf or .svg; {where}")
    add("--mean", action="store_true", help="draw runs that differ only in the seed as one line")
    options = parser.parse_args(arguments)
    from decent_jax.plots import runs  # here, since importing matplotlib takes a while

    beside = None  # the page, if it is not inside the run directory
    if options.out is not None or len(options.runs) > 1:
        picture = Path(options.out or runs.COMPARISON)
        beside = picture.with_suffix(".html")
        check_replaceable(picture, "--out")
        if not options.mean:
            check_replaceable(beside, "--out")
    print(runs.plot_runs(options.runs, options.out, mean=options.mean))
    if options.mean:
        return 0
    try:
        extras.need("page", "plotly")
    except extras.Unavailable as error:
        print(f"decent-jax plot: no page was written, since {error}", file=sys.stderr)
        return 0
    from decent_jax.plots import page

    loaded = [load_run(run) for run in options.runs]
    label_runs(loaded)
    print(page.write(loaded, beside or loaded[0].path / page.REPORT))
    return 0
