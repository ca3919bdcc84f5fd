"""Write docs/configuration.md, docs/tags.md, docs/files.md and docs/schedules.md from the code.

    scripts/reference [FOLDER]

Keys come from engine/settings.py, choices and their own keys from conf/, schedules from their docstrings. Tags and
files are the tables below; tests/test_reference.py compares them with what a run leaves, and the pages with this.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from engine.account.bubble import NAMES
from engine.account.replay.waterfall import BARS
from engine.cli.config import CONF
from engine.cli.help import default, groups, meaning
from engine.plan.schedules import SCHEDULES
from engine.plan.views.guide import guide
from engine.report.tensorboard.hparams import METRICS
from engine.settings import KEYS

WRITTEN = "<!-- Written by scripts/reference from the code; a test compares. Do not edit. -->"


class Tag(NamedTuple):
    """One kind of record in the event file. `{r}` and the like stand for a number, `{name}` for one of a list."""

    tag: str
    unit: str
    meaning: str


TAGS: dict[str, list[Tag]] = {
    "Scalars, of every step": [
        Tag("train/loss", "", "the mean loss over what the global batch counted"),
        Tag("train/lr", "", "the learning rate"),
        Tag("train/grad_norm", "", "the norm of the whole gradient, where `train.clip_norm` asks for it"),
        Tag("throughput/samples_per_second", "samples/s", "samples of the step over its duration"),
        Tag("memory/rank{r}/peak_in_flight", "micro-batches", "the most that had their forward and not their backward"),
        Tag("memory/rank{r}/peak_activation_bytes", "bytes", "the most that forwards kept for backwards"),
        Tag("memory/rank{r}/weight_versions", "versions", "weights kept at most, of asynchronous schedules"),
        Tag("staleness/stage{s}", "updates", "how old the weights were, of asynchronous schedules"),
        Tag("staleness/replica{r}", "updates", "how old a replica's weights were, of `data_parallel.mode=async`"),
        Tag("throughput/replica{r}/steps_per_second", "steps/s", "of `data_parallel.mode=async`"),
    ],
    "Scalars, of evaluations": [
        Tag("eval/loss", "", "the mean loss over the held-out samples"),
        Tag("eval/accuracy", "share", "the share of right classes, where targets are classes"),
    ],
    "Scalars, of traced steps": [
        Tag("bubble/ideal", "share", "the schedule's own bubble, with equal stages and free messages"),
        Tag("bubble/predicted", "share", "the same with the costs measured in this run"),
        Tag("bubble/measured", "share", "from the recorded spans"),
        Tag("bubble/rank{r}/{name}", "share", "of the rank's step, the mean over replicas; every name but compute"),
        Tag("stack/rank{r}/{name}", "share", "the same added up, for the stacked chart; `ground` is its lower edge"),
        Tag("waterfall/{bar}", "s", "one bar of the waterfall, from perfect work to the measured step"),
        Tag("barrier/replica{r}", "s", "how long a replica waited because another was slower"),
        Tag("reduction/hidden", "share", "of the reduction time that could hide behind computation, what was hidden"),
        Tag("reduction/rank{r}/exposed", "s", "reduction that nothing hid, by world rank"),
    ],
    "Histograms": [Tag("actions/stage{s}/{kind}", "ms", "durations of F, B, I and W of a stage in a traced step")],
    "Images": [
        Tag("timeline/predicted", "", "the last traced step, simulated at the measured costs"),
        Tag("timeline/measured", "", "the last traced step as it was"),
        Tag("timeline/both", "", "one above the other, as in `timeline.png`"),
        Tag("waterfall", "", "the bars of the last traced step"),
    ],
    "Text": [Tag("report", "", "the content of `report.txt`")],
    "HParams, one session per run": [Tag(metric, "", "of the whole run, as in summary.json") for metric in METRICS],
}


class File(NamedTuple):
    """One file of a run folder, and when it is there."""

    name: str
    when: str
    meaning: str


FILES: dict[str, list[File]] = {
    "Of a run": [
        File("summary.json", "always", "status, losses, step times, bubbles, the account per rank, memory, bytes sent"),
        File("error.txt", "failed", "the first true error, with its traceback"),
        File(".hydra/", "always", "the configuration as Hydra composed it, and the overrides"),
        File("config.json", "started", "the configuration as it was used; a folder that has one is refused"),
        File("plan.json", "started, `mode=plan`", "program, placement, layers of each stage, simulated figures"),
        File("program.csv", "started, `mode=plan`", "the program in the dialect of torch.distributed.pipelining"),
        File("model.safetensors", "`save`", "the weights of the whole model, under the unsplit model's names"),
        File("checkpoints/", "`checkpoint`", "the newest checkpoints, a folder each: [checkpoints](checkpoints.md)"),
        File("attempts/", "`resume`", "what the attempts before the last left: configuration, log, summary, report"),
        File("engine.log", "started", "every rank's log lines, tagged with the rank"),
        File("events.out.tfevents.*", "started", "exactly one event file for TensorBoard: [tags](tags.md)"),
        File("report.txt", "a step was traced", "the report, with tables of stages, memory and traffic"),
        File("timeline.png", "a step was traced", "predicted above measured, the last traced step"),
        File("timeline.svg", "a step was traced", "the same as lines and letters, for any size"),
        File("waterfall.png", "a step was traced", "the bars of the last traced step"),
        File("waterfall.svg", "a step was traced", "the same as lines and letters"),
        File("trace.json", "a step was traced", "the same step for Perfetto: a process per rank, arrows per message"),
        File(
            "costs.json", "a step was traced", "what computations, messages and layers took and kept, for predictions"
        ),
        File("comparison.txt", "`plan.compare`", "schedules side by side"),
        File("comparison.json", "`plan.compare`", "the same as data"),
    ],
    "Of a sweep, beside a folder per job": [
        File("comparison.txt", "always", "a row per job, the Pareto front, scaling"),
        File("comparison.json", "always", "the rows as data"),
        File("comparison.html", "always", "the page: one file that needs no network"),
        File("multirun.yaml", "always", "Hydra's own configuration of the sweep"),
    ],
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def configuration() -> str:
    """docs/configuration.md: groups with their choices, keys with meaning and default."""
    shown = [path for path in KEYS if path not in groups() and path != "plan.costs"]
    keys = table(
        ["key", "meaning", "default"],
        ([f"`{path}`", meaning(KEYS[path]), f"`{default(path)}`" if default(path) else ""] for path in shown),
    )
    parts = [WRITTEN, "# Configuration", CONFIGURATION.strip(), "## Groups", *(_group(name) for name in groups())]
    return "\n\n".join([*parts, "## Keys", "The default is that of the default choices of all groups.", keys]) + "\n"


def _group(name: str) -> str:
    said = KEYS[name].meaning if name in KEYS else ABOUT[name]
    head = f"### {name}\n\n{said[0].upper()}{said[1:]}. Default: `{default(name)}`."
    rows = [[f"`{file.stem}`", *_choice(name, file)] for file in sorted((CONF / name).glob("*.yaml"))]
    return f"{head}\n\n{table(['choice', 'what it is', 'its keys and their defaults'], rows)}"


def _choice(group: str, file: Path) -> tuple[str, str]:
    """What a file of a group chooses, and the keys that it has of its own."""
    text = file.read_text()
    content: dict[str, Any] = yaml.safe_load(text) or {}
    if group == "experiment":
        return " ".join(re.findall(r"^# (?!@)(.*)$", text, re.MULTILINE)), ""
    own = [key for key in content if key not in ("name", "_target_", "loss", "evaluation", "bucket_bytes")]
    notes = {key: f" ({note})" if (note := _comment(text, key)) else "" for key in own}
    keys = ", ".join(f"`{group}.{key}={_plain(content[key])}`{notes[key]}" for key in own)
    if group == "schedule":
        return SCHEDULES[content["name"]].summary.rstrip("."), keys
    if group in ("allreduce", "partition"):
        return _comment(text, "name"), keys
    target = content.get("_target_")
    return ": ".join(part for part in (f"`{target}`" if target else "", _comment(text, "_target_")) if part), keys


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value).replace("'", "")


def _comment(text: str, key: str) -> str:
    found = re.search(rf"^{key}:[^#\n]*# (.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def tags() -> str:
    """docs/tags.md."""
    parts = [WRITTEN, "# TensorBoard tags", TAGS_TEXT.strip()]
    for title, rows in TAGS.items():
        parts += [f"## {title}", table(["tag", "unit", "meaning"], ([f"`{t.tag}`", t.unit, t.meaning] for t in rows))]
    return "\n\n".join(parts) + "\n"


def files() -> str:
    """docs/files.md."""
    parts = [WRITTEN, "# Files of a run", FILES_TEXT.strip()]
    for title, rows in FILES.items():
        parts += [
            f"## {title}",
            table(["file", "there when", "content"], ([f"`{f.name}`", f.when, f.meaning] for f in rows)),
        ]
    return "\n\n".join([*parts, *(SUMMARY.strip(),)]) + "\n"


ABOUT = {
    "allreduce": "how replicas sum their gradients, see [data parallelism](data_parallel.md)",
    "experiment": "several choices at once, and a sweep where the file says so",
}
CONFIGURATION = """
`python -m engine key=value ...` takes these keys; `--help` prints the same, `--cfg job` the whole composed
configuration. A group is chosen by the name of one of its files, in `conf/` or in the folder that `--config-dir` names,
and its keys can then be changed one by one: `schedule=interleaved_1f1b schedule.chunks=4`. A key that a group's
`_target_` takes and its file does not have is added with a plus: `+optimizer.nesterov=true`. Whatever is wrong is
refused before anything starts, with the allowed values.

