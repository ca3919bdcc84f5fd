"""What every test gets: one torch thread, repeatable examples in CI, and no child process left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# Who starts the tests in the background may have them ignore these (nohup, a shell's &); here they are sent and heard.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

torch.set_num_threads(1)  # bitwise comparisons need one order of additions, and the suite shares two cores

settings.register_profile("default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

LEAVE_SECONDS = 5.0


LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow, too")
    parser.addoption("--every-case", action="store_true", help="run all cases of all tests: --all leaves out some")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, unless it is asked for: by --all, --every-case, or by name (file.py::test)."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.getoption("--every-case") or any("::" in argument for argument in config.args):
        return
    slow = left_out(items, "most" if config.getoption("--all") else "keep")
    items[:] = [item for item in items if item not in slow]
    config.stash[LEFT_OUT] = len(slow)
    config.hook.pytest_deselected(items=list(slow))


def left_out(items: list[pytest.Item], limit: str) -> set[pytest.Item]:
    """Cases of tests marked `slow` beyond what the mark keeps, which is spread evenly over a test's cases.

    `limit`: "keep", cases of the quick set, none unless the mark says so; "most", of all tests, all unless it does.
    """
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("slow")) is not None:
            number = mark.kwargs.get(limit, 0 if limit == "keep" else len(items))
            cases.setdefault((item.nodeid.partition("[")[0], number), []).append(item)
    found: set[pytest.Item] = set()
    for (_, number), every in cases.items():
        number = min(number, len(every))
        kept = {i * len(every) // number for i in range(number)}
        found |= {item for i, item in enumerate(every) if i not in kept}
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With pytest-xdist a worker process selects the tests; it tells the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if number := config.stash.get(LEFT_OUT, 0):
        more = "--every-case" if config.getoption("--all") else "--all"
        terminalreporter.write_line(f"{number} slow tests left out: scripts/test {more} runs them too")


def children() -> dict[int, str]:
    """Process id -> command line of every child of this process, zombies left out. Empty where there is no /proc."""
    found = {}
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            listed = task.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has just ended
        for pid in listed:
            try:
                state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            # multiprocessing's tracker of semaphores is meant to outlive its users.
            if state != "Z" and "resource_tracker" not in command:
                found[int(pid)] = command.strip()
    return found


@pytest.fixture(autouse=True)
def no_children_left() -> Iterator[None]:
    """Fail a test that leaves a child process behind; a short while is given to those that are just ending."""
    before = children().keys()
    yield
    deadline = time.monotonic() + LEAVE_SECONDS
    while left := {pid: command for pid, command in children().items() if pid not in before}:
        if time.monotonic() > deadline:
            pytest.fail(f"child processes left behind: {left}")
        time.sleep(0.02)
