"""The pictures of a run say of what they are: one step, beside figures of the whole run."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from finished import finished


def test_the_timeline_is_of_one_step_and_its_figure_of_the_run(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    bubble = json.loads((folder / "summary.json").read_text())["bubble"]["measured"]
    texts = ElementTree.parse(folder / "timeline.svg").iter("{http://www.w3.org/2000/svg}text")
    said = ["".join(text.itertext()).strip() for text in texts]
    assert f"measured: last traced step (bubble of the run {100 * bubble:.1f} %)" in said
    assert not any(text.startswith("measured: bubble") for text in said)