**Steps or epochs.** Give one of `train.steps` and `train.epochs`; with neither, 20 steps. Steps go on into the next
epoch, reshuffled. The last batch of an epoch may be short. It trains too, with fewer micro-batches where it must, or is
left out with `data.drop_last=true`.

**Quoting.** Shell and Hydra both take brackets and commas apart. Quote lists: `'partition.split=[layer2,layer3]'`. In a
sweep each alternative is a list of its own: `-m 'partition.split=[layer2],[layer3]'`. A value with a comma in it gets
quotes inside the quotes: `'data.path="a, b"'`.

**Exit codes.** 0: all well. 1: a run failed. 2: the configuration was refused and nothing was started. 75: a signal
asked the run to end, and it saved before ([checkpoints](checkpoints.md)). 128 + n: ended by signal n (Ctrl-C: 130). Of
a sweep: 0 where every job was well, 2 where every job was refused, else 1. The last line on the screen is the reason,
and it is in `error.txt`.

**Output.** Nobody has to read it: `| head`, a closed terminal or `nohup ... &` do not end a run. A run folder that was
deleted, or whose disk is full, does. A folder that holds a run already is refused.
"""
TAGS_TEXT = f"""
One event file per run. `{{name}}` is one of {", ".join(NAMES)}; `{{bar}}` one of {", ".join(BARS)}; `{{r}}` a rank or a
replica, `{{s}}` a stage. What each name means: [reading a bubble](reading-a-bubble.md). Shares are of the step. The
page *Custom Scalars* shows the three bubbles in one chart and where each rank's step goes, stacked. Of ranks, of
histograms and of the tab's steps the event file keeps ever fewer points as a run goes on.
"""
FILES_TEXT = """
A run leaves one folder, `runs/DATE/TIME-TOKEN`, or what `hydra.run.dir=FOLDER` names; a sweep one that ends in
`-sweep`, or `hydra.sweep.dir=FOLDER`. Times are in seconds and sizes in bytes, unless a name says otherwise. *started*:
the configuration was accepted and workers were about to start.
"""
SUMMARY = """
## summary.json

