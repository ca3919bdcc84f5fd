"""The event file, read back with TensorBoard's own readers."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recorded
from PIL import Image
from recorded import recorder, step_records, traced_run, with_train
from tensorboards import event_files, read

from engine.account.replay.waterfall import BARS
from engine.categories import NAMES
from engine.report.pictures.waterfall import draw_bars
from engine.report.tensorboard import curves
from engine.report.tensorboard.board import Board
from engine.report.tensorboard.hparams import METRICS, hparams
from engine.report.tensorboard.series import CURVES, PLUGIN, tag_of, unpacked

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.util.tensor_util import make_ndarray

HPARAMS = ("_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info")


def events(folder: Path) -> Iterator[Any]:
    (path,) = event_files(folder)
    return iter(LegacyEventFileLoader(str(path)).Load())


def plugin_data(folder: Path, tag: str) -> list[bytes]:
    """What the HParams plugin was told under `tag`, once per time it was told."""
    values = (value for event in events(folder) for value in event.summary.value)
    return [value.metadata.plugin_data.content for value in values if value.tag == tag]


def finished(
    folder: Path, of: recorded.Job | None = None, steps: int = 3, status: str = "completed", slower: int = 1
) -> Path:
    folder.mkdir(exist_ok=True)
    record, _ = recorder(of or recorded.job("gpipe", 2, 4), folder)
    traced_run(record, steps, slower * recorded.costs(record.job.compute))
    record.finish(status)
    return folder


def test_all_tags_are_there_in_one_file(tmp_path: Path) -> None:
    finished(tmp_path)
    assert len(event_files(tmp_path)) == 1
    found = read(tmp_path)
    names = ("fill", "stall", "transfer", "reduce", "optimizer", "data", "drain", "other")
    assert set(found.Tags()["scalars"]) == {
        "train/loss",
        "train/lr",
        "throughput/samples_per_second",
        "bubble/ideal",
        "bubble/predicted",
        "bubble/measured",
        *(f"bubble/rank{rank}/{name}" for rank in range(2) for name in names),
        *(f"memory/rank{rank}/{name}" for rank in range(2) for name in ("peak_in_flight", "peak_activation_bytes")),
        *(f"stack/rank{rank}/{name}" for rank in range(2) for name in ("ground", "compute", *names)),
        *(f"waterfall/{bar}" for bar in BARS),
        *METRICS,
    }
    assert set(found.Tags()["histograms"]) == {f"actions/stage{stage}/{kind}" for stage in range(2) for kind in "FB"}
    assert set(found.Tags()["images"]) == {"timeline/predicted", "timeline/measured", "timeline/both", "waterfall"}
    assert "report/text_summary" in found.Tags()["tensors"]


def test_scalars_have_their_values_at_their_steps(tmp_path: Path) -> None:
    found = read(finished(tmp_path))
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(0, 2.0), (1, 1.75), (2, 1.5)]
    fill = found.Scalars("bubble/rank1/fill")
    assert [e.step for e in fill] == [0, 1, 2]
    assert fill[-1].value == pytest.approx(2 / 31)  # F takes 2 ms; the window 5 x 6 ms and 1 ms of optimizer
    assert [(e.step, e.value) for e in found.Scalars("bubble/ideal")] == [(n, pytest.approx(0.2)) for n in range(3)]
    assert [e.value for e in found.Scalars("memory/rank0/peak_in_flight")] == [2, 2, 2]


def test_grad_norm_is_told_where_it_is_known(tmp_path: Path) -> None:
    of = recorded.job("gpipe", 2, 4, replicas=2)
    record, _ = recorder(of, tmp_path)
    for index, extra in enumerate([{"grad_norm": 7.0}, {"local_grad_norm": 3.0}, {}]):
        for line in step_records(of, index, **extra):
            record(line)
    record.finish("completed")
    norms = [(e.step, e.value) for e in read(tmp_path).Scalars("train/grad_norm")]
    assert norms == [(0, 7.0), (1, pytest.approx(18**0.5))]  # of one replica: its two ranks, not all four


def test_images_are_the_pictures(tmp_path: Path) -> None:
    found = read(finished(tmp_path))
    (image,) = found.Images("timeline/predicted")
    assert (image.width, Image.open(io.BytesIO(image.encoded_image_string)).width) == (1200, 1200)
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_the_report_is_markdown(tmp_path: Path) -> None:
    (value,) = read(finished(tmp_path)).Tensors("report/text_summary")
    text = value.tensor_proto.string_val[0].decode()
    assert "| bubble | ideal | predicted | measured |\n| ---: |" in text
    assert "with pipeline.microbatches=8 the ideal bubble falls" in text


def test_one_session_with_values_and_metrics(tmp_path: Path) -> None:
    finished(tmp_path)
    experiment, start, end = (plugin_data(tmp_path, tag) for tag in HPARAMS)
    assert (len(experiment), len(start), len(end)) == (1, 1, 1)
    given = metadata.parse_session_start_info_plugin_data(start[0]).hparams
    assert given["schedule"].string_value == "gpipe"
    assert [given[key].number_value for key in ("ranks", "microbatches", "replicas")] == [2, 4, 1]
    declared = metadata.parse_experiment_plugin_data(experiment[0])
    assert {info.name for info in declared.hparam_infos} == set(given)
    tags = {info.name.tag for info in declared.metric_infos}
    assert tags == set(METRICS) <= set(read(tmp_path).Tags()["scalars"])  # a metric without a scalar shows nothing


@pytest.mark.slow
def test_a_sweep_has_one_session_per_job_and_the_same_keys(tmp_path: Path) -> None:
    jobs = [
        recorded.job("gpipe", 2, 4),
        recorded.job("1f1b", 2, 2),
        with_train(recorded.job("naive", 1, 1), clip_norm=1.0),
        recorded.job("gpipe", 2, 4, replicas=2),
    ]
    for number, of in enumerate(jobs):
        finished(tmp_path / str(number), of)
    assert len(event_files(tmp_path)) == len(jobs)
    starts = [data for n in range(4) for data in plugin_data(tmp_path / str(n), HPARAMS[1])]
    sessions = [metadata.parse_session_start_info_plugin_data(data).hparams for data in starts]
    assert len(sessions) == len(jobs)
    kinds = [{key: value.WhichOneof("kind") for key, value in session.items()} for session in sessions]
    assert all(kind == kinds[0] for kind in kinds)
    assert [session["schedule"].string_value for session in sessions] == ["gpipe", "1f1b", "naive", "gpipe"]
    assert [session["clip_norm"].string_value for session in sessions] == ["None", "None", "1.0", "None"]


@pytest.mark.parametrize(("status", "end"), [("completed", ["SUCCESS"]), ("failed", ["FAILURE"]), ("interrupted", [])])
@pytest.mark.slow(keep=2)
def test_a_session_ends_as_the_run_did(status: str, end: list[str], tmp_path: Path) -> None:
    finished(tmp_path, status=status)
    assert len(plugin_data(tmp_path, HPARAMS[1])) == 1
    ends = [metadata.parse_session_end_info_plugin_data(data).status for data in plugin_data(tmp_path, HPARAMS[2])]
    assert ends == [api_pb2.Status.Value(f"STATUS_{name}") for name in end]
    assert len(read(tmp_path).Scalars("train/loss")) == 3


def test_a_job_that_failed_before_its_first_step_is_in_the_table(tmp_path: Path) -> None:
    finished(tmp_path, steps=0, status="failed")
    assert len(event_files(tmp_path)) == 1
    assert [len(plugin_data(tmp_path, tag)) for tag in HPARAMS] == [1, 1, 1]


def test_what_came_of_a_run_is_what_its_summary_says(tmp_path: Path) -> None:
    found = read(finished(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    values = {tag.partition("/")[2]: found.Scalars(tag)[-1].value for tag in METRICS}
    assert values["loss"] == summary["loss"]["last"]
    assert values["samples_per_second"] == pytest.approx(summary["samples_per_second"])
    assert values["bubble_measured"] == pytest.approx(summary["bubble"]["measured"])
    assert values["peak_activation_bytes"] == max(summary["peak_activation_bytes"])
    assert values["peak_memory_bytes"] == max(summary["memory"]["total"])


def test_no_curve_folds_back(tmp_path: Path) -> None:
    found = read(finished(tmp_path))
    for kind, of in (("scalars", found.Scalars), ("histograms", found.Histograms), ("images", found.Images)):
        for tag in found.Tags()[kind]:
            points = [(event.step, event.wall_time) for event in of(tag)]
            assert points == sorted(points) and len({step for step, _ in points}) == len(points), tag


def test_stacked_bands_end_at_the_whole_step(tmp_path: Path) -> None:
    found = read(finished(tmp_path))
    for rank in range(2):
        tops = [found.Scalars(f"stack/rank{rank}/{name}")[-1].value for name in ("ground", *NAMES)]
        assert tops == sorted(tops) and (tops[0], tops[-1]) == (0, pytest.approx(1))
        drain = found.Scalars(f"bubble/rank{rank}/drain")[-1].value
        assert tops[-2] - tops[-3] == pytest.approx(drain, abs=1e-6)


def test_histograms_hold_every_action_in_milliseconds(tmp_path: Path) -> None:
    histogram = read(finished(tmp_path)).Histograms("actions/stage1/B")[-1].histogram_value
    assert (histogram.num, histogram.min, histogram.max) == (4, 4.0, 4.0)


def test_every_chart_of_the_layout_has_curves(tmp_path: Path) -> None:
    tags = read(finished(tmp_path)).Tags()["scalars"]
    (written,) = [v for event in events(tmp_path) for v in event.summary.value if v.tag == "custom_scalars__config__"]
    parsed = layout_pb2.Layout()
    parsed.ParseFromString(make_ndarray(written.tensor).item())
    assert [category.title for category in parsed.category] == ["Bubble", "Where a step goes", "Training", "Memory"]
    for chart in (chart for category in parsed.category for chart in category.chart):
        if chart.HasField("margin"):
            wanted = {tag for band in chart.margin.series for tag in (band.value, band.lower, band.upper)}
            assert wanted <= set(tags)
        else:
            assert any(re.match(pattern, tag) for pattern in chart.multiline.tag for tag in tags)


def test_charts_of_one_name_are_the_same_in_all_runs() -> None:
    small, large = (curves.layout(recorded.job("gpipe", ranks, 4)) for ranks in (2, 4))
    for category, charts in small.items():
        assert charts.items() <= large[category].items()


@pytest.fixture
def ample(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is time to look at every step as it comes."""
    monkeypatch.setattr("engine.report.tensorboard.trace_budget.SHARE", math.inf)


