"""The report in words: what a run prints at its end, and report.txt / TensorBoard's text with more beside it."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.account.measure import Bubbles
from engine.account.overlap import Overlap
from engine.account.path import PathLink, by_cause, by_rank, name_of
from engine.account.records.clock_alignment import ClockAlignment
from engine.account.records.pushes import pace_rows, pushes_text, staleness_rows
from engine.account.replay.waterfall import missing
from engine.categories import NAMES
from engine.job import Job
from engine.plan.timeline import Timeline
from engine.ranks import Rank
from engine.tables import Rows, counted, markdown, milliseconds, percent, size, table

PATH, CLOCKS = "Critical path of the last traced step", "ClockAlignment"
FIRST_ONLY = "What is said below of a whole step (waterfall, critical path, timeline, trace) is replica 0's."
NAMED = 4  # replicas that a sentence lists one by one
LONGEST = 5  # links of the critical path that are named


def rank_rows(job: Job, bubbles: Bubbles) -> Rows:
    """The account as a table: a row per rank, with ms and percent of its window by category."""
    rows = [["rank", *(["replica"] if job.replicas > 1 else []), "step ms", *NAMES]]
    for world_rank, seconds in enumerate(bubbles.seconds.tolist()):
        _, replica, rank = Rank.of(world_rank, job.ranks)
        window = sum(seconds)
        cells = [f"{s * 1e3:.1f} {100 * s / window if window else 0:3.0f}%" if s else "-" for s in seconds]
        rows.append([str(rank), *([str(replica)] if job.replicas > 1 else []), f"{window * 1e3:.1f}", *cells])
    return rows


def stage_rows(job: Job, bubbles: Bubbles) -> Rows:
    """The stages as a table: the layers of each, and what a micro-batch costs there in ms."""
    assert bubbles.costs is not None
    ends = [*job.split[1:], len(job.layers)]
    total, kinds = bubbles.costs.sum(), [k for k in range(4) if bubbles.costs[k].any()]
    names = ("forward", "backward", "input half", "weight half")
    rows = [["stage", "rank", "layers", "parameters", *(f"{names[k]} ms" for k in kinds), "share of compute"]]
    for stage, (first, end) in enumerate(zip(job.split, ends, strict=True)):
        layers, costs = job.layers[first:end], bubbles.costs[:, stage]
        rank = "/".join(str(way[stage]) for way in job.placement.rank_of)
        span = layers[0].name if len(layers) == 1 else f"{layers[0].name} .. {layers[-1].name}"
        means = [f"{costs[k].mean() * 1e3:.2f}" for k in kinds]
        share = percent(float(costs.sum() / total))
        rows.append([str(stage), rank, span, f"{sum(layer.parameters for layer in layers):,}", *means, share])
    return rows


def bubble_rows(bubbles: Bubbles) -> Rows:
    """The three bubbles of a run, as shares of the step."""
    return [
        ["bubble", "ideal", "predicted", "measured"],
        ["of the step", percent(bubbles.ideal), percent(bubbles.predicted), percent(bubbles.measured)],
    ]


def waterfall_rows(bubbles: Bubbles) -> Rows:
    """The waterfall as a table: each bar in ms, its share of the step, and the time up to its end."""
    assert bubbles.waterfall is not None
    rows, reached, total = [["waterfall", "ms", "share", "up to ms"]], 0.0, bubbles.waterfall.total
    for name, bar in bubbles.waterfall.bars.items():
        reached += bar
        rows.append([name, f"{bar * 1e3:.2f}", percent(bar / total if total else None), f"{reached * 1e3:.2f}"])
    return rows


def path_text(path: Sequence[PathLink], timeline: Timeline) -> str:
    """The critical path of a step in words: how much for which cause and on which rank, and its longest links."""
    total = sum(link.end - link.start for link in path)
    if not total:
        return "The step has no critical path: nothing of it was recorded."
    causes = ", ".join(
        f"{cause} {milliseconds(ns * 1e-9)} ({percent(ns / total)})" for cause, ns in by_cause(path).items() if ns
    )
    places = ", ".join(f"rank {rank} {percent(ns / total)}" for rank, ns in sorted(by_rank(path).items()) if ns)
    longest = sorted(path, key=lambda link: link.start - link.end)[:LONGEST]
    links = ", ".join(
        f"{name_of(link, timeline)} on rank {link.rank} {milliseconds((link.end - link.start) * 1e-9)}"
        for link in longest
    )
    return f"By cause: {causes}.\nBy rank: {places}.\nLongest links: {links}."


def clocks_text(clocks: ClockAlignment) -> str:
    """How well the clocks of other hosts than rank 0's are known, a line per rank."""
    lines = []
    for rank, ns in enumerate(clocks.uncertainty):
        if ns:
            drift = clocks.drift.get(clocks.leader(rank))
            lines.append(
                f"rank {rank}: on the clock of rank 0 to within {milliseconds(ns * 1e-9, 3)}"
                + ("" if drift is None else f", drift {drift * 1e6:+.1f} ppm")
            )
    return "\n".join(lines)


