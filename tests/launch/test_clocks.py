"""Ranks on different hosts on one clock: offsets within their uncertainty, no message used before it was sent."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import recorded
from hypothesis import given
from hypothesis import strategies as st
from recorded import step_records
from torch.distributed import HashStore  # type: ignore[attr-defined]
from virtual import MS, last_step

from engine.account.messages import MESSAGE_WAITS, sends_of
from engine.account.path import by_cause, critical_path
from engine.account.records.clock_alignment import ClockAlignment, settled
from engine.plan.schedules import build
from engine.plan.timeline import Timeline
from engine.telemetry.clock import Clocks, Offset, domain
from engine.telemetry.records import Record, decode, encode

ROOT = Path(__file__).parents[2]
SHIFTS = (0, 0, 5 * 10**15, 5 * 10**15, -(7 * 10**14))  # of each rank's clock: three hosts


def compared(rounds: int = 1) -> list[list[Offset | None]]:
    """What each rank finds, by round: ranks are threads, whose clocks are shifted."""
    store = HashStore()
    found: list[list[Offset | None]] = [[] for _ in SHIFTS]

    def main(rank: int) -> None:
        def now() -> int:
            return time.monotonic_ns() - SHIFTS[rank]

        clocks = Clocks(store, rank, len(SHIFTS), f"host with {SHIFTS[rank]}", now)
        found[rank] += [clocks.compare() for _ in range(rounds)]

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(len(SHIFTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a rank waits for ever"
    return found


def test_offsets_are_found_within_their_uncertainty() -> None:
    for rank, rounds in enumerate(compared(rounds=2)):
        for offset in rounds:
            if SHIFTS[rank] == 0:
                assert offset is None
            else:
                assert offset is not None and offset.leader == SHIFTS.index(SHIFTS[rank])
                assert abs(offset.offset_ns - SHIFTS[rank]) <= offset.uncertainty_ns


def test_ranks_with_one_clock_agree_to_the_nanosecond() -> None:
    found = compared()
    assert found[2] == found[3]


def test_this_process_and_itself_have_one_clock() -> None:
    assert domain() == domain() != ""


# ---- bounds ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_corrections_keep_every_bound_that_true_clocks_keep(clocks: int, seed: int, dense: float) -> None:
    drawn = np.random.default_rng(seed)
    true = drawn.integers(-(10**9), 10**9, clocks)
    true[0] = 0
    slack = drawn.integers(0, 10**6, (clocks, clocks))
    bounds = true[None, :] - true[:, None] - slack
    bounds[drawn.random((clocks, clocks)) > dense] = -(2**60)
    found = settled(bounds)
    assert found[0] == 0
    assert (found[None, :] - found[:, None] >= bounds).all()


def test_nothing_is_corrected_that_is_right() -> None:
    assert settled(np.array([[0, -5], [-3, 0]])).tolist() == [0, 0]
    assert settled(np.array([[0, 4], [-9, 0]])).tolist() == [0, 4]
    assert settled(np.array([[0, 4], [-2, 0]])).tolist() == [0, 3]  # no clocks can do that


# ---- timelines ---------------------------------------------------------------------------------------------------

PROGRAM = build("1f1b", 4, 8)


def shifted(timeline: Timeline, shift: list[int]) -> Timeline:
    spans = [s._replace(start=s.start + shift[s.rank], end=s.end + shift[s.rank]) for s in timeline]
    windows = [[t + shift[rank] for t in window] for rank, window in enumerate(timeline.windows.tolist())]
    return Timeline.of(spans, windows, measured=True)


def reading(rank: int, leader: int, offset: int, at: int = 0, uncertainty: int = MS) -> Record:
    meta = {"rank": rank, "leader": leader, "offset_ns": offset, "uncertainty_ns": uncertainty, "at_ns": at}
    return decode(encode("clock", meta))


def causal(timeline: Timeline, ranks: int) -> bool:
    sends = sends_of(timeline, ranks, MESSAGE_WAITS)
    waits = np.flatnonzero(sends >= 0)
    return bool((timeline.end[waits] >= timeline.start[sends[waits]]).all())


@given(st.lists(st.integers(-2 * MS, 2 * MS), min_size=2, max_size=2), st.integers(0, 10**15))
@pytest.mark.slow
def test_messages_correct_what_readings_get_wrong(errors: list[int], far: int) -> None:
    """Ranks 1 and 2 on one host, rank 3 on another; their readings are wrong by up to ten times a message's way."""
    true = last_step(PROGRAM)
    shift = [0, far, far, -far // 3]
    clocks = ClockAlignment(4, 4)
    for rank, leader, error in ((1, 1, errors[0]), (2, 1, errors[0]), (3, 3, errors[1])):
        clocks.add(reading(rank, leader, -shift[rank] + error))
    found = clocks.aligned(shifted(true, shift))
    assert causal(found, 4)
    assert (found.end - found.start == true.end - true.start).all()
    left = (found.windows - true.windows)[:, 0]
    assert left[0] == 0 and left[1] == left[2] and np.abs(left).max() <= max(map(abs, errors)) + MS
    path = critical_path(found, 4)
    assert sum(by_cause(path).values()) == int(found.windows[:, 1].max() - found.windows[:, 0].max())


def test_a_right_reading_is_left_as_it_is() -> None:
    true = last_step(PROGRAM)
    clocks = ClockAlignment(4, 4)
    clocks.add(reading(3, 3, -MS))
    found = clocks.aligned(shifted(true, [0, 0, 0, MS]))
    assert (found.start == true.start).all() and (found.windows == true.windows).all()


def test_drift_is_the_line_between_two_readings() -> None:
    true = last_step(PROGRAM)
    moment = int(true.windows[3, 1])
    clocks = ClockAlignment(4, 4)
    clocks.add(reading(3, 3, 0, at=moment - 10**9))
    clocks.add(reading(3, 3, 200_000, at=moment + 10**9, uncertainty=3 * MS))
    assert clocks.drift == {3: pytest.approx(1e-4)} and clocks.uncertainty == [0, 0, 0, 3 * MS]
    found = clocks.aligned(shifted(true, [0, 0, 0, -100_000]))
    assert np.abs(found.start - true.start).max() <= 10  # the moment itself was read on the clock that drifts


def test_one_clock_changes_nothing() -> None:
    true = last_step(PROGRAM)
    clocks = ClockAlignment(4, 4)
    assert clocks.aligned(true) is true and clocks.uncertainty == [0] * 4 and not clocks.several


def test_a_run_over_two_hosts_says_how_well_it_knows_their_clocks(tmp_path: Path) -> None:
    of = recorded.job("gpipe", 2, 4)
    record, _ = recorded.recorder(of, tmp_path, progress=False)
    far = 10**15
    record(reading(1, 1, -far + 3 * MS, at=0))
    record_steps = [shifted(t, [0, far]) for t in [last_step(of.compute)] * 2]
    for step, timeline in enumerate(record_steps):
        for line in step_records(of, step, timeline):
            record(line)
    record(reading(1, 1, -far + 3 * MS, at=10**16))
    record.finish("completed")
    assert "rank 1: on the clock of rank 0 to within 1.000 ms, drift +0.0 ppm" in (tmp_path / "report.txt").read_text()
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"labels": "clock +- 1.000 ms"} in [event["args"] for event in trace if event["name"] == "process_labels"]
    starts, ends = ({e["id"]: e["ts"] for e in trace if e["ph"] == phase} for phase in "sf")
    assert starts and all(ends[number] >= at for number, at in starts.items())
    assert "from rank 0's" in (tmp_path / "engine.log").read_text()


