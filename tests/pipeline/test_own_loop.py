"""The example of a loop of one's own: the same losses as plain, by threads and under torchrun; and its size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
LIMIT_S = 120.0  # a hang, not a promise
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize("how", [pytest.param([], id="threads"), pytest.param(TORCHRUN, id="torchrun")])
@pytest.mark.slow(keep=1)
def test_equals_the_plain_loop(how: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *how, str(EXAMPLE)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^plain (\S+)   pipeline (\S+)   difference (\S+)$", done.stdout, re.MULTILINE)
    assert len(found) == 10
    assert all(float(difference) < 1e-9 for *_, difference in found)
    assert len({plain for plain, *_ in found}) == 10


def test_is_short_and_changes_little() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 40
    assert 0 < sum("# <-" in line for line in lines) < 10