def headline(summary: dict[str, Any]) -> str:
    """The run in one line."""
    s = summary
    sizes = f"ranks {s['ranks']}, micro-batches {s['microbatches']}, replicas {s['replicas']}"
    sizes += " (asynchronous)" if pushes(s) else ""
    said = f"{s['status']}: {s['schedule']}, {sizes}; steps {s['steps']}, samples {s['samples']}"
    first, last = s["loss"]["first"], s["loss"]["last"]
    if first is not None and last is not None:
        said += f"; loss {first:.4g} -> {last:.4g}"
    if (since := s["loss"]["not_finite_since"]) is not None:
        said += f" (not finite since step {since})"
    if s["samples_per_second"]:
        said += f"; {s['step_time']['median'] * 1e3:.1f} ms per step, {s['samples_per_second']:.1f} samples/s"
    return said


def closing(
    job: Job, summary: dict[str, Any], bubbles: Bubbles | None, cause: str, run_dir: Path, advice: str | None = None
) -> str:
    """What the terminal shows at the end of a run that has completed a step.

    `cause`: the sentence of `diagnose`; `advice`: that of `next_step`.
    """
    parts = [headline(summary)]
    if summary["asynchronous"] is not None:
        parts.append(asynchronous_text(summary))
    if waits := barriers(summary):
        parts.append(barrier_text(waits))
    if told := pushes(summary):
        parts += [pushes_text(told), table(pace_rows(told))]
    if bubbles is not None:
        parts += [
            f"Where a step went, {_looked_at(summary, bubbles)}, ms and share:",
            table(rank_rows(job, bubbles)),
            table(bubble_rows(bubbles)),
            cause,
        ]
    parts += [advice] if advice else []
    folder = shlex.quote(str(run_dir))
    commands = [f"{_tensorboard()} --logdir {folder}"]
    predictable = summary["status"] != "failed" and not pushes(summary)
    if predictable and bubbles is not None and bubbles.waterfall is not None:
        commands.insert(0, f"{_python()} -m engine.report {folder}  # what other configurations would take")
    return "\n\n".join([*parts, "\n".join(commands)])


def _python() -> str:
    """The command that starts this Python, for a shell that need not have its folder on the PATH."""
    found = shutil.which("python")
    same = found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
    return "python" if same else shlex.quote(sys.executable)


def _tensorboard() -> str:
    """The command that starts the TensorBoard of this Python, for a shell that need not have its folder on the PATH."""
    beside = Path(sys.executable).with_name("tensorboard")
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m tensorboard.main"
    found = shutil.which(beside.name)
    on_path = found is not None and Path(found).parent.resolve() == beside.parent.resolve()
    return beside.name if on_path else shlex.quote(str(beside))


