"""The page of a sweep: whole, by itself, with everything in it, whatever users wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest
import recorded
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs
from test_compare import ran, sweep
from test_sweep_figures import replicas, row

from engine.report.compare import PAGE, write_comparison
from engine.report.pictures.palette import THEMES
from engine.report.sweep.markup import Markup, tag

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'&amp;\x00\x1b[31m\u202e\ud800"


class Reader(HTMLParser):
    """Checks that elements are closed in order; keeps tags with attributes, and text."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        if name not in ("meta", "br"):
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, name: str, **attributes: str) -> int:
        return sum(n == name and attributes.items() <= a.items() for n, a in self.tags)


def read(folder: Path) -> Reader:
    return Reader((folder / PAGE).read_text())


def drawn(folder: Path) -> dict[str, dict[str, Any]]:
    """The charts by what they are called, as plotly gets them, each checked against its schema."""
    source = (folder / PAGE).read_text()
    labels = [a["aria-label"] for name, a in Reader(source).tags if a.get("class") == "chart"]
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', source, re.DOTALL)
    charts = json.loads(found[1]) if found else []
    assert [chart["label"] for chart in charts] == labels
    for chart in charts:
        Figure(data=chart["data"], layout=chart["layout"])  # raises ValueError for what plotly does not know
    return {chart["label"]: chart for chart in charts}


def marks(chart: dict[str, Any], metric: str | None = None) -> list[str]:
    """What is said where marks are pointed at; `metric`: of one panel."""
    traces = [t for t in chart["data"] if "markers" in t.get("mode", "") and metric in (None, t.get("meta"))]
    return [said for trace in traces for said in trace.get("hovertext", [])]


