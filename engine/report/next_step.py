"""What to try after a run: one sentence, whose words can be pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from engine.predict.measured import read
from engine.predict.scenarios import answer, nearest
from engine.predict.whatif import Prediction, Predictor
from engine.tables import percent

WORTH = 0.05  # of the step: what is predicted to save less is not named
GUESSED = ("extrapolated", "a backward is cut")  # how notes begin of what the run itself has not measured


def next_step(folder: Path) -> str | None:
    """The change that is predicted to save most of the step of the run in `folder`; None where nothing is predicted.

    Only what the run's own measurements tell is named: no sizes of micro-batches that it has not had.
    """
    try:
        predictor = Predictor(read(folder))
        found = answer(predictor, nearest(predictor))
    except (ValueError, OSError):  # too little was measured: `python -m engine.report` says what is missing
        return None
    sure = [each for each in found.found if each.scenario.overrides and not _guessed(each)]
    if sure and sure[0].step <= (1 - WORTH) * found.baseline.step:
        words = " ".join(shlex.quote(word) for word in sure[0].scenario.overrides)
        saved = percent(1 - sure[0].step / found.baseline.step)
        return f"Next, add {words} to the command: a step is predicted to take {saved} less."
    return (
        "Next, see all predictions by the first command below: no other split, 1F1B or number of micro-batches "
        f"that this run tells of is predicted to save {100 * WORTH:.0f} % of the step."
    )


def _guessed(prediction: Prediction) -> bool:
    return any(note.startswith(GUESSED) for note in prediction.notes)