def report(
    job: Job,
    summary: dict[str, Any],
    bubbles: Bubbles | None,
    cause: str,
    more: Mapping[str, str],
    as_markdown: bool = False,
) -> str:
    """The whole report: for report.txt, or in Markdown. `more`: heading -> words of further sections."""
    tabular, waits = markdown if as_markdown else table, barriers(summary)
    sections = [("", headline(summary))]
    if summary["asynchronous"] is not None:
        sections.append(("Asynchronous", asynchronous_text(summary) + "\n\n" + tabular(_staleness_rows(summary))))
    if told := pushes(summary):
        tables = tabular(pace_rows(told)), tabular(staleness_rows(told)), FIRST_ONLY
        sections.append(("Asynchronous replicas", "\n\n".join([pushes_text(told), *tables])))
    if summary["evaluation"] is not None:
        sections.append(("Evaluation", tabular(_evaluation_rows(summary["evaluation"]))))
    if bubbles is None:
        sections.append(("Bubble", cause))
    else:
        mean = _looked_at(summary, bubbles)
        sections += [
            ("Bubble", tabular(bubble_rows(bubbles)) + "\n\n" + cause),
            ("Waterfall", waterfall_text(job, bubbles, summary["traced_steps"], tabular)),
            *([("Barrier", barrier_text(waits) + "\n\n" + tabular(_barrier_rows(waits)))] if waits else []),
            *([("Reduction", overlap_text(bubbles.overlap))] if bubbles.overlap else []),
            *more.items(),
            ("Ranks", f"{mean.capitalize()}, ms and share.\n\n{tabular(rank_rows(job, bubbles))}"),
        ]
        if bubbles.costs is not None:
            sections.append(("Stages", "Mean cost of one micro-batch.\n\n" + tabular(stage_rows(job, bubbles))))
    sections.append(("Memory and traffic of a step", tabular(_traffic_rows(summary))))
    mark = "### " if as_markdown else ""
    return "\n\n".join(f"{mark}{head}\n\n{body}" if head else body for head, body in sections) + "\n"


def _looked_at(summary: dict[str, Any], bubbles: Bubbles) -> str:
    """Of the ranks' account, where an asynchronous schedule's steady state is what was looked for."""
    return _mean(bubbles.steps, bubbles.steps if bubbles.steady else summary["traced_steps"])


def _mean(steps: int, traced: int) -> str:
    """Over which steps something is a mean. The first traced step is left out, and some of a long run's."""
    return f"mean over {f'{steps} of {traced} traced steps' if traced > steps + 1 else counted(steps, 'traced step')}"


def waterfall_text(job: Job, bubbles: Bubbles, traced: int, tabular: Callable[[Rows], str]) -> str:
    """The mean waterfall, or why there is none. `traced`: steps; `tabular`: how rows become a table."""
    if bubbles.waterfall is None:
        steady = f"\n\nWhat the bubble is made of:\n\n{tabular(_steady_rows(bubbles))}" if job.windows else ""
        return missing(job) + steady
    mean = _mean(bubbles.waterfall.steps, traced)
    return f"From perfect work to the measured step, {mean}.\n\n{tabular(waterfall_rows(bubbles))}"


def overlap_text(overlap: Overlap) -> str:
    """What of the replicas' reduction was hidden behind computation, on all ranks together."""
    total, hideable, hidden = (
        milliseconds(float(part.mean()) / overlap.steps * 1e-9)
        for part in (overlap.total, overlap.hideable, overlap.hidden)
    )
    share = "" if overlap.share is None else f" ({percent(overlap.share)})"
    return f"Reducing took a rank {total} a step; {hideable} of it could be hidden, {hidden} was{share}."


def _steady_rows(bubbles: Bubbles) -> Rows:
    """From perfect work to the measured bubble of an asynchronous update, one real thing more at each row."""
    assert bubbles.ideal is not None and bubbles.predicted is not None and bubbles.with_transfer is not None
    reached = [0.0, bubbles.ideal, bubbles.predicted, bubbles.with_transfer, bubbles.measured]
    names = ("schedule", "imbalance", "transfer", "rest")
    rows = zip(names, reached, reached[1:], strict=False)
    return [["", "of the update", "up to"], *([name, percent(b - a), percent(b)] for name, a, b in rows)]