def lines(chart: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    return [trace for trace in chart["data"] if trace.get("mode") == "lines" and trace.get("meta") == metric]


def texts_of(charts: Any) -> Iterator[str]:
    """Every text in charts that plotly may read as markup; not what a parallel axis has, where it reads none."""
    if isinstance(charts, str):
        yield charts
    elif isinstance(charts, list | dict) and not (isinstance(charts, dict) and charts.get("type") == "parcoords"):
        for part in charts.values() if isinstance(charts, dict) else charts:
            yield from texts_of(part)


def test_a_recorded_sweep_is_all_there(tmp_path: Path) -> None:
    write_comparison(sweep(tmp_path))
    page = read(tmp_path)
    said = " ".join(page.text)
    for words in ("4 jobs: 2 completed, 1 unfinished, 1 failed", "naive", "gpipe", "Step time against peak memory",
                  "rank 1 failed: ValueError: no", "left no summary.json", "49.0 ms", "31.0 ms", "51.0 %"):  # fmt: skip
        assert words in said
    heads = {text.strip() for text in page.text}
    assert not heads & {"Scaling", "Plain, data-parallel, model-parallel"}  # neither replicas nor ranks were swept
    assert "more" not in re.findall(r"ValueError: no[^<]*", said)[0]
    assert [a["id"] for n, a in page.tags if n == "tr" and "id" in a] == ["job0", "job1", "job2", "job3"]
    assert page.count("a", href="./0/report.txt") == 1 and (tmp_path / "0" / "report.txt").exists()
    named = {a["href"][1:] for n, a in page.tags if n == "a" and (a["href"] or "").startswith("#")}  # type: ignore[index]
    assert named <= {a["id"] for _, a in page.tags if "id" in a}
    assert not list(tmp_path.glob(".*.part"))


def test_pictures_are_well_formed_and_name_their_jobs(tmp_path: Path) -> None:
    rows = [row(j, f"schedule={s}", f"pipeline.microbatches={m}", schedule=s, microbatches=m, step=0.1 + j / 100,
                total=2000 - 100 * j, bubble={"ideal": 0.2, "predicted": 0.25, "measured": 0.3})
            for j, (s, m) in enumerate((s, m) for s in ("gpipe", "1f1b") for m in (2, 4, 8))]  # fmt: skip
    write_comparison(tmp_path, rows)
    pictures = drawn(tmp_path)
    names = ("step time", "throughput", "peak memory", "ideal bubble", "predicted bubble", "measured bubble")
    figures = pictures["figures over micro-batches"]
    for name in names:
        said = marks(figures, name)
        assert len(said) == 6 and [len(line["x"]) for line in lines(figures, name)] == [3, 3]
        assert any(words.startswith("job 4: 1f1b, micro-batches 4<br>" + name) for words in said)
    assert [t["name"] for t in figures["data"] if t.get("showlegend")] == ["gpipe", "1f1b"]  # one legend for all
    scales = [figures["layout"][f"yaxis{panel}"]["range"] for panel in (4, 5, 6)]
    assert scales == [[0, pytest.approx(31.5)]] * 3  # the bubbles share one
    front = pictures["peak memory over step time, with the Pareto front"]
    assert len(marks(front)) == 6 and sum(said.endswith("dominated") for said in marks(front)) == 0
    assert sorted(job for trace in front["data"] for job in trace.get("customdata", [])) == list(range(6))


def test_all_keys_and_figures_stand_on_parallel_axes(tmp_path: Path) -> None:
    jobs = enumerate([("gpipe", 2, "a&b"), ("1f1b", 8, "<i>")])
    rows = [row(j, f"schedule={s}", f"pipeline.microbatches={m}", f"model.depth={d}", schedule=s, microbatches=m,
                step=0.1 + j / 100) for j, (s, m, d) in jobs]  # fmt: skip
    rows.append(row(2, "schedule=naive", schedule="naive") | {"status": "failed", "error": "no"})
    write_comparison(tmp_path, rows)
    (trace,) = drawn(tmp_path)["all keys and figures, a line per job"]["data"]
    axes = {axis["label"]: axis for axis in trace["dimensions"]}
    assert list(axes) == ["schedule", "micro-batches", "model.depth", "step time, ms", "throughput, samples/s",
                          "peak memory, kB"]  # fmt: skip
    assert axes["schedule"]["ticktext"] == ["gpipe", "1f1b"] and axes["schedule"]["values"] == [0, 1]
    assert axes["micro-batches"]["values"] == [2, 8] and axes["model.depth"]["ticktext"] == ["a&b", "<i>"]
    assert axes["step time, ms"]["values"] == pytest.approx([100, 110]) == trace["line"]["color"]
    write_comparison(tmp_path, rows[:1])
    assert "all keys and figures, a line per job" not in drawn(tmp_path)


def test_many_series_become_maps(tmp_path: Path) -> None:
    rows = [row(10 * s + m, f"schedule=s{s}", f"pipeline.microbatches={m}", schedule=f"s{s}", microbatches=m,
                step=0.1 + s / 100) for s in range(9) for m in (2, 4)]  # fmt: skip
    write_comparison(tmp_path, rows)
    (cells,) = [trace for trace in drawn(tmp_path)["maps over micro-batches"]["data"] if trace["meta"] == "step time"]
    assert cells["z"] == [[pytest.approx(100 + 10 * s)] * 2 for s in range(9)] and cells["customdata"][8] == [16, 17]
    assert [text for texts in cells["text"] for text in texts if "★" in text] == ["100 ★"] * 2  # s0 at either size


def test_a_random_search_is_drawn_without_telling_everything_apart(tmp_path: Path) -> None:
    """Every job has numbers of its own: the combinations that occur are as many as jobs, not their product."""
    rows = [row(j, *(f"optimizer.x{k}={j / (k + 7)}" for k in range(6)), f"pipeline.microbatches={2 ** (j % 3)}",
                microbatches=2 ** (j % 3), step=0.1 + j / 1000) for j in range(60)]  # fmt: skip
    write_comparison(tmp_path, rows)
    steps = drawn(tmp_path)["figures over micro-batches"]
    assert len(marks(steps, "step time")) == 60 and not lines(steps, "step time")
    assert "Jobs differ in optimizer.x0" in " ".join(read(tmp_path).text)


def test_combinations_beyond_a_dozen_are_counted(tmp_path: Path) -> None:
    cases = [(m, s, d) for m in (2, 4) for s in ("gpipe", "1f1b") for d in range(14)]
    rows = [row(j, f"pipeline.microbatches={m}", f"schedule={s}", f"model.depth={d}", microbatches=m, schedule=s)
            for j, (m, s, d) in enumerate(cases)]  # fmt: skip
    write_comparison(tmp_path, rows)
    shown = [chart for label, chart in drawn(tmp_path).items() if " over micro-batches, " in label]
    assert [len(marks(chart, "step time")) for chart in shown] == [4] * 12
    assert "2 further combinations are in the table of all jobs." in read(tmp_path).text


def test_scaling_is_drawn_with_its_law(tmp_path: Path) -> None:
    text = write_comparison(tmp_path, [replicas(n, n, 64, 0.1 + 0.3 / n) for n in (1, 2, 4)])
    assert "Serial fraction 25.0 %: at most 4.0 times one" in text and "Serial fraction 25.0 %" in " ".join(
        read(tmp_path).text
    )
    traces = {trace["name"]: trace for trace in drawn(tmp_path)["speed-up over replicas"]["data"]}
    assert list(traces) == ["one for one", "Amdahl", "measured"]  # the limit is out of sight
    assert traces["measured"]["y"] == pytest.approx([1, 1.6, 400 / 175])
    assert traces["measured"]["customdata"] == [0, 1, 2]
    assert traces["Amdahl"]["y"][-1] == pytest.approx(1 / (0.25 + 0.75 / 5))
    assert "Plain, data-parallel, model-parallel" in text and "model-parallel    1" in text


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_what_users_wrote_is_text(tmp_path: Path, status: str) -> None:
    rows = [
        row(0, f"schedule={HOSTILE}", f"{HOSTILE}={HOSTILE}", schedule=HOSTILE),
        row(1, "schedule=gpipe", f"common={HOSTILE}", schedule="gpipe") | {"job": HOSTILE},
        {"job": "2", "status": status, "error": HOSTILE, "overrides": [HOSTILE, f"~{HOSTILE}"]},
        {"job": "javascript:alert(1)", "status": HOSTILE, "overrides": [], "step_time": {"median": 1.0}},
    ]
    rows = [{k: v.encode(errors="replace").decode() if isinstance(v, str) else v for k, v in r.items()} for r in rows]
    for each in rows:
        each["overrides"] = [word.encode(errors="replace").decode() for word in each["overrides"]]
    write_comparison(tmp_path, rows)
    page = read(tmp_path)
    assert page.count("script") == 3 * bool(drawn(tmp_path)) or page.count("script") == 1
    assert page.count("img") == 0
    for text in texts_of([[chart["data"], chart["layout"]] for chart in drawn(tmp_path).values()]):
        assert not re.search(r"<(?!/?b>|br>)", text), text  # plotly would read it as a tag
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert all((a.get("href") or "#").startswith(("#", "./")) for _, a in page.tags)
    assert "<script>alert(1)</script>" in " ".join(page.text)


def test_hostile_folders_are_read(tmp_path: Path) -> None:
    """Halves of surrogate pairs in a summary, overrides that YAML quotes, folds or cannot read."""
    of = recorded.job("gpipe", 2, 4)
    ran(tmp_path / "0", of)
    words = ["model.name='it''s'", 'data.path="a, b"', "x=" + "long words " * 20]
    (tmp_path / "0" / ".hydra" / "overrides.yaml").write_text(
        "- 'model.name=''it''''s'''\n- \"data.path=\\\"a, b\\\"\"\n- 'x=" + "long words\n    " * 20 + "'\n"
    )
    (tmp_path / "1" / ".hydra").mkdir(parents=True)
    (tmp_path / "1" / ".hydra" / "overrides.yaml").write_text("{]")
    (tmp_path / "1" / "summary.json").write_text('{"status": "failed", "error": "\\ud800 half"}')
    text = write_comparison(tmp_path)
    assert words[0] in text and words[1] in text and "long words long words" in text
    assert "job 1: ? half" in text and "? half" in " ".join(read(tmp_path).text)


def test_it_loads_nothing(tmp_path: Path) -> None:
    write_comparison(sweep(tmp_path))
    page = read(tmp_path)
    ours = (tmp_path / PAGE).read_text().replace(get_plotlyjs(), "")
    assert len(ours) < 100_000 and not re.search(r"https?://|//[a-z]|@import|url\(", ours)
    assert not [n for n, a in page.tags if n in ("link", "img", "iframe", "object", "embed") or a.get("src")]
    (policy,) = [a["content"] for n, a in page.tags if n == "meta" and a.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none'")


@pytest.mark.parametrize("rows", [
    [],
    [{"job": "0", "status": "failed", "error": ""}],
    [{"job": "0", "status": "unfinished", "error": "still"}, row(1)],
    [row(0)],
    [row(0, "a=1", step=0.0, total=0), row(1, "a=2", step=0.0, total=0)],
    [row(0, "seed=1"), row(1, "seed=2")],
    [{"job": "0", "status": "interrupted", "overrides": None, "step_time": None, "loss": None, "memory": None}],
], ids=["none", "failed", "one runs", "one", "zeros", "seeds", "nulls"])  # fmt: skip
def test_any_sweep_has_a_page(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    write_comparison(tmp_path, rows)
    assert f"{len(rows)} job" in " ".join(read(tmp_path).text)
    drawn(tmp_path)


def test_markup_is_escaped_unless_it_is_markup() -> None:
    assert tag("a", "<b>", Markup("<br>"), class_='"', data_x=1.0, no=None) == (
        '<a class="&quot;" data-x="1">&lt;b&gt;<br></a>'
    )
    assert tag("p", ["a", ["&", None]]) == "<p>a&amp;</p>"


@pytest.mark.skipif(browser.find_chromium() is None, reason="needs Chromium")
@pytest.mark.process
@pytest.mark.slow
def test_in_a_browser_it_opens_sorts_and_lights_up(tmp_path: Path) -> None:
    rows = [row(j, f"schedule={s}", f"a={j}", schedule=s, step=step, total=1000 * (3 - j))
            for j, (s, step) in enumerate([("gpipe", 0.09), ("1f1b", 1.2), (HOSTILE[:60], 0.3)])]  # fmt: skip
    rows.append({"job": "3", "status": "failed", "error": HOSTILE[:60], "overrides": []})
    write_comparison(tmp_path, rows)
    order = "[...document.querySelectorAll('tr[id]')].map(r => r.id).join(' ')"
    head = "[...document.querySelectorAll('.sortable th')].find(h => h.textContent === 'step time')"
    with browser.chromium(tmp_path / "profile") as page:
        page.open((tmp_path / PAGE).as_uri(), height=3000)
        page.until("document.querySelectorAll('tr[id]').length === 4")
        page.until("document.querySelectorAll('.chart').length === document.querySelectorAll('[data-drawn]').length")
        page.value(f"{head}.click()")
        assert page.value(order) == "job0 job2 job1 job3"
        page.value(f"{head}.click()")
        assert page.value(order) == "job1 job2 job0 job3"  # what is not known stays last
        box = page.value(
            "(() => { const chart = document.querySelector('.chart'); chart.scrollIntoView({ block: 'center' });"
            " const own = chart.data.findIndex((trace) => (trace.customdata ?? []).includes(1));"
            " const b = chart.querySelectorAll('.scatterlayer .points path.point')[own].getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        page.point(*box)
        page.until("document.querySelector('#job1').classList.contains('lit')")
        page.until("document.querySelector('.chart .hovertext')?.textContent.includes('job 1: 1f1b')")
        page.click(*box)
        page.until("location.hash === '#job1'")
        page.value("document.querySelector('#job0').dispatchEvent(new MouseEvent('mouseover', { bubbles: true }))")
        page.until("[...document.querySelectorAll('.chart .hovertext')].some((e) => e.textContent.includes('job 0'))")
        assert page.value("document.querySelectorAll('[data-title*=hare], [data-title*=loud]').length") == 0
        assert page.value("document.querySelectorAll('canvas.gl-canvas').length") > 0
        assert page.value("document.documentElement.scrollWidth <= innerWidth")
        for theme, colours in THEMES.items():
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            for what, colour in (("backgroundColor", "paper"), ("color", "ink")):
                shown = page.value(f"getComputedStyle(document.body).{what}")
                assert shown == "rgb({}, {}, {})".format(*bytes.fromhex(colours[colour][1:]))
            page.until(f"document.querySelector('.chart').layout.font.color === '{colours['ink']}'")
        assert page.errors == []
