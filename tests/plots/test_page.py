"""The page of `decent-jax plot`: what is in it, and what a browser makes of it."""

import html
import importlib.util
import itertools
import json
import re
import shutil
import subprocess

import pytest
from test_plot import make_run

from decent_jax.commands import plot as command
from decent_jax.ground.json_files import write_json_atomic
from decent_jax.monitor import goodput_file

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), ""
)
CONFIG = {"num_replicas": 2, "model": {"preset": "</script>"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two replicas, one of which learns less, with names that are no HTML; and its page."""
    each = {f"replicas/{k}/loss": lambda s, k=k: 2.0 + k + 8 / s for k in range(2)}
    each["eval/top1"] = lambda s: s / 120
    folder = make_run(tmp_path_factory.mktemp("page") / "<run> & co", config=CONFIG, **each)
    spent = {"steps": 60.0, "compiling": 30.0, "start": 10.0}
    spent = dict.fromkeys(("steps", *goodput_file.CAUSES), 0.0) | spent
    write_json_atomic(folder / goodput_file.FILE, {"seconds": spent, "date": 9.0, "ended": False})
    goodput_file.add_incident(folder, "process 1 (</script>) died of SIGKILL")
    assert command.main([str(folder)]) == 0
    return folder


def parts_of(path):
    """The lines of each chart by its title, and the cells of all tables."""
    text, charts = path.read_text(), {}
    for call in re.findall(r"Plotly\.newPlot\(\s*\"[^\"]*\",\s*(\[.*)", text):
        lines, end = json.JSONDecoder().raw_decode(call)
        layout, _ = json.JSONDecoder().raw_decode(call[end:].lstrip(", "))
        charts[layout["title"]["text"]] = {line["name"]: line for line in lines}
    return charts, [html.unescape(cell) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", text)]


def test_the_page_of_a_run(run):
    charts, cells = parts_of(run / "report.html")
    text = (run / "report.html").read_text()
    assert not re.search(r"<(link|script|img)[^>]* (src|href)=", text)  # nothing is loaded
    assert "<h1>&lt;run&gt; &amp; co: " in text and "<li>process 1 (&lt;/script&gt;) died" in text
    assert len(charts) == 6
    loss, top1 = charts["Loss by step: line training, dots validation"], [*charts.values()][2]
    assert loss["train/loss"]["mode"] == "lines" and loss["eval/loss"]["mode"] == "markers"
    by_time = charts["Loss by seconds of training"]["train/loss"]
    assert by_time["x"] != loss["train/loss"]["x"] and by_time["y"] == loss["train/loss"]["y"]
    assert {*charts["Training loss of each replica"]} == {"replicas/0/loss", "replicas/1/loss"}
    assert len(top1) == 1 and "0.5000" in cells
    shown = dict(itertools.pairwise(cells))
    assert shown["step"] == "60" and shown["model.preset"] == "</script>"
    assert shown["time"] == "goodput 60% of 1 min 40 s: 30% compiling, 10% start"


def test_the_page_of_a_comparison_names_what_differs(tmp_path, monkeypatch):
    runs = [
        make_run(tmp_path / "a", config={"algorithm": "all_reduce"}),
        make_run(tmp_path / "b", config={"optimizer": {"b1": 0.5}}, perf__tokens_per_s=None),
    ]
    monkeypatch.chdir(tmp_path)
    assert command.main([*map(str, runs), "--out", "both.png"]) == 0
    charts, cells = parts_of(tmp_path / "both.html")
    assert cells[cells.index("algorithm") :] == [
        *("algorithm", "all_reduce", "gossip", "optimizer.b1", "", "0.5")
    ]
    assert len(charts["Loss by seconds of training"]) == 4
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    assert command.main([*map(str, runs), "--out", "mine.png"]) == 2
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"


def test_without_plotly_there_is_the_picture_and_a_sentence(tmp_path, capsys, monkeypatch):
    found, run = importlib.util.find_spec, make_run(tmp_path / "run")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "plotly" else found(name)
    )
    assert command.main([str(run)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [str(run / "curves.png")] and (run / "curves.png").exists()
    assert "decent_jax[page]" in said.err and said.err.count("\n") == 1
    assert not (run / "report.html").exists()


@pytest.mark.skipif(not BROWSER, reason="no browser is installed (apt-get install chromium)")
def test_a_browser_shows_the_curves_and_the_values_under_the_mouse(run, tmp_path):
    """Without a network."""
    move = """<script>
        const chart = document.querySelector(".plotly-graph-div");
        const drawn = document.querySelectorAll(".main-svg .scatter").length;
        const last = [{curveNumber: 0, pointNumber: 59}, {curveNumber: 1, pointNumber: 2}];
        Plotly.Fx.hover(chart, last);
        const texts = [...chart.querySelectorAll(".hoverlayer text")];
        document.title = [drawn, ...texts.map(text => text.textContent)].join("|");
    </script>"""
    page = tmp_path / "moved.html"
    page.write_text((run / "report.html").read_text() + move)
    argv = [BROWSER, f"--user-data-dir={tmp_path / 'profile'}", "--headless", "--no-sandbox"]
    argv += ["--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri()]
    found = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300).stdout
    (title,) = re.findall("<title>(.*?)</title>", found.partition("<style>")[0])
    drawn, *values = html.unescape(title).split("|")
    assert int(drawn) == 9  # losses twice, three single lines, two replicas
    assert values == ["train/loss", "(60, 2.01983)", "eval/loss", "(60, 2.21983)"]