Written however the run ends; `status` is `completed`, `failed` or `interrupted`, and `error` says why.

* `schedule`, `ranks`, `stages`, `microbatches`, `replicas`, `steps`, `samples`: what ran.
* `loss`: `first` and `last`. `step_time`: `median`, `min`, `max`. `samples_per_second`.
* `bubble`: `ideal`, `predicted`, `measured`, and `per_rank` with the account of each rank, P x R entries.
* `peak_in_flight`, `peak_activation_bytes`: a number per rank of the pipeline, the largest over replicas.
* `evaluation`: `samples`, `loss`, `accuracy`.
* `checkpoint`: null, or how many were `made` and `failed`, the `bytes` of the largest, the seconds that training
  `waited` for copies (outside the account), and after how many steps the run was `resumed_from`. `steps`, `samples` and
  `loss.first` are over all attempts, times and bubbles of the last one.
* `allreduce`: `name`, `bytes_sent_per_rank`, `exposed` seconds. `bytes_sent_between_stages`: a number per edge.

## plan.json

`schedule`, `ranks`, `stages`, `microbatches`, `placement` (stage -> rank), `program` (rank -> list of actions,
computations only), `lowered` (the same with messages), `bubble_fraction`, `bubble_rate`, `makespan` and `per_rank`
(`busy`, `idle`, `peak_in_flight`), in units of `plan.costs`. Above 100,000 actions `program` and `lowered` are left out
and the CSV is named. An action prints as torch.distributed.pipelining prints it: `2F0` is stage 2, forward,
micro-batch 0; `3I2` and `3W2` are the halves of a backward; `1SEND_F3` and `0RECV_B1` are messages.
"""

PAGES = {
    "configuration.md": configuration,
    "tags.md": tags,
    "files.md": files,
    "schedules.md": guide,
}


def main(folder: Path) -> None:
    """Write all pages into `folder`."""
    for name, page in PAGES.items():
        (folder / name).write_text(page())
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