# ---- for real ----------------------------------------------------------------------------------------------------

TWO_HOSTS = r"""
set -euo pipefail
ip link set lo up
unshare --net sleep 300 & host=$!
trap 'kill $host' EXIT
until [ "$(readlink /proc/$host/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
ip link add near type veth peer name far
ip link set far netns $host
ip addr add 10.99.0.1/24 dev near; ip link set near up
nsenter --target $host --net ip link set lo up
nsenter --target $host --net ip addr add 10.99.0.2/24 dev far
nsenter --target $host --net ip link set far up
[ $# -gt 0 ] || exit 0
export MASTER_ADDR=10.99.0.1 MASTER_PORT=29555 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0 OMP_NUM_THREADS=1
RANK=1 GLOO_SOCKET_IFNAME=far nsenter --target $host --net \
    unshare --time --monotonic 1000000 --fork "$@" & other=$!
RANK=0 GLOO_SOCKET_IFNAME=near "$@"
wait $other
"""


def two_hosts(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as rank 0 and as rank 1, each in a network of its own, the second one's clock far ahead."""
    inside = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c", TWO_HOSTS, "two hosts", *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(inside, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.mark.skipif(not shutil.which("unshare") or not shutil.which("ip"), reason="needs unshare and ip")
@pytest.mark.slow
def test_two_networks_and_a_shifted_clock(tmp_path: Path) -> None:
    probe = two_hosts()
    if probe.returncode:
        pytest.skip(f"namespaces are not permitted here: {probe.stderr.strip()[-200:]}")
    ended = two_hosts(
        sys.executable, "-m", "engine", "model=sleep", "data=synthetic", "data.shape=[16]", "schedule=1f1b",
        "train.steps=4", "train.global_batch_size=8", "eval.every=0", "device=cpu", f"hydra.run.dir={tmp_path}",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    log = (tmp_path / "engine.log").read_text()
    offsets = [float(ms) for ms in re.findall(r"clock ([-+][\d.]+) ms from rank 0's", log)]
    assert len(offsets) == 2 and all(abs(ms + 1e9) < 1e3 for ms in offsets), log
    assert "rank 1: on the clock of rank 0 to within" in (tmp_path / "report.txt").read_text()
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    starts, ends = ({e["id"]: e["ts"] for e in trace if e["ph"] == phase} for phase in "sf")
    assert len(starts) == 8 and all(ends[number] >= at for number, at in starts.items())
    assert max(e["ts"] for e in trace if "ts" in e) < 10e6  # microseconds: both ranks in the same seconds
