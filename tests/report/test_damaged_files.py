"""Damaged files of finished runs: for each a report, or one line that names the file; never a traceback."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from finished import finished, job_of
from test_tab import Provider, asked

from engine.categories import NAMES
from engine.plan.views.text import from_csv, parse_action
from engine.predict.measured import read
from engine.report.__main__ import main
from engine.report.compare import write_comparison
from engine.report.perfetto import trace_of
from engine.report.tensorboard.series import packed, unpacked
from engine.tab.document import measured

TRIALS, QUICK = 2000, 200
FILES = ("costs.json", "summary.json", "config.json", "report.txt")
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**18, 10**400, 1e308, -1e308, 0.5, 1e-300,
    float("nan"), float("inf"), "", "x", "1f1b", "\ud800", [], [[]], [1], {}, {"a": 1}, [[1.0], [2.0]],
]  # fmt: skip

Damage = Callable[[random.Random, bytes], bytes]


# ---- ways to damage a file -------------------------------------------------------------------------------------------


def bits(rng: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def foreign(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + rng.randbytes(rng.randint(1, 64)) + content[at + rng.randint(0, 64) :]


def nested(rng: random.Random, content: bytes) -> bytes:
    deep = rng.choice([50, 300, 900, 5_000, 100_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    value = opening * deep + b"1" + closing * deep
    text = content.decode()
    found = json.loads(text)
    key = rng.choice(sorted(found))
    return json.dumps(found | {key: "@@"}).encode().replace(b'"@@"', value)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of parsed JSON."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += [(value, key), *places(item)]
    return found


def edited(edit: Callable[[random.Random, Any, Any], None]) -> Damage:
    def damage(rng: random.Random, content: bytes) -> bytes:
        found = json.loads(content)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            top = [(found, key) for key in found]
            container, key = rng.choice(rng.choice([top, places(found)]))
            if (key in container) if isinstance(container, dict) else key < len(container):
                edit(rng, container, key)
        return json.dumps(found).encode()

    return damage


def delete(rng: random.Random, container: Any, key: Any) -> None:
    del container[key]


def retype(rng: random.Random, container: Any, key: Any) -> None:
    container[key] = rng.choice(STRANGE)


def change(rng: random.Random, container: Any, key: Any) -> None:
    """Another number, or a longer list."""
    if isinstance(value := container[key], bool | str | None | dict):
        container[key] = rng.choice(STRANGE)
    elif isinstance(value, list):
        container[key] = value * rng.choice([0, 2, 3]) if rng.random() < 0.7 else value[:-1]
    else:
        container[key] = type(value)(value * rng.choice([-1, 0, 2, 1000, 10**9])) + rng.choice([0, 1])


def repeat(rng: random.Random, content: bytes) -> bytes:
    """A key of the file twice, with another value."""
    found = json.loads(content)
    key = rng.choice(sorted(found))
    return content.rstrip()[:-1] + f", {json.dumps(key)}: {json.dumps(rng.choice(STRANGE))}}}".encode()


TEXT: dict[str, Damage] = {"bits": bits, "cut": cut, "foreign": foreign}
JSON: dict[str, Damage] = {
    "nested": nested, "delete": edited(delete), "retype": edited(retype), "change": edited(change), "repeat": repeat,
}  # fmt: skip


# ---- what has to come of it ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "multirun.yaml").write_text("")
    for number, microbatches in enumerate((2, 4)):
        finished(folder / str(number), job_of("gpipe", 2, microbatches, layers=2), transfer=1000)
    (folder / "2").mkdir()
    return folder


def report(*arguments: str) -> tuple[int, str, str]:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def check(rng: random.Random, folder: Path) -> str:
    """Damage one file of a run, ask for its report, and for the sweep's comparison; the file's way to be damaged."""
    run = folder / str(rng.randrange(2))
    events = [path.name for path in run.glob("events*")]
    path = run / rng.choice([*FILES[:3], *FILES[:2], *FILES[:2], *events])
    kinds = TEXT | (JSON if path.suffix == ".json" else {})
    name = rng.choice(sorted(kinds))
    whole = path.read_bytes()
    try:
        path.write_bytes(kinds[name](rng, whole))
        code, out, err = report(str(run), "--schedule", "1f1b", "--schedule", "gpipe")
        if code:
            assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
            assert len(err) < 1500, err
        else:
            assert out.startswith(f"{run}: ") and "nan" not in out, out
        if rng.random() < 0.2:
            text = write_comparison(folder)
            assert text.count("\n") > 2 and "job 2: left no summary.json" in text
    finally:
        path.write_bytes(whole)
    return name


def many(sweep: Path, trials: int, seed: int) -> None:
    seen = set()
    for number in range(seed, seed + trials):
        try:
            seen.add(check(random.Random(number), sweep))
        except Exception as error:
            raise AssertionError(f"damage number {number}") from error
    assert seen == {*TEXT, *JSON}


def test_a_damaged_run_gives_a_report_or_a_line(sweep: Path) -> None:
    many(sweep, QUICK, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_damaged_runs_give_a_report_or_a_line(sweep: Path) -> None:
    many(sweep, TRIALS, QUICK)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("costs.json", {"ranks": "2"}, "costs.json is damaged: ranks: Input should be a valid integer"),
        ("costs.json", {"ranks": 10**9}, "loaded is not 1000000000 x 2"),
        ("costs.json", {"microbatches": 10**9}, "its samples and micro-batches do not belong together"),
        ("costs.json", {"split": [0, 9]}, "split does not cut 4 layers"),
        ("costs.json", {"schedule": "gpip"}, "no synchronous schedule is called 'gpip'"),
        ("costs.json", {"overhead": float("nan")}, "overhead: Input should be a finite number"),
        ("costs.json", {"reduce": [0.0] * 3}, "reduce is not 2"),
        ("summary.json", {"step_time": {"median": -1.0}}, "summary.json is damaged: step_time.median: Input should be"),
        ("summary.json", {"memory": 5}, "summary.json is damaged: memory: "),
        ("config.json", {"model": None}, "config.json is damaged: model: "),
    ],
)
def test_what_is_damaged_is_named(file: str, change: dict[str, Any], said: str, sweep: Path, tmp_path: Path) -> None:
    run = shutil.copytree(sweep / "0", tmp_path / "run")
    content = json.loads((run / file).read_text())
    (run / file).write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=r"run it again$") as refused:
        read(run)
    assert said in str(refused.value) and "\n" not in str(refused.value), refused.value


def test_one_damaged_job_is_a_failed_row_of_its_sweep(sweep: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sweep, tmp_path / "sweep")
    summary = folder / "1" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"step_time": [1], "job": 7, "plan": 3}))
    text = write_comparison(folder)
    assert "job 1: summary.json is damaged: step_time: Input should be a valid dictionary" in text
    assert [row["job"] for row in json.loads((folder / "comparison.json").read_text())] == ["0", "1", "2"]
    for deep in (100, 900, 100_000):
        summary.write_text('{"status": "completed", "more": ' + "[" * deep + "]" * deep + "}")
        assert "job 1: left no readable summary.json" in write_comparison(folder)


def test_damaged_documents_of_steps_are_refused() -> None:
    """What the tab makes of a series that was damaged in the event file: a trace, or a ValueError."""
    whole = json.dumps(
        {
            "ranks": 1, "windows": [[0, 100]], "uncertainty": [0], "pairs": [],
            "spans": {"rank": [0, 0], "kind": [0, 23], "stage": [0, 0], "microbatch": [0, 0],
                      "start": [0, 20], "length": [10, 10]},
        }
    ).encode()  # fmt: skip
    trace_of(*measured(whole.decode()))
    read_ = refused = 0
    for number in range(500):
        rng = random.Random(number)
        kinds = TEXT | JSON
        damaged = kinds[rng.choice(sorted(kinds))](rng, whole)
        content = packed(damaged.decode(errors="replace"))
        content = TEXT[rng.choice(sorted(TEXT))](rng, content) if rng.random() < 0.3 else content
        try:
            trace_of(*measured(unpacked(content)))
            read_ += 1
        except ValueError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"damage number {number}: {damaged[:200]!r}") from error
    assert read_ and refused


# ---- programs in files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n" + "0" * 200_000, r"row 1 is none of a program's, .*field larger than field limit"),
        ("0" * 100_000 + "F0", r"row 0, cell 0: .*is out of range: it has 100002 characters"),
        ("0F" + "9" * 5_000, "out of range"),
        ("x" * 100_000, "is not an action"),
    ],
)
def test_cells_without_end_are_refused_in_our_words(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        from_csv(text)
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


def test_a_short_action_is_shown_whole() -> None:
    with pytest.raises(ValueError, match=r"^'2F0&1B3' is not an action"):
        parse_action("2F0&1B3")


# ---- the tab ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["9" * 5_000, "1" * 19, "-1", "1.5", "", "٣"])
@pytest.mark.parametrize("route", ["/step", "/trace"])
def test_a_step_that_is_no_number_is_a_bad_request(route: str, step: str) -> None:
    status, content = asked(Provider(packed("{}")), route, f"run=run&step={quote(step)}")
    assert status.startswith("400") and b"is not the number of a step" in content and len(content) < 200


@pytest.mark.parametrize("seconds", [b"NaN", b"1e999", b"9" * 400, b"[" * 100_000, b'"1"'])
def test_a_list_of_steps_is_json_whatever_a_series_says(seconds: bytes) -> None:
    shares = json.dumps(dict.fromkeys(NAMES, 0.1)).encode()
    status, content = asked(Provider(b"", b'{"seconds": ' + seconds + b', "shares": ' + shares + b"}"), "/runs")
    assert status.startswith("200")
    assert json.loads(content)["runs"][0]["steps"] == [{"step": 0, "seconds": 0.0, "shares": {}}]
