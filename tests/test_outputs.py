"""README and docs print what their commands print: to the letter, or within a tolerance where it is measured."""

from __future__ import annotations

import re

import pytest
from command import ROOT
from scripted import script

shown = script("outputs")
ALL = [(page, output) for page in shown.pages() for output in shown.outputs(page)]
PLANS = [
    pytest.param(
        output, id=f"{page.name}-{index}", marks=() if page.name == "README.md" and exact else pytest.mark.slow
    )
    for index, (page, output) in enumerate(ALL)
    for exact in [output.within is None and "mode=plan" in output.command]
]


def test_every_block_of_output_was_found() -> None:
    """A comment that is not read would let its block grow old."""
    for page in shown.pages():
        assert page.read_text().count("<!-- output") == len(shown.outputs(page)), page.name
    assert {page.name for page, _ in ALL} >= {"README.md", "getting-started.md", "idea.md"}


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("output", PLANS)
def test_the_page_shows_what_its_command_prints(output: object) -> None:
    now = shown.run(output)
    assert shown.difference(output, now) is None
    for accuracy in re.findall(r"accuracy (\d+\.\d) %", now):
        assert float(accuracy) > 90, now  # the default job learns


@pytest.mark.parametrize(
    ("within", "now", "same"),
    [
        (None, "a  1.0\n", True),
        (None, "a 1.0\n", False),
        (10, "a 1.0\n", True),
        (10, "a 1.9\n", True),
        (10, "a 2.1\n", False),
        (10, "b 1.0\n", False),
        (10, "a -\n", False),
        (10, "a 1.0 0%\n", False),
        (10, "a  1.0\nb\n", False),
    ],
)
def test_exact_blocks_are_compared_to_the_letter_and_measured_ones_within_a_tolerance(
    within: float | None, now: str, same: bool
) -> None:
    output = shown.Output(ROOT / "README.md", "true", None, within, "a  1.0\n")
    assert (shown.difference(output, now) is None) == same


def test_lines_are_chosen_and_failures_told() -> None:
    output = shown.Output(ROOT / "README.md", "printf '1\\n2 \\n3\\n'", (2, 3), None, "")
    assert shown.run(output) == "2\n3\n"
    with pytest.raises(RuntimeError, match="exit code 3: no"):
        shown.run(output._replace(command="echo no >&2; exit 3"))
