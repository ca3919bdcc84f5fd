"""The server's side of the tab: which runs have traced steps, the documents of these steps, the files of the page.

Everything is read through TensorBoard's data provider, which knows runs of the log directory by name and nothing else,
so the tab works whichever way event files are loaded, and no path is ever made from what a request says. Nothing is
written. A document is handed on as it lies in the event file; the page treats it as data (`page/model.js`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.data import provider
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from engine.categories import NAMES
from engine.folder import schemas
from engine.report.perfetto import trace_of
from engine.report.pictures.palette import for_page, style
from engine.report.tensorboard.series import PLUGIN, tag_of, unpacked
from engine.tab.document import measured

MOST_DIGITS = 18  # of a step: it is an int64
_PAGE = Path(__file__).with_name("page")
_TYPES = {".js": "text/javascript", ".css": "text/css"}


class PipelinePlugin(base_plugin.TBPlugin):
    """TensorBoard's tab on where the time of traced steps went: the entry point `tensorboard_plugins`."""

    plugin_name = PLUGIN

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._data = context.data_provider

    def get_plugin_apps(self) -> dict[str, Any]:
        """Routes below /data/plugin/pipeline: the page's files by their names, its colours, and three of data."""
        files = {f"/{path.name}": _file(path) for path in _PAGE.iterdir() if path.suffix in _TYPES}
        return files | {
            "/themes.css": _get(_themes),
            "/runs": _get(self._runs),
            "/step": _get(self._step),
            "/trace": _get(self._trace),
        }

    def is_active(self) -> bool:
        """False: TensorBoard itself sees whether there are series of ours."""
        return False  # TensorBoard itself sees whether there are series of ours

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """The page's module and the name of the tab."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Pipeline", disable_reload=True)

    def _runs(self, request: wrappers.Request) -> wrappers.Response:
        """The runs with their traced steps, and how they are drawn.

        {"palette": ..., "runs": [{"name": ..., "steps": [{"step": ..., "seconds": ..., "shares": {...}}]}]}
        """
        series = self._data.list_tensors(
            plugin_util.context(request.environ),
            experiment_id=plugin_util.experiment_id(request.environ),
            plugin_name=PLUGIN,
        )
        runs = [
            {"name": run, "steps": sorted(map(_listed, tags.values()), key=lambda step: step["step"])}
            for run, tags in sorted(series.items())
            if tags
        ]
        return http_util.Respond(request, {"palette": for_page(), "runs": runs}, "application/json")

    def _step(self, request: wrappers.Request) -> wrappers.Response:
        """The document of a step (account/steps.py)."""
        return http_util.Respond(request, self._document(request), "application/json", content_encoding="gzip")

    def _trace(self, request: wrappers.Request) -> wrappers.Response:
        """The same step as a file for Perfetto."""
        try:
            trace = trace_of(*measured(unpacked(self._document(request))))
        except ValueError as error:
            raise errors.InvalidArgumentError(f"the document of this step cannot be read: {error}") from error
        saved = [("Content-Disposition", "attachment")]
        return http_util.Respond(request, trace, "application/json", headers=saved)

    def _document(self, request: wrappers.Request) -> bytes:
        run, step = request.args.get("run", ""), request.args.get("step", "")
        if not (step.isascii() and step.isdecimal() and len(step) <= MOST_DIGITS):
            raise errors.InvalidArgumentError(f"step={step[:80]!r} is not the number of a step")
        tag = tag_of(int(step))
        read = self._data.read_tensors(
            plugin_util.context(request.environ),
            experiment_id=plugin_util.experiment_id(request.environ),
            plugin_name=PLUGIN,
            downsample=1,
            run_tag_filter=provider.RunTagFilter(runs=[run], tags=[tag]),
        )
        points = read.get(run, {}).get(tag)
        if not points:
            raise errors.NotFoundError(f"run {run!r} has no document of step {step}")
        content = points[-1].numpy.item()
        if not isinstance(content, bytes):
            raise errors.NotFoundError(f"what run {run!r} has of step {step} is no document")
        return content


def _listed(series: provider.TensorTimeSeries) -> dict[str, Any]:
    """What the list shows of one step; a series that somebody else wrote under our name shows its number only."""
    try:
        said = json.loads(series.plugin_content)
        schemas.check(said, schemas.About, "a step's line")
        shares = {name: float(said["shares"][name]) for name in NAMES if name in said["shares"]}  # of earlier runs too
    except (ValueError, KeyError, RecursionError):
        return {"step": series.max_step, "seconds": 0.0, "shares": {}}
    return {"step": series.max_step, "seconds": float(said["seconds"]), "shares": shares}


def _get(answer: Callable[[wrappers.Request], wrappers.Response]) -> Any:
    """A route that answers GET alone; what it raises of TensorBoard's errors becomes a status."""

    @wrappers.Request.application
    def app(request: wrappers.Request) -> wrappers.Response:
        if request.method not in ("GET", "HEAD"):
            return wrappers.Response(status=405, headers=[("Allow", "GET, HEAD")])
        try:
            return answer(request)
        except errors.PublicError as error:
            return http_util.Respond(request, str(error), "text/plain", code=error.http_code)

    return app


def _themes(request: wrappers.Request) -> wrappers.Response:
    """The colours of the page, light until it says otherwise."""
    colours = style("light") + style("dark", ':root[data-theme="dark"]')
    return http_util.Respond(request, colours, _TYPES[".css"])


def _file(path: Path) -> Any:
    """A route that serves one file of the page. It is read anew each time: TensorBoard outlives an update."""
    return _get(lambda request: http_util.Respond(request, path.read_bytes(), _TYPES[path.suffix]))
