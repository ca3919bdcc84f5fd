"""What a signature says of a value, in a user's words; and that it is asked only once something has failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.annotations import fits, misfit, plain, words
from engine.targets import blaming, build

KINDS = {  # annotation -> words, what fits, what does not
    int: ("a whole number", [3, -1], [True, 2.5, "3", None, [3]]),
    float: ("a number", [3, 2.5], [False, "x", None]),
    str: ("a word", ["x"], [3, None, ["x"]]),
    bool: ("true or false", [True], [1, "true"]),
    None: ("null", [None], [0, ""]),
    int | None: ("a whole number or null", [None, 3], ["x"]),
    Optional[float]: ("a number or null", [None, 3], ["x"]),  # noqa: UP045
    float | Tensor: ("a number", [0.1], ["x", None]),
    float | Sequence[float]: ("a number or a list of numbers", [1, [1, 2.5]], ["x", ["x"]]),
    list[str]: ("a list of words", [[], ["a"]], ["a", [1]]),
    tuple[float | Tensor, float | Tensor]: ("a list of numbers", [[0.9, 1]], [3, ["x"]]),
    tuple[int, str]: ("a list", [[1, "a"]], [[2.5], "a"]),
    tuple[int, ...]: ("a list of whole numbers", [[1, 2]], [["a"]]),
    list: ("a list", [[1, "a"]], [1]),
    Literal["up", "down"]: ("one of up, down", ["up"], ["left", 3]),
    Any: ("", [1, "x", None], []),
    Callable[[int], int]: ("", [], []),
    Path: ("", [], []),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kinds_in_words(kind: Any) -> None:
    said, right, wrong = KINDS[kind]
    assert words(kind) == said
    assert [value for value in right if not fits(value, kind)] == []
    assert [value for value in wrong if fits(value, kind)] == []


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(PLAIN, st.sampled_from([kind for kind in KINDS if kind is not None]))
def test_what_fits_a_kind_fits_it_beside_null(value: Any, kind: Any) -> None:
    assert fits(value, Optional[kind]) == (fits(value, kind) or value is None)  # noqa: UP045
    assert isinstance(plain(value), str)


def annotated(
    size: int, depth: int = 4, scale: float | None = None, names: Sequence[str] = ("a",), free: Any = 1
) -> int:
    return size * depth


def bare(size, rate=0.1, count=2, flag=False, deep=None):  # type: ignore[no-untyped-def]
    return size


@pytest.mark.parametrize(
    ("target", "values", "found"),
    [
        (annotated, {"size": 3, "scale": None, "names": ["b"], "free": "x"}, None),
        (annotated, {"size": "x"}, ("size", "a whole number")),
        (annotated, {"size": 3, "depth": 2.5}, ("depth", "a whole number (by default 4)")),
        (annotated, {"size": 3, "scale": "x"}, ("scale", "a number or null")),
        (annotated, {"size": 3, "names": "x"}, ("names", "a list of words (by default [a])")),
        (annotated, {"size": {"_target_": "builtins.int"}, "names": [{"_target_": "x.y"}]}, None),
        (bare, {"size": "x", "rate": 3, "count": 2.5, "deep": "x"}, None),
        (bare, {"rate": "x"}, ("rate", "a number (by default 0.1)")),
        (bare, {"flag": 3}, ("flag", "true or false (by default false)")),
        (dict, {"sep": 3}, None),
        (3, {"sep": 3}, None),
    ],
)
def test_the_first_value_that_does_not_fit(target: Any, values: dict[str, Any], found: Any) -> None:
    assert misfit(target, values) == found


def late(size: int = 1, label: int = None) -> Callable[[], int]:  # type: ignore[assignment]  # noqa: RUF013
    """Fails long after it was called."""
    return lambda: size + 1


def strict(size: int = 1, depth: int = 2) -> int:
    raise ValueError(f"model.size={size} is not a power of two")


HERE = f"{__name__}."


def test_a_value_of_another_kind_that_works_is_let_pass() -> None:
    assert build({"_target_": HERE + "annotated", "size": 2.5, "depth": 2}, where="model") == 5


def test_what_fails_later_is_blamed_on_the_value_too() -> None:
    config = {"_target_": HERE + "late", "size": "x", "label": None}
    begins = r"^model\.size=x must be a whole number \(by default 1\) for .*late: nothing can"
    for section, said in ((config, begins), (config | {"size": 3}, r"^nothing can"), ({}, r"^nothing can")):
        with pytest.raises(ValueError, match=said), blaming(section, "model"):
            raise ValueError("nothing can be added")


def test_words_of_the_function_itself_are_enough() -> None:
    with pytest.raises(ValueError, match=r"^model\.size=x is not a power of two"):
        build({"_target_": HERE + "strict", "size": "x"}, where="model")
    with pytest.raises(ValueError, match=r"^model\.depth=x must be a whole number .*: model\.size=1 is not a power"):
        build({"_target_": HERE + "strict", "depth": "x"}, where="model")
