"""The options that every benchmark of runs takes."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """For `scripts/bench NAME`: described by its module's text, with --repeats and --json."""
    found = argparse.ArgumentParser(prog=f"scripts/bench {name}".strip(), description=(doc or "").partition("\n\n")[2])
    found.add_argument("--repeats", type=_at_least_one, default=3, help="runs of each side (default 3)")
    found.add_argument("--json", type=Path, help="also write everything that was measured to this file")
    return found


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number, at least 1")
    return int(text)
