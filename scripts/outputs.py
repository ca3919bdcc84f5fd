"""Outputs printed in README.md and docs/: made by the commands above them, and compared with what these print today.

    <!-- output: python -m engine mode=plan schedule=1f1b -->
    <!-- output lines=3-9 within=30: python -m engine model=sleep data=synthetic -->

Such a comment stands before a block fenced by ```text. Its command runs in an empty folder, by bash, with this
environment's Python first on the PATH; `$CHECKOUT` is the checkout. The block holds the lines that it prints to stdout,
or those that `lines` keeps, counted from 1. Without `within` they are the same at every run. With it figures are
measured: they may differ by so many percent, or by `within` / 10 in the figure's own unit, and blanks do not count.
With `within=inf` the words of each line are compared, and no figure. Lines of a progress bar are left out.

    scripts/outputs                       every block of every page
    scripts/outputs docs/idea.md          one page
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"<!-- output(?P<options>(?: \w+=\S+)*): (?P<command>[^\n]+) -->\n```text\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
FIGURE = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
PROGRESS = re.compile(r" *\d+%\|")  # a progress bar's line, of which there are as many as a run is slow
LIMIT_S = 300


class Output(NamedTuple):
    """A block of a page: its command, how its lines are chosen and compared, and its text."""

    page: Path
    command: str
    lines: tuple[int, int] | None
    within: float | None
    text: str


def pages() -> list[Path]:
    """README.md and the pages in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def outputs(page: Path) -> list[Output]:
    """The blocks of one page, in order."""
    return [_output(page, found) for found in BLOCK.finditer(page.read_text())]


def _output(page: Path, found: re.Match[str]) -> Output:
    options = dict(word.split("=", 1) for word in found["options"].split())
    first, _, last = options.pop("lines", "").partition("-")
    within = options.pop("within", None)
    if options:
        raise ValueError(f"{page.name}: no such option: {', '.join(options)}; there is: lines, within")
    lines = (int(first), int(last or first)) if first else None
    return Output(page, found["command"], lines, None if within is None else float(within), found["text"])


def run(output: Output) -> str:
    """Run the command in an empty folder; returns the lines that the block is to hold. RuntimeError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        # Two threads per process would compete on a small machine; and nobody's terminal decides on the width.
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "CHECKOUT": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", output.command], cwd=folder, env=environment, capture_output=True, text=True,
            check=False, timeout=LIMIT_S,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{output.page.name}: {output.command}: exit code {done.returncode}: {done.stderr[-2000:]}")
    printed = [line.rpartition("\r")[2] for line in done.stdout.strip("\n").split("\n")]
    printed = [line for line in printed if not PROGRESS.match(line)]
    if output.lines:
        printed = printed[output.lines[0] - 1 : output.lines[1]]
    return "".join(f"{line.rstrip()}\n" for line in printed)


def difference(output: Output, now: str) -> str | None:
    """Say where a block differs from what its command prints now; None where it does not."""
    if output.within is None:
        return None if output.text == now else f"{output.command} prints\n{now}and the page has\n{output.text}"
    written, printed = output.text.splitlines(), now.splitlines()
    if len(written) != len(printed):
        return f"{output.command} prints {len(printed)} lines, the page has {len(written)}:\n{now}"
    for line, other in zip(map(_cells, written), map(_cells, printed), strict=True):
        if _shape(line) != _shape(other):
            return f"{output.command} prints\n  {other}\nwhere the page has\n  {line}"
        for figure, measured in zip(_figures(line), _figures(other), strict=True):
            if abs(figure - measured) > max(output.within / 100 * abs(figure), output.within / 10):
                return f"{output.command} measures {measured:g} where the page has {figure:g}:\n  {other}\n  {line}"
    return None


def _cells(line: str) -> str:
    """A cell of a table that is empty in one run holds next to nothing in another."""
    return re.sub(r"(?<!\S)-(?!\S)", "0.0 0%", line)


def _shape(line: str) -> str:
    return " ".join(FIGURE.sub("#", line).split())


def _figures(line: str) -> list[float]:
    return [float(figure.replace(",", "")) for figure in FIGURE.findall(line)]


def renew(page: Path) -> None:
    """Write what the commands of a page print now into its blocks."""
    text = page.read_text()
    for output in outputs(page):
        print(f"{page.relative_to(ROOT)}: {output.command}", flush=True)
        text = text.replace(
            f" {output.command} -->\n```text\n{output.text}```", f" {output.command} -->\n```text\n{run(output)}```"
        )
    page.write_text(text)


if __name__ == "__main__":
    for each in [Path(name).resolve() for name in sys.argv[1:]] or pages():
        renew(each)
