"""The server's side of TensorBoard's tab, through the installed command, with and without the fast loader."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import recorded
from tensorboards import ROOT, Running, awaited, get, steps_of, tensorboard

from engine.report.perfetto import trace_of
from engine.report.tensorboard.series import packed, tag_of
from engine.tab.document import measured

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from engine.tab.plugin import PipelinePlugin

PAGE = ROOT / "engine" / "tab" / "page"


@pytest.fixture(scope="module", params=["true", "false"])
def board(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """TensorBoard over two finished runs, one in a folder of its own; its address, and the log directory."""
    logs, aside = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("aside")
    Running(logs / "sweep" / "0", recorded.job("1f1b", 2, 4)).step(3).finish()
    Running(logs / "sweep" / "1", recorded.job("gpipe", 2, 4, replicas=2)).step(2).finish()
    with tensorboard(logs, aside, f"--load_fast={request.param}") as address:
        awaited(address, {"sweep/0": [0, 1, 2], "sweep/1": [0, 1]})
        yield address, logs


def data(board: tuple[str, Path], route: str) -> tuple[int, dict[str, str], bytes]:
    return get(f"{board[0]}/data/plugin/pipeline/{route}")


@pytest.mark.process
@pytest.mark.slow
def test_the_tab_is_there_and_its_page_is_ours(board: tuple[str, Path]) -> None:
    listing = json.loads(get(f"{board[0]}/data/plugins_listing")[2])
    assert listing["pipeline"]["enabled"] and listing["pipeline"]["tab_name"] == "Pipeline"
    assert listing["custom_scalars"]["enabled"] and listing["hparams"]["enabled"]
    for path in PAGE.iterdir():
        status, headers, content = data(board, path.name)
        assert (status, content) == (200, path.read_bytes())
        assert headers["Content-Type"].startswith("text/css" if path.suffix == ".css" else "text/javascript")


@pytest.mark.process
def test_runs_and_steps_come_from_event_files_alone(board: tuple[str, Path]) -> None:
    assert steps_of(board[0]) == {"sweep/0": [0, 1, 2], "sweep/1": [0, 1]}
    told = json.loads(data(board, "runs")[2])["runs"][0]["steps"][2]
    document = json.loads(data(board, "step?run=sweep/0&step=2")[2])
    assert document["schedule"] == "1f1b" and document["step"] == 2
    compute = [row[0] / sum(row) for row in document["account"]]
    assert told["shares"]["compute"] == pytest.approx(sum(compute) / len(compute), abs=1e-5)
    assert sum(told["shares"].values()) == pytest.approx(1, abs=1e-4)
    assert told["seconds"] == pytest.approx(document["time"] * 1e-9, rel=0.01)


@pytest.mark.process
def test_the_trace_is_the_one_that_the_run_left(board: tuple[str, Path]) -> None:
    status, headers, content = data(board, "trace?run=sweep/1&step=1")
    assert status == 200 and headers["Content-Disposition"] == "attachment"
    assert content.decode() == (board[1] / "sweep" / "1" / "trace.json").read_text()


@pytest.mark.process
@pytest.mark.parametrize(
    ("route", "status"),
    [
        ("step?run=nobody&step=0", 404),
        ("step?run=sweep/0&step=7", 404),
        ("step?run=sweep/0&step=x", 400),
        ("step?run=sweep/0", 400),
        ("step", 400),
        ("step?run=../../../../etc&step=0", 404),
        ("step?run=/etc/passwd&step=0", 404),
        ("trace?run=nobody&step=0", 404),
        ("../../../../etc/passwd", 404),
        ("%2e%2e/%2e%2e/plugin.py", 404),
        ("../plugin.py", 404),
        ("plugin.py", 404),
    ],
)
def test_nothing_else_can_be_reached(route: str, status: int, board: tuple[str, Path]) -> None:
    got, _, content = data(board, route)
    assert got == status and b"root:" not in content and b"import" not in content


@pytest.mark.process
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("route", ["index.js", "runs", "step?run=sweep/0&step=0", "trace?run=sweep/0&step=0"])
def test_nothing_can_be_changed(route: str, method: str, board: tuple[str, Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in board[1].rglob("*")}
    assert get(f"{board[0]}/data/plugin/pipeline/{route}", method)[0] == 405
    assert {path: path.stat().st_mtime_ns for path in board[1].rglob("*")} == before


@pytest.mark.process
@pytest.mark.slow
def test_a_run_that_goes_on_gets_its_new_steps(board: tuple[str, Path]) -> None:
    going_on = Running(board[1] / "late", recorded.job("gpipe", 2, 4)).step(2)
    before = {"late": [0, 1], "sweep/0": [0, 1, 2], "sweep/1": [0, 1]}
    try:
        going_on.flush()
        assert awaited(board[0], before) == before
        going_on.step()
    finally:
        going_on.finish()
    assert awaited(board[0], before | {"late": [0, 1, 2]})["late"] == [0, 1, 2]
    assert json.loads(data(board, "step?run=late&step=2")[2])["step"] == 2


# ---- without a TensorBoard -------------------------------------------------------------------------------------------


class Provider:
    """Stands in for TensorBoard's: series of one run, whatever they hold."""

    def __init__(self, content: bytes, about: bytes = b"") -> None:
        self._content, self._about = content, about

    def list_tensors(self, *_: Any, **__: Any) -> dict[str, dict[str, Any]]:
        return {"run": {tag_of(0): SimpleNamespace(max_step=0, plugin_content=self._about)}}

    def read_tensors(self, *_: Any, **__: Any) -> dict[str, dict[str, list[Any]]]:
        import numpy as np

        return {"run": {tag_of(0): [SimpleNamespace(numpy=np.array(self._content, dtype=object))]}}


