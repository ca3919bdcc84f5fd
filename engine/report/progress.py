"""The progress bar: steps, loss, samples/s; and lines printed past it."""

from __future__ import annotations

import threading
from typing import Any, TextIO

from tqdm import tqdm

from engine.account.records.gather import Step
from engine.job import Job


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    monitor_interval = 0  # no thread to watch over slow steps


_Bar.set_lock(threading.RLock())  # tqdm's own also locks between processes, which takes a semaphore of the system


class ProgressBar:
    """A bar over the steps of `job` on `console`; nothing but passed lines where `shown` is false."""

    def __init__(self, job: Job, console: TextIO, shown: bool) -> None:
        self._console, self._shown, self.total, self._start = console, shown, _steps(job), job.start
        self._bar: Any = None

    def step(self, step: Step) -> bool:
        """Move the bar by one step; returns whether it was drawn."""
        if not self._shown:
            return False
        if self._bar is None:
            self._bar = _Bar(total=self.total, initial=self._start, unit="step", file=self._console, dynamic_ncols=True)
        loss = "-" if step.loss is None else f"{step.loss:.4g}"
        postfix = {"loss": loss, "samples/s": f"{step.samples_per_second:.1f}"}
        self._bar.set_postfix(postfix, refresh=False)
        drawn = bool(self._bar.update(1))
        if self._bar.n == self._bar.total:
            self.close()  # draws it for the last time
            drawn = True
        return drawn

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(text, file=self._console, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Draw the bar a last time and let go of it; lines can still be said."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _steps(job: Job) -> int:
    train = job.settings.train
    full, rest = divmod(job.train_samples, train.global_batch_size)
    per_epoch = full + (rest > 0 and not job.settings.data.get("drop_last"))
    return train.steps if train.steps is not None else (train.epochs or 0) * per_epoch
