"""What a resumed run takes over from the attempts before it: its first loss, and the curves up to its step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.report.tensorboard.board import EVENTS
from engine.report.tensorboard.hparams import METRICS

_ANEW = ("report", "timeline/", "_hparams_/", "custom_scalars")  # tags that are written once, by the last attempt


class Earlier(NamedTuple):
    """The state of a run at the checkpoint that it goes on from. `events`: the event file of the attempt before."""

    step: int
    samples: int
    first_loss: float | None
    events: Path | None

    @classmethod
    def of(cls, step: int, samples: int, progress: Mapping[str, Any], attempt: Path | None) -> Earlier:
        """What a checkpoint says of it; `attempt` is the folder with the files of the attempt before."""
        first = progress.get("first_loss")
        files = [] if attempt is None else sorted(attempt.glob(f"{EVENTS}*"))
        return cls(step, samples, first if isinstance(first, float) else None, files[-1] if files else None)

    def kept(self, whole: bool) -> Iterator[Any]:
        """Yield the events of the steps before this one, without what is written at a run's end.

        `whole`: no step is left to do, so what is written at its beginning is kept too.
        """
        if self.events is None:
            return
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for event in LegacyEventFileLoader(str(self.events)).Load():
            if not event.HasField("summary"):
                continue
            left = [value for value in event.summary.value if self._stays(value.tag, event.step, value, whole)]
            if left:
                del event.summary.value[:]
                event.summary.value.extend(left)
                yield event

    def _stays(self, tag: str, step: int, value: Any, whole: bool) -> bool:
        if tag.startswith(_ANEW) and not (
            whole and tag.startswith(("_hparams_/experiment", "_hparams_/session_start"))
        ):
            return False
        if tag in METRICS or (tag == "waterfall" and value.HasField("image")):
            return False
        return step <= self.step if tag.startswith("eval/") else step < self.step
