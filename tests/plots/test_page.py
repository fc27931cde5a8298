"""The page of `decent-jax plot`: what is in it, by a parser, and what a browser makes of it."""

import html
import html.parser
import json
import re
import shutil
import subprocess

import pytest
from test_plot import make_run

from decent_jax.commands import plot as command
from decent_jax.ground import account
from decent_jax.ground.json_files import write_json_atomic

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), ""
)
CONFIG = {"num_replicas": 2, "model": {"preset": "</script>"}}
ALONE = {"link", "meta", "br", "img", "input"}  # tags of HTML that nothing closes


class Page(html.parser.HTMLParser):
    """Tags that are closed in order; texts by tag, charts, and addresses."""

    def __init__(self, path):
        super().__init__()
        self.open, self.texts, self.addresses = [], [], []
        self.feed(path.read_text())
        assert not self.open
        self.charts = [json.loads(text) for _, text in self.texts if text.startswith('{"box"')]

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        if self.open and data.strip():
            self.texts.append((self.open[-1], data.strip()))

    def said(self, tag):
        return [text for where, text in self.texts if where == tag]


@pytest.fixture
def run(tmp_path):
    """Two replicas, one of which learns less; with names that are no HTML."""
    each = {f"replicas/{k}/loss": lambda s, k=k: 2.0 + k + 8 / s for k in range(2)}
    each["eval/top1"] = lambda s: s / 120
    folder = make_run(tmp_path / "<run> & co", config=CONFIG, **each)
    spent = {"steps": 60.0, "compiling": 30.0, "start": 10.0}
    spent = dict.fromkeys(("steps", *account.CAUSES), 0.0) | spent
    write_json_atomic(folder / account.FILE, {"seconds": spent, "date": 9.0, "ended": False})
    account.add_incident(folder, "process 1 (</script>) died of SIGKILL")
    return folder


def test_the_page_of_a_run(run, capsys):
    assert command.main([str(run)]) == 0
    words = capsys.readouterr().out.splitlines()
    assert words == [str(run / "curves.png"), str(run / "report.html")]
    page = Page(run / "report.html")
    text = (run / "report.html").read_text().replace("http://www.w3.org/2000/svg", "")
    assert not page.addresses and "http" not in text  # nothing is loaded from elsewhere
    assert page.said("h1") == ["<run> & co: </script>, gossip, ring, 2 replicas"]
    titles = page.said("h3")
    assert len(page.charts) == len(titles) == 6 and "replica" in titles[-1]
    loss, _, top1, consensus, speed, replicas = page.charts
    assert top1["lines"][0]["y"][-1] == 50 and "50.00" in page.said("td")
    train, validation = loss["lines"]
    assert train["x"] == list(range(1, 61)) and validation["x"] == [20, 40, 60]
    assert validation["y"][-1] == pytest.approx(2.2 + 8 * 0.0024788, abs=1e-5)
    assert consensus["log"] and 10 ** consensus["lines"][0]["y"][-1] == pytest.approx(0.03 / 60)
    assert speed["lines"][0]["y"][-1] == pytest.approx(80_060, abs=2)
    assert [line["label"] for line in replicas["lines"]] == ["replica 0", "replica 1"]
    assert page.said("title")[1:] == ["steps: 1 min 0 s", "start: 10.0 s", "compiling: 30.0 s"]
    assert page.said("figcaption") == ["round 0 of 1"]
    assert {"process 1 (</script>) died of SIGKILL", "num_replicas"} <= set(page.said("td"))


def test_the_page_of_a_comparison_names_what_differs(tmp_path, monkeypatch):
    runs = [
        make_run(tmp_path / "a", config={"algorithm": "all_reduce"}),
        make_run(tmp_path / "b", config={"optimizer": {"b1": 0.5}}, perf__tokens_per_s=None),
    ]
    monkeypatch.chdir(tmp_path)
    assert command.main([*map(str, runs), "--out", "both.png"]) == 0
    page = Page(tmp_path / "both.html")
    cells, wanted = page.said("td"), ["algorithm", "all_reduce", "gossip", "optimizer.b1", "0.5"]
    assert cells[cells.index("algorithm") :] == wanted
    assert "Seconds per step" in page.said("h3")
    assert [words.partition(":")[0] for words in page.said("h2")].count("Who sends to whom") == 2
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    assert command.main([*map(str, runs), "--out", "mine.png"]) == 2
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"


@pytest.mark.skipif(not BROWSER, reason="no browser is installed (apt-get install chromium)")
def test_a_browser_shows_the_values_under_the_mouse(run, tmp_path):
    command.main([str(run)])
    move = """<script>
        const seen = document.querySelector(".chart svg"), frame = seen.getBoundingClientRect();
        seen.dispatchEvent(new MouseEvent("mousemove", {clientX: frame.left + frame.width - 1}));
        const texts = [...seen.querySelectorAll(".hover text")];
        document.title = texts.map(text => text.textContent).join("|");
    </script></body>"""
    page = tmp_path / "moved.html"
    page.write_text((run / "report.html").read_text().replace("</body>", move))
    argv = [BROWSER, f"--user-data-dir={tmp_path / 'profile'}", "--headless", "--no-sandbox"]
    argv += ["--disable-gpu", "--dump-dom", page.as_uri()]
    found = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300).stdout
    (title,) = re.findall("<title>(.*?)</title>", found.partition("<body>")[0])
    step, first, second = html.unescape(title).split("|")
    assert step == "60 step"
    assert first.split()[0] == "2.22" and first.endswith("validation")
    assert second.split()[0] == "2.02"
