"""What benchmarks/faults makes of the rows of its runs."""

from benchmarks.faults import goodput, peers


def test_the_benchmark_compares_runs_with_kills_to_undisturbed_ones(tmp_path):
    trace = [[0.0, 1], [10.0, 51], [20.0, 101]]
    kills = [{"again_s": seconds, "lost": lost} for seconds, lost in ((2.0, 3), (5.0, 0), (3.0, 1))]
    whole = {"arm": "gossip", "every": None, "seconds": 20.0, "steps": 100, "kills": []}
    killed = {"arm": "gossip", "every": 10, "seconds": 40.0, "steps": 150, "kills": kills}
    rows = [whole | {"trace": trace}, killed | {"trace": trace, "differ": [7, 8]}]
    cells = [line.split(" | ") for line in goodput.table(rows).splitlines()]
    assert cells[2][4].startswith("100%")
    assert cells[3][1:] == ["40", "3", "150", "75%", "3.0, 5.0", "1, 3", "2 |"]
    goodput.draw(rows, tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").stat().st_size > 5000


def test_peers_are_compared_to_a_step_alone():
    """One of four hosts is half as fast, which all others wait for in a synchronous program."""
    base = {"hosts": 4, "mbit": 1000}
    seconds = {"0": 0.2, "1": 0.2, "2": 0.2, "3": 0.2}
    alone = base | {"program": "peers", "mix_every": peers.NEVER, "step_s": seconds, "met": 0.0}
    slow = base | {"program": "peers", "mix_every": 4, "data.slow": "1:2", "met": 0.25}
    slow |= {"step_s": seconds | {"1": 0.4}}
    waiting = base | {"program": "all_reduce", "data.slow": "1:2", "step_s": {"run": 0.5}}
    lines = peers.waiting_table([alone, slow, waiting]).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert cells[0][2:] == ["peers", "1", "never", "", "1.000", "", "1.000", "0.00"]
    assert cells[1][2:] == ["peers", "2", "4", "", "1.000", "", "1.000", "0.25"]
    assert cells[2][6] == "2.500" and float(cells[2][7]) >= 2 and cells[2][8] == "0.457"
