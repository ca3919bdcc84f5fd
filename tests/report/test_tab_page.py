"""TensorBoard's tab as a reader uses it: in a headless Chromium, within the page of the installed TensorBoard."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import recorded
from browser import LIMIT_S, Page, chromium, find_chromium
from PIL import Image
from tensorboards import Running, awaited, tensorboard

from engine.plan.timeline import Kind
from engine.report.pictures.palette import COLOURS, THEMES

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium here: TensorBoard's tab is not tried in a browser"),
]

FRAME = "document.querySelector('iframe').contentWindow"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def address(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    Running(logs / "1f1b", recorded.job("1f1b", 4, 8)).step(3).finish()
    Running(logs / "gpipe", recorded.job("gpipe", 2, 4, replicas=2)).step(2).finish()
    with tensorboard(logs, tmp_path_factory.mktemp("aside")) as found:
        awaited(found, {"1f1b": [0, 1, 2], "gpipe": [0, 1]})
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    profile = tmp_path_factory.mktemp("browser") / "profile"
    profile.mkdir()
    with chromium(profile) as page:
        yield page


@pytest.fixture
def page(browser: Page, address: str) -> Iterator[Page]:
    """The tab by itself, as TensorBoard puts it into its frame, with the first run drawn. It may log no error."""
    browser.open(f"{address}/data/plugin_entry.html?name=pipeline")
    browser.errors.clear()
    shown(browser, 0, "1f1b", 2)
    yield browser
    assert browser.errors == []


def shown(page: Page, panel: int, schedule: str, step: int) -> None:
    """Wait until a panel shows a step of a run and has drawn it."""
    one = f"globalThis.pipeline?.panels[{panel}]?.step"
    page.until(f"{one}?.schedule === '{schedule}' && {one}.step === {step} && !pipeline.frame")


def drawn(page: Page) -> None:
    page.until("pipeline.frame === null")


def where(page: Page, label: str, after: bool = False) -> tuple[float, float]:
    place = page.value(f"pipeline.panels[0].where('{label}', {json.dumps(after)})")
    return place["x"], place["y"]


def press(page: Page, selector: str) -> None:
    box = page.value(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                     f"(document.querySelector('{selector}').getBoundingClientRect())")  # fmt: skip
    page.click(*box)


def colours(page: Page) -> dict[tuple[int, ...], int]:
    """Colour -> pixels of the screen."""
    picture = Image.open(io.BytesIO(page.picture())).convert("RGB")
    counted = picture.getcolors(maxcolors=1 << 24)
    assert counted is not None
    return {tuple(colour): count for count, colour in counted if isinstance(colour, tuple)}


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def text(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector('{selector}').innerText"))


def saved(page: Page, what: str, folder: Path) -> Path:
    """The file that a button saves."""
    page.saves_to(folder)
    press(page, f"[data-do={what}]")
    deadline = time.monotonic() + LIMIT_S
    while not (found := [path for path in folder.iterdir() if path.suffix != ".crdownload"]):
        assert time.monotonic() < deadline, f"no {what} was saved"
        time.sleep(0.02)
    return found[0]


# ---- it opens and draws ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tab_opens_within_tensorboard(browser: Page, address: str) -> None:
    browser.open(f"{address}/#pipeline")
    browser.until(f"{FRAME}.pipeline.panels[0].step && !{FRAME}.pipeline.frame")
    found = colours(browser)
    assert found.get(rgb(COLOURS[Kind.F]), 0) > 2000 and found.get(rgb(COLOURS[Kind.B]), 0) > 4000
    browser.value("document.body.classList.add('dark-mode')")  # as TensorBoard itself does
    browser.until(f"{FRAME}.document.documentElement.dataset.theme === 'dark' && !{FRAME}.pipeline.frame")
    assert colours(browser).get(rgb(THEMES["dark"]["paper"]), 0) > 100_000
    assert browser.value(f"{FRAME}.getComputedStyle({FRAME}.document.body).backgroundColor") == "rgb(34, 38, 43)"


@pytest.mark.slow
def test_a_step_is_drawn_with_every_action_and_its_figures(page: Page) -> None:
    assert text(page, ".which") == "step 2 (3 of 3)"
    assert "1f1b · 4 ranks · 8 micro-batches" in text(page, ".facts")
    bars = page.value("[...document.querySelectorAll('.fall [data-bar]')].map((bar) => bar.dataset.bar)")
    assert bars[0] == "work" and bars[-1] == "rest" and len(bars) == 9
    rows = page.value("[...document.querySelectorAll('.ranks tbody th')].map((cell) => cell.innerText)")
    assert rows == ["rank 0", "rank 1", "rank 2", "rank 3"]
    picture = Image.open(io.BytesIO(page.picture())).convert("RGB")
    for rank in range(4):
        for microbatch in range(8):
            for kind in (Kind.F, Kind.B):
                x, y = where(page, f"{rank}{kind.name}{microbatch}")
                assert picture.getpixel((round(x), round(y) - 13)) == rgb(COLOURS[kind]), (rank, microbatch)


def test_it_is_as_sharp_as_the_screen(page: Page, address: str) -> None:
    page.open(f"{address}/data/plugin_entry.html?name=pipeline", scale=2)
    shown(page, 0, "1f1b", 2)
    wide, shown_wide = page.value("(({width, clientWidth}) => [width, clientWidth])(document.querySelector('canvas'))")
    assert wide == 2 * shown_wide


# ---- pointing and clicking -------------------------------------------------------------------------------------------


def test_hovering_an_action_tells_its_times_and_what_it_waited_for(page: Page) -> None:
    page.point(*where(page, "2B3"))
    page.until("!document.querySelector('.tip').hidden")
    told = text(page, ".tip")
    assert told.startswith("2B3 backward, stage 2, micro-batch 3\nrank 2:")
    assert "predicted:" in told and "its gradient" in told and "from rank 3" in told
    page.point(*where(page, "0F0"))
    page.until("document.querySelector('.tip').innerText.startsWith('0F0')")
    assert "needs no message" in text(page, ".tip")
    page.point(5, 5)
    page.until("document.querySelector('.tip').hidden")


def test_clicking_a_bubble_tells_its_cause(page: Page) -> None:
    page.click(*where(page, "0F3", after=True))
    page.until("!document.querySelector('.card').hidden")
    told = text(page, ".card")
    assert told.startswith("bubble on rank 0:") and "stall" in told
    assert "for the gradient of micro-batch 0 from 1B0 on rank 1" in told
    assert "which had waited" in told and "2B0 on rank 2" in told and "3B0 on rank 3" in told
    begin, end = page.value("[pipeline.panels[0].selected.from, pipeline.panels[0].selected.to]")
    parts = page.value("pipeline.panels[0].selected.parts.map(({ns}) => ns)")
    assert sum(parts) == end - begin > 0
    page.click(*where(page, "3F0"))
    page.until("document.querySelector('.card').innerText.startsWith('3F0 forward')")


def test_a_document_may_know_more_categories_than_the_page(page: Page) -> None:
    """One of a later version names its own; one of an earlier version names none. Both are data of unknown origin."""
    known = page.value("pipeline.palette.categories.length")
    page.value("pipeline.learn({})")
    assert page.value("pipeline.palette.categories.length") == known == 9
    row = {"name": "agree<i>", "what": "<b>counts</b>", "colour": "red;x:url(1)", "bubble": True, "kinds": []}
    page.value(f"pipeline.learn({json.dumps({'categories': [row, row | {'name': 'new', 'colour': '#123456'}]})})")
    assert page.value("[pipeline.theme.names['agree&#60;i&#62;'], pipeline.theme.names.new]") == ["#808080", "#123456"]
    assert page.value("pipeline.palette.categories.at(-2).what") == "&#60;b&#62;counts&#60;/b&#62;"
    assert page.value("pipeline.theme.shaded.has('new') && !pipeline.theme.shaded.has('compute')")


@pytest.mark.slow
def test_prediction_critical_path_and_causes_can_be_laid_over(page: Page) -> None:
    def height() -> int:
        drawn(page)
        return int(page.value("document.querySelector('canvas').clientHeight"))

    with_prediction = height()
    press(page, "[data-toggle=prediction]")
    assert height() < with_prediction
    ink = colours(page).get((0x11, 0x14, 0x18), 0)
    press(page, "[data-toggle=critical]")
    drawn(page)
    assert colours(page).get((0x11, 0x14, 0x18), 0) > ink + 500
    shades = len(colours(page))
    press(page, "[data-toggle=causes]")
    drawn(page)
    assert len(colours(page)) != shades
    assert page.value("[...document.querySelectorAll('[aria-pressed=true]')].length") == 1


# ---- moving ----------------------------------------------------------------------------------------------------------


def sight(page: Page) -> tuple[float, float]:
    drawn(page)
    begin, end = page.value("[pipeline.sight.from, pipeline.sight.to]")
    return begin, end


def test_zooming_keeps_what_is_under_the_pointer_and_dragging_moves_it(page: Page) -> None:
    whole = sight(page)
    x, y = where(page, "1B4")
    page.wheel(x, y, -400)
    page.until(f"pipeline.sight.to - pipeline.sight.from < {0.6 * (whole[1] - whole[0])}")
    assert where(page, "1B4")[0] == pytest.approx(x, abs=3)
    page.drag(x, y, 60)
    drawn(page)
    assert where(page, "1B4")[0] == pytest.approx(x + 60, abs=4)
    page.press("0")
    assert sight(page) == whole


def test_keys_step_zoom_and_toggle(page: Page) -> None:
    page.press("ArrowLeft")
    shown(page, 0, "1f1b", 1)
    page.press("ArrowRight")
    shown(page, 0, "1f1b", 2)
    page.press("ArrowRight")  # there is no later one
    whole = sight(page)
    page.press("+")
    assert sight(page)[1] - sight(page)[0] == pytest.approx((whole[1] - whole[0]) / 1.5)
    page.press("-")
    assert sight(page) == pytest.approx(whole)
    page.press("p")
    assert page.value("pipeline.options.prediction") is False


def test_playing_lets_time_run_and_stops(page: Page) -> None:
    press(page, "[data-do=play]")
    first = page.until("pipeline.moment")
    assert page.until(f"pipeline.moment > {first} && pipeline.moment") < page.value("pipeline.sight.to")
    press(page, "[data-do=play]")
    page.until("pipeline.moment === null && pipeline.frame === null")


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_another_run_and_step_can_be_chosen(page: Page) -> None:
    page.value("(select => { select.value = 'gpipe'; select.dispatchEvent(new Event('change')) })"
               "(document.querySelector('.run'))")  # fmt: skip
    shown(page, 0, "gpipe", 1)
    assert "2 replicas" in text(page, ".facts")
    press(page, '.strip [data-index="0"]')
    shown(page, 0, "gpipe", 0)
    assert text(page, ".which") == "step 0 (1 of 2)"


def test_two_runs_are_compared_on_one_axis(page: Page) -> None:
    press(page, "[data-do=compare]")
    shown(page, 1, "gpipe", 1)
    scales = page.value("pipeline.panels.map((panel) => panel.layout().perNs)")
    assert len(scales) == 2 and scales[0] == pytest.approx(scales[1])
    figures = page.value(
        "[...document.querySelectorAll('.fall')].map((svg) => [...svg.querySelectorAll('text')].length)"
    )
    assert figures == [2 * 10, 3 * 10]  # the second also says by how much each bar differs
    press(page, "[data-do=compare]")
    page.until("document.querySelectorAll('section').length === 1")


@pytest.mark.slow
def test_a_run_that_goes_on_is_followed(page: Page, logs: Path) -> None:
    going_on = Running(logs / "later", recorded.job("naive", 2, 2)).step()
    try:
        going_on.flush()
        page.until("pipeline.poll() && pipeline.runs.some(({ name }) => name === 'later')")
        page.value("pipeline.panels[0].choose('later')")
        shown(page, 0, "naive", 0)
        going_on.step()
    finally:
        going_on.finish()
    page.until("pipeline.poll() && pipeline.panels[0].step.step === 1")
    assert text(page, ".which") == "step 1 (2 of 2)"


def test_looking_for_new_steps_leaves_what_is_shown_alone(page: Page) -> None:
    page.click(*where(page, "0F3", after=True))
    page.value("globalThis.before = ['.run option', '.ranks', '.strip svg', '.card p'].map((one) => "
               "document.querySelector(one))")  # fmt: skip
    page.value("pipeline.poll()")
    assert page.value("before.map((element) => element.isConnected)") == [True] * 4


def test_a_run_that_is_deleted_stays_on_the_screen(page: Page) -> None:
    page.value(
        "(() => { const before = pipeline.runs; pipeline.runs = []; return pipeline.panels[0].renew(before) })()"
    )
    assert text(page, ".which") == "no traced step"
    assert "1f1b · 4 ranks" in text(page, ".facts")


def step_of(spans: str, **changes: str) -> str:
    """A step as JavaScript makes it of a document that nobody would write: one rank, 5 ns."""
    parts = {
        "schedule": "'none'", "spans": spans, "waterfall": "null", "predicted": "null", "pairs": "[]",
        "names": "{ kind: { 0: 'F', 1: 'B' }, account: ['compute'], cause: ['compute'] }",
    } | changes  # fmt: skip
    return f"""await (async () => {{
        const {{ Step }} = await import('./model.js');
        const stretch = {{ rank: [0], start: [0], length: [5] }};
        return new Step({{
            step: 0, ranks: 1, replicas: 1, stages: 1, microbatches: 1, time: 5, windows: [[0, 5]], uncertainty: [9e4],
            account: [[5]],
            stretches: {{ ...stretch, name: [0] }}, path: {{ ...stretch, cause: [0], span: [0] }},
            {", ".join(f"{name}: {value}" for name, value in parts.items())},
        }});
    }})()"""


def test_a_pair_that_was_done_at_once_has_half_a_row_for_each(page: Page) -> None:
    spans = """{ rank: [0, 0], kind: [0, 1], stage: [0, 3], microbatch: [7, 2], start: [0, 1], length: [5, 3],
                 sender: [-1, -1] }"""
    found = page.value(f"""(async () => {{
        const {{ explainAction }} = await import('./explain.js');
        const {{ Layout }} = await import('./timeline.js');
        const step = {step_of(spans, pairs="[[0, 1]]")};
        const layout = new Layout(step, 1000, {{ from: 0, to: 5 }}, pipeline.options);
        const blocks = [0, 1].map((span) => layout.block(0, step.half.get(span)));
        const at = (moment) => ["upper", "lower"].map((half) => step.actionAt(0, moment, half));
        return [at(0.5), at(2), at(4.5), blocks, explainAction(step, 0, {{}})];
    }})()""")
    assert found[:3] == [[0, -1], [0, 1], [0, -1]]
    upper, lower = found[3]
    assert upper["height"] == lower["height"] and upper["y"] + upper["height"] == lower["y"]
    assert "one action with 3B2" in found[4]


def test_how_well_a_clock_is_known_stands_beside_its_rank(page: Page) -> None:
    spans = "{ ...stretch, kind: [0], stage: [0], microbatch: [0], sender: [-1] }"
    said = page.value(f"""(async () => {{
        const {{ Layout, drawTimeline }} = await import('./timeline.js');
        const step = {step_of(spans)};
        const said = [];
        const nothing = () => {{}};
        const text = (x, y, words) => said.push(words);
        const painter = {{ rect: nothing, frame: nothing, line: nothing, text, clip: (x, y, w, h, draw) => draw() }};
        const layout = new Layout(step, 1000, {{ from: 0, to: 5 }}, pipeline.options);
        drawTimeline(painter, layout, pipeline.theme, pipeline.options);
        return said;
    }})()""")
    assert "rank 0" in said and "± 0.090 ms" in said


def test_text_from_a_file_is_shown_as_text(page: Page) -> None:
    made = f"""(async () => {{
        const {{ explainAction }} = await import('./explain.js');
        const step = {
        step_of(
            "{ ...stretch, kind: [0], stage: ['<b>'], microbatch: [0], sender: [-1] }",
            schedule="'<img src=x>'",
            waterfall="{ bars: { '<i>': 5 } }",
            names="{ kind: { 0: '<script>' }, account: ['<u>'], cause: ['<s>'] }",
        )
    };
        return explainAction(step, 0, {{}}) + step.waterfall[0].name + step.names[0];
    }})()"""
    told = str(page.value(made))
    assert "&#60;" in told
    assert not any(tag in told for tag in ("<script>", "<img", "<i>", "<u>", "<s>"))


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_the_picture_is_saved_as_it_is_shown(page: Page, tmp_path: Path) -> None:
    drawing = saved(page, "svg", tmp_path)
    assert drawing.name == "1f1b-step2.svg"
    blocks = [mark.get("fill") for mark in ElementTree.parse(drawing).iter() if mark.tag.endswith("rect")]
    assert blocks.count("#56b4e9") == 64  # 32 forwards, and as many in the prediction


def test_the_picture_is_saved_for_print(page: Page, tmp_path: Path) -> None:
    picture = saved(page, "png", tmp_path)
    with Image.open(picture) as image:
        assert image.width == 3 * page.value("document.querySelector('canvas').clientWidth")


def test_the_trace_for_perfetto_is_saved(page: Page, logs: Path, tmp_path: Path) -> None:
    trace = saved(page, "trace", tmp_path)
    assert trace.name == "1f1b-step2.trace.json"
    assert trace.read_text() == (logs / "1f1b" / "trace.json").read_text()


def test_the_legend_says_what_is_on_the_page_and_no_more(page: Page) -> None:
    words = text(page, ".legend").split("\n")
    assert words[:4] == ["forward", "backward", "optimizer step", "fill"] and "reduction (behind)" not in words
    press(page, "[data-toggle=causes]")
    page.until("!document.querySelector('.legend .bubble')")
    assert text(page, ".legend").split("\n") == words[:3]
    page.value("pipeline.panels[0].step.present.add('REDUCE'), pipeline.shown()")
    assert text(page, ".legend").split("\n") == [*words[:3], "reduction (behind)"]


def test_ticks_leave_the_unit_alone(page: Page) -> None:
    """The first moment in sight and the last would have a tick, of four digits."""
    left = page.value("""(async () => {
        const { drawTimeline, Layout, LABELS } = await import(new URL("timeline.js", document.baseURI));
        const found = [];
        const text = (x, y, said, size) => size === 11 && said !== "ms" && found.push(x - said.length * 3 - LABELS);
        const painter = { rect() {}, frame() {}, line() {}, text, clip(x, y, w, h, draw) {} };
        const layout = new Layout(pipeline.panels[0].step, 900, { from: 10.5e6, to: 12.5e6 }, pipeline.options);
        drawTimeline(painter, layout, pipeline.theme, pipeline.options);
        return found;
    })()""")
    assert len(left) == 3 and min(left) > -10


@pytest.mark.slow
def test_thousands_of_actions_cost_no_more_marks_than_the_screen_is_wide(page: Page) -> None:
    marks = """(async () => {
        const { Layout, drawTimeline } = await import('./timeline.js');
        const { Step } = await import('./model.js');
        const [n, ranks] = [200000, 8];
        const each = n / ranks;
        const of = (make) => Array.from({ length: n }, (_, i) => make(i % each, Math.floor(i / each)));
        const columns = {
            rank: of((i, rank) => rank), kind: of((i) => i % 2), stage: of((i, rank) => rank),
            microbatch: of((i) => i >> 1), start: of((i) => i * 1000), length: of(() => 900),
        };
        const none = { rank: [], name: [], cause: [], span: [], start: [], length: [] };
        const step = new Step({
            step: 0, schedule: 'x', ranks, replicas: 1, stages: ranks, microbatches: each / 2, time: each * 1000,
            windows: Array(ranks).fill([0, each * 1000]), uncertainty: Array(ranks).fill(0),
            account: Array(ranks).fill([1]),
            spans: { ...columns, sender: of(() => -1) }, predicted: columns, waterfall: null,
            stretches: none, path: none, names: { kind: { 0: 'F', 1: 'B' }, account: ['compute'], cause: [] },
        });
        let marks = 0;
        const count = () => { marks += 1; };
        const painter = { rect: count, frame: count, line: count, text: count, clip: (x, y, w, h, draw) => draw() };
        const options = { prediction: true, causes: true, critical: false };
        const draw = (to) => {
            marks = 0;
            drawTimeline(painter, new Layout(step, 1000, { from: 0, to }, options), pipeline.theme, options);
            return marks;
        };
        return [draw(step.end), draw(100000)];
    })()"""
    whole, close = page.value(marks)
    assert whole < 8 * 2 * 1.5 * 1000 + 100
    assert 8 * 2 * 100 <= close < 8 * 3 * 110 + 100
