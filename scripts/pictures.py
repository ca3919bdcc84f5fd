"""The pictures of the docs, from runs that are trained for them: TensorBoard's tab, two runs in it, a sweep's page."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from browser import Page, chromium
from tensorboards import awaited, tensorboard

ROOT = Path(__file__).parents[1]
SLEEP = ("model=sleep", "data=synthetic", "pipeline.ranks=4", "eval.every=0")
STEPS = 16
SCHEDULES = ("1f1b", "gpipe", "zb_h1")
# A third stage that takes longer, and a micro-batch that takes longer on the second.
TAB = ("pipeline.microbatches=8", f"train.steps={STEPS}", "model.forward_ms=[12,12,16,12]", "delay.ranks=[[1,10,4]]",
       "model.input_backward_ms=12", "model.weight_backward_ms=8")  # fmt: skip
SWEEP = ("-m", "schedule=gpipe,1f1b,zb_h1,zb_v", "pipeline.microbatches=4,8,16", "train.steps=12",
         "train.global_batch_size=32")  # fmt: skip


def train(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "engine", *SLEEP, *arguments], check=True, cwd=ROOT)


def tab(page: Page, address: str, folder: Path) -> None:
    """One step of a run: an action's times, the cause of a bubble, the critical path."""
    page.open(f"{address}/data/plugin_entry.html?name=pipeline", 1320, 830, scale=1.5)
    shown(page, "1f1b")
    page.value("pipeline.toggle('critical')")
    for label, after in (("0F3", "true"), ("2F1", "false")):
        page.until("!pipeline.frame")
        place = page.value(f"pipeline.panels[0].where('{label}', {after})")
        (page.click if after == "true" else page.point)(place["x"], place["y"])
    page.until("!document.querySelector('.tip').hidden && !pipeline.frame")
    (folder / "tab.png").write_bytes(page.picture())


def compared(page: Page, address: str, folder: Path) -> None:
    """Two runs side by side, in the dark theme, while they are played."""
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.open(f"{address}/data/plugin_entry.html?name=pipeline", 1320, 1180, scale=1.5)
    shown(page, "gpipe")
    page.value("pipeline.compare()")
    page.until("pipeline.panels[1]?.step")
    page.value("pipeline.panels[1].choose('zb_h1')")
    page.until("pipeline.panels[1].step.schedule === 'zb_h1' && !pipeline.frame")
    page.value("pipeline.play()")
    page.until("pipeline.moment > 0.6 * pipeline.sight.from + 0.4 * pipeline.sight.to")
    (folder / "tab-compare.png").write_bytes(page.picture())
    page.call("Emulation.setEmulatedMedia", features=[])


def shown(page: Page, run: str) -> None:
    page.until("pipeline.panels[0]?.step && !pipeline.frame")
    page.value(f"pipeline.panels[0].choose('{run}')")
    page.until(f"pipeline.panels[0].step.schedule === '{run}' && !pipeline.frame")


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        runs, aside, profile = (Path(name) / part for part in ("runs", "aside", "browser/profile"))
        aside.mkdir()
        profile.mkdir(parents=True)
        for schedule in SCHEDULES:
            train(f"schedule={schedule}", *TAB, f"hydra.run.dir={runs / schedule}")
        sweep = Path(name) / "schedules"
        train(*SWEEP, f"hydra.sweep.dir={sweep}")
        with tensorboard(runs, aside) as address, chromium(profile) as page:
            awaited(address, {schedule: list(range(STEPS)) for schedule in SCHEDULES})
            tab(page, address, folder)
            compared(page, address, folder)
            page.open(f"file://{sweep / 'comparison.html'}", 1180, 1490)
            page.until("document.querySelectorAll('[data-drawn]').length > 1")  # those that are in sight
            (folder / "sweep.png").write_bytes(page.picture())
            assert not page.errors, page.errors


if __name__ == "__main__":
    main(Path(sys.argv[1]))
