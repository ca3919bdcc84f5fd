"""What a finished run has measured, read back from its folder: summary.json, config.json and costs.json.

The costs of stages are shared out among their layers by what each layer's forward took, so that they can be put
together in another way. Backwards of a layer are taken to be as long, among those of its stage, as its forwards are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.files import read_json
from engine.folder import schemas
from engine.folder.rows import is_sweep, job_folders
from engine.plan.actions import Op, Program
from engine.plan.schedules import build
from engine.plan.views.summary import CSV_NAME
from engine.predict.costs import COSTS_NAME, VERSION

Floats = npt.NDArray[np.float64]
Sends = tuple[float, float] | None

HALF = 0.5  # of a whole backward: the input gradients' part, where none was measured
_DEEPEST = 4  # folders between a sweep and its jobs, at most
# What must be equal for the computations of two runs to cost the same.
_SAME = ("model", "data", "precision", "device", "delay")
_NOT_COSTS = ("split", "stages", "chunks", "workers", "shuffle", "evaluation", "pin_memory")


@dataclass(frozen=True, eq=False)
class Measured:
    """The measurements of one run, in seconds and bytes, over whole traced steps.

    L: layers, S: stages, R: replicas, P: ranks.

    `layers` [R, 4, L]: what a layer adds to F, B, I, W of a micro-batch of `rows` samples; `measured` [4] tells the
    kinds that the run executed, the others are made of these. `short`: (rows, [4, L]) of batches with fewer samples.
    `kept`, `weights` [L]: bytes that a micro-batch leaves for its backward, and that are there all the time on each
    rank that has the layer; `buckets` [L]: what is there besides where its gradients are reduced. `memory` [P]: the
    peaks as measured, or None. What is not named here is as in costs.json.
    """

    folder: Path
    config: Mapping[str, Any]
    raw: Mapping[str, Any]
    step_time: float
    memory: list[float] | None
    layers: Floats
    measured: npt.NDArray[np.bool_]
    short: tuple[tuple[float, Floats], ...]
    kept: Floats
    weights: Floats
    buckets: Floats

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the run's layers, in order."""
        return tuple(layer["name"] for layer in self.raw["layers"])

    @property
    def sends(self) -> list[Sends]:
        """By layer, the bytes of an activation and of its gradient, for micro-batches of `largest` samples."""
        return [None if layer["sends"] is None else tuple(layer["sends"]) for layer in self.raw["layers"]]

    @property
    def parameters(self) -> Floats:
        """Bytes of parameters, by layer."""
        return np.array([layer["parameter_bytes"] for layer in self.raw["layers"]], dtype=np.float64)

    @property
    def split(self) -> tuple[int, ...]:
        """The index of each stage's first layer."""
        return tuple(self.raw["split"])

    @property
    def rows(self) -> float:
        """Samples of a micro-batch, the mean over replicas and micro-batches."""
        return float(self.raw["rows"])

    @property
    def largest(self) -> int:
        """Samples of the largest micro-batch."""
        return int(np.ceil(self.rows - 1e-9))

    @property
    def share(self) -> int:
        """Samples of a replica in one pass."""
        return int(self.raw["samples"] // (self.raw["replicas"] * self.raw["passes"]))

    def reduces(self, program: Program) -> bool:
        """Whether gradients of a program are reduced with those of others, here: replicas, or copies of a stage."""
        return bool(self.raw["replicas"] > 1 or program.placement.copies > 1)

    @property
    def made_to_measure(self) -> bool:
        """Whether the model has as many layers as there are stages, whatever their number (a keyword `stages`)."""
        model = self.config["model"]
        listed = [value for key, value in model.items() if key != "split" and isinstance(value, list)]
        return len(self.names) == len(self.split) and "stages" in model and not listed


def read(folder: Path | str) -> Measured:
    """Read what the run of a folder has measured.

    Raises ValueError, one line with the remedy, where that is not enough.
    """
    folder = Path(folder)
    try:
        return _of_run(folder)
    except schemas.Damaged as error:
        raise ValueError(f"the files in {folder} are not those of a whole run ({error}): run it again") from error


def _of_run(folder: Path) -> Measured:
    summary = schemas.read(folder / "summary.json", schemas.Summary)
    if summary is None:
        raise ValueError(_no_run(folder))
    if summary.get("mode") == "plan":
        raise ValueError(f"{folder} is a plan, for which nothing was measured: train with the same keys (mode=train)")
    if summary.get("status") == "failed":
        raise ValueError(f"the run in {folder} failed ({_first_line(summary)}): give one that completed")
    schemas.check(summary, schemas.RunSummary, "summary.json")
    if summary["asynchronous"] is not None:
        raise ValueError(
            f"the run in {folder} is asynchronous (schedule {summary.get('schedule')}), and its steps overlap: "
            "predictions start from a synchronous schedule, such as schedule=1f1b"
        )
    if (summary["data_parallel"] or {}).get("mode") == "async":
        raise ValueError(
            f"the run in {folder} has asynchronous replicas (data_parallel.mode=async), which share no step: "
            "predictions start from data_parallel.mode=sync, or from one replica"
        )
    raw, config = read_json(folder / COSTS_NAME), schemas.read(folder / "config.json", schemas.Config)
    if raw is None or config is None or summary["step_time"].get("median") is None:
        raise ValueError(
            f"{folder} holds no measured costs ({COSTS_NAME}): no whole step of the run was traced, or its program "
            "is too large for that; run it again with trace.every=1"
        )
    if raw.get("version") != VERSION:
        raise ValueError(
            f"{folder / COSTS_NAME} has version {raw.get('version')}, and this engine reads {VERSION}: run it again"
        )
    schemas.check(raw, schemas.CostsFile, COSTS_NAME)
    if raw["schedule"] == "csv":  # the run's own copy: the file that it was given may be gone, or another by now
        raw = {**raw, "options": {**raw["options"], "path": str(folder / CSV_NAME)}}
    schemas.check_costs(raw, COSTS_NAME)
    held = summary.get("memory")
    if held is not None and any(len(sizes) != raw["ranks"] for sizes in held.values()):
        raise schemas.Damaged(f"summary.json is damaged: memory is not that of {raw['ranks']} ranks")
    return _measured(folder, summary, config, raw)


def _measured(folder: Path, summary: Mapping[str, Any], config: Mapping[str, Any], raw: Mapping[str, Any]) -> Measured:
    duration = np.array(raw["duration"], dtype=np.float64)
    shares = _shares(raw)
    layers, measured = _by_layer(duration, raw["split"], shares)
    short = tuple(
        (float(each["rows"]), _by_layer(np.array([each["duration"]], dtype=np.float64), raw["split"], shares)[0][0])
        for each in raw["short"]
    )
    parameters = np.array([layer["parameter_bytes"] for layer in raw["layers"]], dtype=np.float64)
    held, memory = summary.get("memory"), None
    weights, buckets = 2 * parameters, parameters  # the former with their gradients
    if held is not None:
        memory = [float(size) for size in held["total"]]
        copies = build(raw["schedule"], raw["ranks"], raw["microbatches"], dict(raw["options"])).placement.copies
        stored = max(1.0, float(parameters.sum()) * copies)
        lasting = sum(sum(held[name]) for name in ("parameters", "gradients", "optimizer_state"))
        reduces = raw["replicas"] * copies > 1
        weights = parameters * (lasting / stored)
        buckets = parameters * (sum(held["buckets" if reduces else "gradients"]) / stored)
    return Measured(
        folder=folder,
        config=config,
        raw=raw,
        step_time=float(summary["step_time"]["median"]),
        memory=memory,
        layers=layers,
        measured=measured,
        short=short,
        kept=np.array([layer["activation_bytes"] for layer in raw["layers"]], dtype=np.float64),
        weights=weights,
        buckets=buckets,
    )


def _shares(raw: Mapping[str, Any]) -> Floats:
    """Each layer's part of its stage, by forwards; by parameters where those were not timed, and else evenly."""
    forward = np.array([layer["forward"] for layer in raw["layers"]], dtype=np.float64)
    parameters = np.array([layer["parameter_bytes"] for layer in raw["layers"]], dtype=np.float64)
    shares = np.zeros(len(forward))
    for first, end in zip(raw["split"], [*raw["split"][1:], len(forward)], strict=True):
        own = next(each for each in (forward, parameters, np.ones_like(forward)) if each[first:end].sum() > 0)
        shares[first:end] = own[first:end] / own[first:end].sum()
    return shares


def _by_layer(duration: Floats, split: list[int], shares: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """[R, 4, S] of stages to [R, 4, L] of layers, every kind filled in; and which kinds were measured: [4]."""
    measured = np.asarray(duration.any(axis=(0, 2)))
    stages = duration.copy()
    whole, half, rest = (stages[:, op] for op in (Op.B, Op.I, Op.W))
    parts = half.sum() / (half + rest).sum() if (half + rest).any() else HALF
    lacking = whole == 0
    whole[lacking] = (half + rest)[lacking]
    lacking = (half + rest) == 0
    half[lacking], rest[lacking] = parts * whole[lacking], (1 - parts) * whole[lacking]
    stage_of = np.searchsorted(split, np.arange(len(shares)), side="right") - 1
    return stages[:, :, stage_of] * shares, measured


def differs(one: Measured, other: Measured) -> str | None:
    """Why the computations of two runs cannot be compared, in words; None where they can."""
    if one.names != other.names:
        return f"its model has other layers ({len(other.names)} instead of {len(one.names)})"
    for key in _SAME:
        mine, theirs = (_costly(run.config.get(key)) for run in (one, other))
        if mine != theirs:
            changed = [k for k in mine if mine[k] != theirs.get(k)] if isinstance(mine, dict) else []
            return f"its {key}{'.' + str(changed[0]) if changed else ''} is different"
    if one.raw["threads"] != other.raw["threads"]:
        return f"its workers have other threads ({other.raw['threads']} instead of {one.raw['threads']})"
    return None


def _costly(section: Any) -> Any:
    """A section of the configuration without what changes no computation."""
    return {k: v for k, v in section.items() if k not in _NOT_COSTS} if isinstance(section, Mapping) else section


def siblings(base: Measured) -> list[Measured]:
    """The other jobs of the sweep that a run belongs to, those that measured the same computations."""
    own = base.folder.resolve()
    sweep = next((folder for folder in own.parents[:_DEEPEST] if is_sweep(folder)), None)
    found = []
    for folder in job_folders(sweep) if sweep else []:
        try:
            run = read(folder)
        except ValueError:
            continue
        if folder != own and differs(base, run) is None:
            found.append(run)
    return found


def _no_run(folder: Path) -> str:
    jobs = sorted(path.parent.name for path in folder.glob("*/summary.json")) if folder.is_dir() else []
    if jobs:
        return f"{folder} is the folder of several runs: give one of them, such as {folder / jobs[0]}"
    what = "has no readable summary.json" if folder.is_dir() else "does not exist"
    return f"{folder} is no run folder: it {what}; a run names its folder at its end"


def _first_line(summary: Mapping[str, Any]) -> str:
    return str(summary.get("error") or "no message").strip().splitlines()[0]