def asynchronous_text(summary: dict[str, Any]) -> str:
    """What must be known of such a run before its losses are compared with others."""
    told = summary["asynchronous"]
    steady, drains = told["steady_updates"], told["updates_between_drains"]
    state = (
        f"the bubbles are those of the steady state ({counted(steady, 'traced update')}, the first and last P left out)"
    )
    if not steady:
        state = f"no traced update lies in a steady state (of {drains} between drains, the first and last P left out)"
        state += ": fill and drain are included"
    return (
        "This is not the synchronous optimisation: gradients are computed with weights that are up to "
        f"{counted(max(summary['staleness']), 'update')} old, and results differ from those of other schedules. "
        f"Of the time, {state}."
    )


def barriers(summary: dict[str, Any]) -> list[dict[str, float]]:
    """What each replica wasted at the barrier; empty where there is none, or nothing was traced."""
    return (summary["data_parallel"] or {}).get("barrier") or []


def pushes(summary: dict[str, Any]) -> dict[str, Any] | None:
    """What asynchronous replicas pushed; None where there are none."""
    told: dict[str, Any] | None = summary["data_parallel"]
    return told if told is not None and told["mode"] == "async" else None


def barrier_text(waits: Sequence[dict[str, float]]) -> str:
    """What replicas that meet in every step waste there, in a sentence; of many only the two at the ends."""
    order = sorted(range(len(waits)), key=lambda replica: -waits[replica]["waiting"])
    shown = sorted(order) if len(order) <= NAMED else [order[0], order[-1]]
    each = (
        f"replica {replica} wasted {milliseconds(waits[replica]['waiting'])} of a step "
        f"({percent(waits[replica]['share'])})"
        for replica in shown
    )
    return f"Waiting for slower replicas, {', '.join(each)}{'' if len(shown) == len(order) else ', others between'}."


def _barrier_rows(waits: Sequence[dict[str, float]]) -> Rows:
    """A row per replica: waiting for slower ones, and what of the reduction itself nothing hid."""
    rows = [["replica", "waiting ms", "share of the step", "reducing ms"]]
    for replica, w in enumerate(waits):
        rows.append([str(replica), f"{w['waiting'] * 1e3:.1f}", percent(w["share"]), f"{w['reducing'] * 1e3:.1f}"])
    return rows


def _staleness_rows(summary: dict[str, Any]) -> Rows:
    """By stage, which here is the rank: how old the weights were that were read, and how many versions were kept."""
    rows = [["stage", "updates behind", "versions kept"]]
    for stage, numbers in enumerate(zip(summary["staleness"], summary["weight_versions"], strict=True)):
        rows.append([str(stage), *map(str, numbers)])
    return rows


def _evaluation_rows(evaluation: dict[str, Any]) -> Rows:
    loss = "-" if evaluation["loss"] is None else f"{evaluation['loss']:.4g}"
    return [
        ["after steps", "samples", "loss", "accuracy"],
        [str(evaluation["step"]), str(evaluation["samples"]), loss, percent(evaluation["accuracy"])],
    ]


def _traffic_rows(summary: dict[str, Any]) -> Rows:
    rows = [["rank", "peak in flight", "peak activations", "sent to stages"]]
    columns = zip(
        summary["peak_in_flight"], summary["peak_activation_bytes"], summary["bytes_sent_between_stages"], strict=True
    )
    for rank, (peak, activations, sent) in enumerate(columns):
        rows.append([str(rank), str(peak), size(activations), size(sent)])
    if (memory := summary["memory"]) is not None:
        names = [name for name in memory if name != "activations"]
        rows[0] += [name.replace("_", " ") for name in names]
        for rank, row in enumerate(rows[1:]):
            row += [size(memory[name][rank]) for name in names]
    return rows
