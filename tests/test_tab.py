"""The server's side of TensorBoard's tab."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.report.perfetto import trace_of
from engine.report.series import packed, tag_of
from engine.tab.document import timeline_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from engine.tab.plugin import PipelinePlugin

PAGE = Path(__file__).parents[1] / "engine" / "tab" / "page"


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


@pytest.mark.parametrize("about", [b"", b"{", b'"x"', b'{"seconds": "much", "bubble": 0}', b"\xff"])
def test_a_series_of_somebody_else_is_listed_without_figures(about: bytes) -> None:
    status, content = asked(Provider(b"", about), "/runs")
    assert status.startswith("200")
    assert json.loads(content)["runs"] == [{"name": "run", "steps": [{"step": 0, "seconds": 0.0, "bubble": None}]}]


@pytest.mark.parametrize(
    "document",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"spans": {}}',
        '{"spans": {"rank": [1]}}',
        '{"spans": {"rank": ["x"]}}',
        '{"spans": 3, "ranks": 1}',
    ],
)
def test_a_document_that_is_none_gives_no_trace(document: str) -> None:
    assert asked(Provider(packed(document)), "/trace", "run=run&step=0")[0].startswith("400")


@pytest.mark.parametrize("content", [b"not packed", b"", packed("{}")[:12]])
def test_what_is_not_packed_gives_no_trace(content: bytes) -> None:
    assert asked(Provider(content), "/trace", "run=run&step=0")[0].startswith("400")


def test_a_trace_of_a_document_is_the_trace_of_its_timeline() -> None:
    text = json.dumps({
        "ranks": 1, "windows": [[0, 9]],
        "spans": {"rank": [0], "kind": [0], "stage": [0], "microbatch": [0], "start": [2], "length": [3]},
    })  # fmt: skip
    assert asked(Provider(packed(text)), "/trace", "run=run&step=0")[1].decode() == trace_of(*timeline_of(text))


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # the name of a language, not an address
        assert "http:" not in text and "https:" not in text and "eval(" not in text, path.name
