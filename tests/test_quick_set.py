"""Which tests the quick set leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import left_out

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("n", range(10))
def test_many(n):
    pass

@pytest.mark.slow(keep=1, most=4)
@pytest.mark.parametrize("n", range(8))
def test_more(n):
    pass

@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_of_them(n):
    pass
"""


@pytest.mark.slow
def test_slow_tests_are_left_out_but_for_some_cases_spread_evenly(pytester: pytest.Pytester) -> None:
    items = pytester.getitems(TESTS)
    names = {item.name for item in items}
    quick = names - {item.name for item in left_out(items, "keep")}
    assert quick == {"test_quick", "test_many[0]", "test_many[5]", "test_more[0]", "test_one_of_them[0]"}
    assert names - {item.name for item in left_out(items, "most")} == names - {f"test_more[{n}]" for n in (1, 3, 5, 7)}


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], 5),
        (["--all"], 18),
        (["--every-case"], 22),
        (["test_some.py::test_slow"], 1),
        (["-k", "many", "-n", "2"], 2),
    ],
)
@pytest.mark.slow
def test_all_or_a_name_asks_for_them(pytester: pytest.Pytester, arguments: list[str], passed: int) -> None:
    (pytester.path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (pytester.path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    gpu\n")
    (pytester.path / "test_some.py").write_text(TESTS)
    result = pytester.runpytest_subprocess("-q", *arguments)
    here = "::" not in str(arguments) and "-n" not in arguments  # where pytest itself counts what was left out
    result.assert_outcomes(passed=passed, deselected=22 - passed if here else 0)
    assert ("scripts/test --all" in result.stdout.str()) == (passed in (5, 2))
    assert ("4 slow tests left out: scripts/test --every-case" in result.stdout.str()) == (passed == 18)