@pytest.mark.usefixtures("ample")
@pytest.mark.slow
def test_documents_of_long_runs_are_bounded_and_the_last_step_is_there(tmp_path: Path) -> None:
    found = read(finished(tmp_path, recorded.job("gpipe", 1, 1), steps=72))
    steps = [int(tag.removeprefix(tag_of(0)[:-1])) for tag in found.Tags()["tensors"] if tag.startswith(PLUGIN)]
    assert steps == [*range(32), *range(32, 64, 2), 64, 68, 71]
    assert [event.step for event in found.Scalars("bubble/predicted")] == steps
    assert [event.step for event in found.Histograms("actions/stage0/F")] == steps
    (last,) = found.Tensors(tag_of(71))
    document = json.loads(unpacked(last.tensor_proto.string_val[0]))
    assert last.step == document["step"] == 71
    about = json.loads(found.summary_metadata[tag_of(71)].plugin_data.content)
    assert about["seconds"] == pytest.approx(document["time"] * 1e-9)


def test_too_large_programs_leave_no_documents_but_bubbles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.report.tensorboard.series.MOST_SPANS", 10)
    found = read(finished(tmp_path))
    assert not [tag for tag in found.Tags()["tensors"] if tag.startswith(PLUGIN)]
    assert [event.step for event in found.Scalars("bubble/predicted")] == [0, 1, 2]