def asked(provider: Provider, route: str, query: str = "") -> tuple[str, bytes]:
    """Status and content of an answer to a request without a server."""
    plugin = PipelinePlugin(SimpleNamespace(data_provider=provider))
    environ = {
        "REQUEST_METHOD": "GET", "PATH_INFO": route, "QUERY_STRING": query, "SERVER_NAME": "here", "SERVER_PORT": "1",
        "wsgi.url_scheme": "http",
    }  # fmt: skip
    status: list[str] = []
    content = plugin.get_plugin_apps()[route](environ, lambda said, headers: status.append(said))
    return status[0], b"".join(content)


def test_a_series_of_a_run_with_other_categories_is_listed_by_those_that_are_known() -> None:
    _, content = asked(
        Provider(b"", b'{"seconds": 2, "shares": {"other": 0.5, "agree": 0.25, "compute": 0.25}}'), "/runs"
    )
    (step,) = json.loads(content)["runs"][0]["steps"]
    assert step == {"step": 0, "seconds": 2.0, "shares": {"compute": 0.25, "other": 0.5}}


@pytest.mark.parametrize("about", [b"", b"{", b'"x"', b'{"seconds": 1, "shares": {"compute": "x"}}', b"\xff"])
def test_a_series_of_somebody_else_is_listed_without_figures(about: bytes) -> None:
    status, content = asked(Provider(b"", about), "/runs")
    assert status.startswith("200")
    assert json.loads(content)["runs"] == [{"name": "run", "steps": [{"step": 0, "seconds": 0.0, "shares": {}}]}]


def document(**changes: Any) -> str:
    """The least that a trace can be made of."""
    spans = {"rank": [0], "kind": [0], "stage": [0], "microbatch": [0], "start": [2], "length": [3]}
    spans |= changes.pop("spans", {})
    return json.dumps({"ranks": 1, "windows": [[0, 9]], "uncertainty": [7], "pairs": [], "spans": spans} | changes)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", '{"spans": {}}', '{"spans": 3, "ranks": 1}', document(ranks=0), document(ranks="x"),
        document(windows=[]), document(uncertainty=[]), document(uncertainty=[None]),
        document(windows=[[1]]), document(pairs=[[0, 1]]), document(pairs=[[-1, 0]]),
        document(spans={"rank": [1]}), document(spans={"rank": ["x"]}), document(spans={"kind": [99]}),
        document(spans={"start": [1, 2]}), document(spans={"start": 2}), document(spans={"length": [1e400]}),
    ],
)  # fmt: skip
def test_a_document_that_is_none_gives_no_trace(text: str) -> None:
    assert asked(Provider(packed(text)), "/trace", "run=run&step=0")[0].startswith("400")


@pytest.mark.parametrize("content", [b"not packed", b"", packed("{}")[:12]])
def test_what_is_not_packed_gives_no_trace(content: bytes) -> None:
    assert asked(Provider(content), "/trace", "run=run&step=0")[0].startswith("400")


def test_a_trace_of_a_document_is_the_trace_of_its_timeline() -> None:
    content = asked(Provider(packed(document())), "/trace", "run=run&step=0")[1]
    assert content.decode() == trace_of(*measured(document()))
    assert '"name":"0F0"' in content.decode()


def test_both_themes_are_served_and_written_in_one_place() -> None:
    status, content = asked(Provider(b""), "/themes.css")
    assert status.startswith("200")
    light, dark = content.decode().splitlines()
    assert light.startswith(":root{--paper:#ffffff;") and light.endswith("--accent:#b3006b;color-scheme:light}")
    assert dark.startswith(':root[data-theme="dark"]{--paper:#22262b;') and dark.endswith("color-scheme:dark}")
    told = json.loads(asked(Provider(b""), "/runs")[1])["palette"]["themes"]
    assert told["dark"] == dict(re.findall(r"--(\w+):(#\w+)", dark))
    assert told["light"] == dict(re.findall(r"--(\w+):(#\w+)", light))
    sheets = [PAGE / "page.css", PAGE / "theme.js", ROOT / "engine" / "report" / "sweep" / "page.css"]
    for name, colour in [*told["dark"].items(), *list(told["light"].items())[1:]]:  # white is white anywhere
        for sheet in sheets:
            assert f"--{name}:" not in sheet.read_text() and colour not in sheet.read_text(), (sheet, name)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # the name of a language, not an address
        assert "http:" not in text and "https:" not in text and "eval(" not in text, path.name
