"""Going on from a checkpoint: which one, whether it fits, and what is different now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.checkpoint import store
from engine.checkpoint.manifest import Loader, Manifest
from engine.checkpoint.names import AUTO, FOLDER
from engine.checkpoint.store import Checkpoint
from engine.settings import Settings

# What a run may be told anew without being another run: not worth a line.
_ITS_OWN = ("resume", "checkpoint", "timeout_s")


def find(settings: Settings, run_dir: Path, start_dir: str, passed_over: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest whole checkpoint of the run that `resume` names; None where it is auto and there is none.

    `passed_over` is told why newer ones are not taken. ValueError where there has to be one.
    """
    if settings.resume is None:
        return None
    auto = settings.resume == AUTO
    root = (run_dir if auto else Path(start_dir, settings.resume)) / FOLDER
    found = store.newest(root, passed_over)
    if found is None and (not auto or store.steps_of(root)):
        there = store.steps_of(root)
        why = (
            "none of its checkpoints is whole" if there else "it has no checkpoints (checkpoint.every_steps makes them)"
        )
        raise ValueError(f"resume={settings.resume}: {why}; start anew in another folder, or with init.weights")
    return found


def check(manifest: Manifest, settings: Settings, steps: int, samples: int, parameters: Mapping[str, Any]) -> None:
    """Raise ValueError where a run cannot go on from a checkpoint as the same training.

    `steps` and `samples` are those of the run, `parameters`: name -> shape of the model's.
    """
    drop, data = bool(settings.data.get("drop_last", False)), settings.data
    own = Loader(
        seed=settings.seed,
        samples=samples,
        global_batch_size=settings.train.global_batch_size,
        shuffle=bool(data.get("shuffle", True)),
        drop_last=drop,
    )
    keys = {"seed": "seed", "samples": "the samples of data", "global_batch_size": "train.global_batch_size",
            "shuffle": "data.shuffle", "drop_last": "data.drop_last"}  # fmt: skip
    for name, key in keys.items():
        then, now = getattr(manifest.loader, name), getattr(own, name)
        if then != now:
            raise ValueError(
                f"resume: {key} was {then} and is {now} now, so the samples to come would be others: leave it as it "
                "was, or start from the weights alone with init.weights"
            )
    for group in ("optimizer", "lr_scheduler"):
        then, now = (_target(each.get(group)) for each in (manifest.config, asdict(settings)))
        if then != now:
            raise ValueError(
                f"resume: {group}._target_ was {then} and is {now} now, which cannot take over what was stored: leave "
                "it as it was, or start from the weights alone with init.weights"
            )
    if manifest.step > steps:
        raise ValueError(
            f"resume: {manifest.step} steps are done, and the run has {steps}: raise train.steps or epochs"
        )
    stored = {entry.name: entry.shape for entry in manifest.tensors if entry.kind == "parameter"}
    wrong = [name for name, shape in parameters.items() if stored.get(name) != tuple(shape)]
    if wrong:
        raise ValueError(
            f"resume: the checkpoint is of another model: {', '.join(wrong[:5])} "
            f"{'is' if len(wrong) == 1 else 'are'} not in it, or of another shape"
        )


def differences(manifest: Manifest, settings: Settings) -> list[str]:
    """Lines `key: then -> now` for every key whose value is not the stored one."""
    then, now = dict(_flat(manifest.config)), dict(_flat(asdict(settings)))
    return [
        f"{key}: {_shown(then, key)} -> {_shown(now, key)}"
        for key in dict.fromkeys([*now, *then])
        if then.get(key) != now.get(key) and key.split(".")[0] not in _ITS_OWN
    ]


def _target(section: Any) -> Any:
    return section.get("_target_") if isinstance(section, Mapping) else None


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{at}.{key}" if at else str(key))
    else:
        yield at, list(value) if isinstance(value, tuple) else value


def _shown(values: Mapping[str, Any], key: str) -> str:
    return str(values[key]) if key in values else "(not there)"
