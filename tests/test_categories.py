"""The table of categories: it is sound, and a row more is all that a further category takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recorded import MS

from engine.account.path import CAUSES
from engine.account.replay.waterfall import BARS
from engine.categories import CATEGORIES, NAMES, WATERFALL, claims
from engine.plan.timeline import COMPUTE_KINDS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "engine" / "tab" / "page"


def test_the_nine_names_and_who_claims_what() -> None:
    assert NAMES == ("compute", "fill", "stall", "transfer", "reduce", "optimizer", "data", "drain", "other")
    assert [c.name for c in sorted(CATEGORIES, key=lambda c: c.precedence)] == [
        "compute", "optimizer", "data", "reduce", "fill", "drain", "stall", "transfer", "other",
    ]  # fmt: skip
    by_kind = {kind.name: category.name for kind, category in claims().items()}
    assert by_kind == dict.fromkeys((kind.name for kind in COMPUTE_KINDS), "compute") | {
        "STEP": "optimizer", "WAIT_DATA": "data", "WAIT_NORM": "drain",
        "WAIT_REDUCE": "reduce", "WAIT_GATHER": "reduce", "WAIT_COUNT": "reduce",
    }  # fmt: skip
    assert [c.name for c in CATEGORIES if not c.bubble] == ["compute"]
    assert CAUSES == ("compute", "transfer", "reduce", "optimizer", "data", "other")


def test_rows_are_whole() -> None:
    for table in (CATEGORIES, WATERFALL):
        assert len({row.name for row in table}) == len(table) == len({row.colour for row in table})
        assert all(re.fullmatch("#[0-9a-f]{6}", row.colour) and row.what for row in table)
    assert len({c.precedence for c in CATEGORIES}) == len(CATEGORIES)
    assert all(bool(c.remedy) == c.bubble for c in CATEGORIES)
    by_name = {c.name: c for c in CATEGORIES}
    assert all(bar.colour == by_name[bar.category].colour for bar in WATERFALL if bar.category)
    assert BARS[0] == "work" and {bar.category for bar in WATERFALL} <= {None, *NAMES}


def test_scripts_of_the_page_list_no_category_and_no_bar() -> None:
    listed = {"fill", "stall", "transfer", "optimizer", "drain", "imbalance", "variation", "rest"}
    for path in PAGE.glob("*.js"):
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)
        words = set(re.findall(r"""["'`](\w+)["'`]""", code)) | set(re.findall(r"^\s*(\w+):", code, re.MULTILINE))
        assert not words & listed, path.name


TENTH = """
    Category("agree", "agreeing on counts", "count with train.accumulate", "#112233", 35, (Kind.WAIT_COUNT,)),
"""
TRIAL = """
import json, sys, types
from dataclasses import replace
from pathlib import Path
table = types.ModuleType("engine.categories")
sys.modules["engine.categories"] = table
source = Path("engine/categories.py").read_text()
row, last = sys.argv[1], '    Category(\\n        "other",'
assert last in source
exec(compile(source.replace(last, row + last), "categories.py", "exec"), table.__dict__)

import numpy as np
import recorded
from recorded import MS, costs, measured
from engine.account.bubble import account
from engine.account.cause import diagnose
from engine.account.measure import Measure
from engine.account.path import CAUSES
from engine.account.steps import document
from engine.plan.timeline import Kind, Span, Timeline
from engine.report.pictures.palette import for_page
from engine.report.tensorboard import curves
from engine.report.text import rank_rows

of = recorded.job("gpipe", 1, 4)
base = measured(of.compute, costs(of.compute))
end = int(base.windows.max())
spans = [*base, Span(0, Kind.WAIT_COUNT, 0, -1, end, end + 24 * MS)]
step = Timeline.of(spans, [[0, end + 24 * MS]], measured=True)
found = account(step, 1, 1)
measure = Measure(of)
measure.add(step)
bubbles = replace(measure.result(), waterfall=None)
print(json.dumps({
    "account": dict(zip(table.NAMES, found.table[0].tolist())),
    "table": dict(zip(*rank_rows(of, bubbles))),
    "scalar": curves.of_account(of, found)["bubble/rank0/agree"],
    "cause": diagnose(of, bubbles),
    "path": list(CAUSES),
    "page": for_page()["categories"],
    "document": json.loads(document(of, 0, step, None, None, [0])),
    "rows": table.rows(),
}))
"""


@pytest.fixture(scope="module")
def trial() -> dict[str, Any]:
    """What an engine says of a step whose table has one row more."""
    paths = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", TRIAL, TENTH], cwd=ROOT, env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_tenth_category_is_one_row(trial: dict[str, Any]) -> None:
    """It takes over time, and is seen in the account, the text, the cause, TensorBoard, the page and documents."""
    assert trial["account"] == dict.fromkeys(NAMES, 0) | {"compute": 24 * MS, "agree": 24 * MS}
    assert trial["table"]["agree"] == "24.0  50%" and trial["scalar"] == 0.5
    assert trial["cause"] == (
        "Agreeing on counts costs 50.0 % of the step, most on rank 0 (24.0 ms); count with train.accumulate=2."
    )
    assert "agree" in trial["path"] and ["agree", "agreeing on counts", "count with train.accumulate"] in trial["rows"]
    row = {"name": "agree", "what": "agreeing on counts", "remedy": "count with train.accumulate",
           "colour": "#112233", "bubble": True, "kinds": ["WAIT_COUNT"]}  # fmt: skip
    document = trial["document"]
    assert row in trial["page"] and document["categories"] == trial["page"]
    assert document["account"] == [[trial["account"][name] for name in document["names"]["account"]]]
