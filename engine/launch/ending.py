"""What the first signal means where the run makes checkpoints: save at the end of the next step, and end."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from engine.checkpoint.stopping import Stop
from engine.job import Job
from engine.telemetry.records import Record


class Ending:
    """Answers signals to the parent of a run. The second one is not waited with."""

    def __init__(self, job: Job, on_record: Callable[[Record], None]) -> None:
        self._job, self._on_record, self._asked = job, on_record, False

    def ask(self, signum: int) -> bool:
        """Whether the ranks were asked to save and end, and are waited for; else the run is to end now."""
        if self._asked or not self._job.settings.checkpoint.wanted or not Stop(self._job.run_dir).ask():
            return False
        self._asked = True
        said = f"{signal.Signals(signum).name}: saving when the next step is done, then ending; again: ends now"
        meta = {"rank": None, "level": logging.WARNING, "logger": __name__, "message": said}
        self._on_record(Record("log", meta, {}))
        return True