@pytest.mark.slow
def test_the_event_file_of_a_long_run_stays_small(tmp_path: Path) -> None:
    """Ten thousand steps: of loss and speed every point, of ranks, histograms and documents ever fewer."""
    steps, of = 10_000, recorded.job("gpipe", 2, 2)
    record, _ = recorder(of, tmp_path, progress=False)
    timeline = recorded.measured(of.compute, recorded.costs(of.compute), step=recorded.MS)
    lines = step_records(of, 0, timeline, losses=[(1.0, 1.0)])
    for step in range(steps):
        for line in lines:
            record(line._replace(meta=line.meta | {"step": step}))
    summary = record.finish("completed")
    found = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    found.Reload()
    assert [len(found.Scalars(f"train/{name}")) for name in ("loss", "lr")] == [steps, steps]
    most = {"documents": 32 + 16 * 9 + 1, "curves": CURVES + CURVES // 2 * 5}
    for tag in found.Tags()["scalars"]:
        if tag.startswith(("memory/", "stack/", "bubble/", "waterfall/")):
            assert 16 <= len(found.Scalars(tag)) <= most["curves"], tag
    assert all(len(found.Histograms(tag)) <= most["documents"] for tag in found.Tags()["histograms"])
    documents = [tag for tag in found.Tags()["tensors"] if tag.startswith(PLUGIN)]
    assert 16 <= len(documents) <= most["documents"] and tag_of(steps - 1) in documents
    assert event_files(tmp_path)[0].stat().st_size < 400 * steps
    assert summary["traced_steps"] == steps and summary["waterfall"]["steps"] >= 16
    assert f"of {steps} traced steps" in (tmp_path / "report.txt").read_text()


def test_no_file_before_something_is_written(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.scalars({"a": None}, 0)
    board.end_session("completed")
    board.flush()
    board.close()
    assert not event_files(tmp_path) and not board.opened
    board = Board(tmp_path)
    board.image("a", draw_bars({}, ""), 0)
    assert len(event_files(tmp_path)) == 1 and board.opened
    board.close()


def test_hparams_know_no_null() -> None:
    of = recorded.job()
    record, steps = step_records(of, lr=None), []
    from engine.account.records.gather import Steps

    gathered = Steps(of)
    steps = [step for step in map(gathered.add, record) if step]
    assert all(isinstance(value, str | int | float) for value in hparams(of, steps[0].lr).values())


def test_tensorboard_is_imported_only_when_it_is_needed() -> None:
    code = "import sys, engine.report.recorder; sys.exit(any(m.startswith('tensorboard') for m in sys.modules))"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
