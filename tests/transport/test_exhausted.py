"""What the system has no more of is named where it was needed, with the remedy, and is never passed over in silence."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import LIMIT_S, ROOT
from harness import settings
from workers import over_shared, pair

from engine.cli import limits
from engine.environment import inherited_files
from engine.errors import ExhaustedError
from engine.launch.failure_report import FailureReport
from engine.launch.rank import error_record
from engine.telemetry.records import decode
from engine.training.samples.source import _explained
from engine.transport import PeerError, Transport
from engine.transport.shared import segments
from engine.transports import shared_memory_missing

needs_memfd = pytest.mark.skipif(bool(shared_memory_missing()), reason="needs Linux with memfd_create and eventfd")


def no_descriptor(patch: pytest.MonkeyPatch) -> None:
    """The system leaves out descriptors that the receiver has no room for."""
    whole = socket.recv_fds

    def recv_fds(end: socket.socket, size: int, most: int) -> Any:
        if most > 1:  # of the meeting
            return whole(end, size, most)
        return end.recv(size), [], 0, None

    patch.setattr(socket, "recv_fds", recv_fds)


def no_memory(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    whole = segments.Mapped.add

    def add(mapped: segments.Mapped, fd: int, nbytes: int) -> None:
        with patch.context() as inner:
            inner.setattr(segments.mmap, "mmap", refuse)
            whole(mapped, fd, nbytes)

    patch.setattr(segments.Mapped, "add", add)


def waits(transport: Transport, channel: Any, works: list[Any]) -> None:
    works[0].wait()


def fills(transport: Any, channel: Any, works: list[Any]) -> None:
    """As a rank does that waits for a send of its own meanwhile."""
    while not channel._poll.poll(100):
        pass
    transport.fill_posted()


@needs_memfd
@pytest.mark.parametrize("look", [waits, fills])
@pytest.mark.parametrize(
    ("hurt", "code"), [(no_descriptor, errno.EMFILE), (no_memory, errno.ENOMEM)], ids=["files", "memory"]
)
def test_a_segment_that_cannot_be_mapped_is_an_error_at_once_and_ever_after(
    monkeypatch: pytest.MonkeyPatch, hurt: Callable[[pytest.MonkeyPatch], None], code: int, look: Any
) -> None:
    def main(transport: Transport) -> list[OSError]:
        there, back = pair(transport)
        if transport.rank == 0:
            work = there.isend(torch.ones(2000))
            with pytest.raises(PeerError):
                back.irecv(torch.empty(1)).wait()  # stays until the other has seen what it has to
            del work
            return []
        hurt(monkeypatch)
        works = [back.irecv(torch.empty(2000)) for _ in range(2)]
        seen: list[OSError] = []
        for each in (look, waits, waits, lambda *_: works[1].wait()):
            with pytest.raises(ExhaustedError) as raised:
                each(transport, back, works)
            seen.append(raised.value)
        transport.abort()
        return seen

    _, seen = over_shared(2, main)
    words = "no 8192 bytes of shared memory for messages between ranks: "
    assert [(error.errno, error.strerror) for error in seen] == [(code, words + os.strerror(code))] * 4


@needs_memfd
def test_a_segment_that_cannot_be_made_is_an_error_of_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(transport: Transport) -> str:
        there, _ = pair(transport)
        if transport.rank == 0:

            def refuse(*_: Any) -> int:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            monkeypatch.setattr(os, "memfd_create", refuse)
            with pytest.raises(ExhaustedError) as raised:
                there.isend(torch.ones(2000))
            return str(raised.value)
        return ""

    said, _ = over_shared(2, main)
    assert said.endswith("no 8192 bytes of shared memory for messages between ranks: Too many open files")


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.EMFILE, "raise the limit (ulimit -n "), (errno.ENOMEM, "transport=gloo")]
)
def test_it_is_the_first_true_error_in_one_line_with_the_remedy(code: int, remedy: str) -> None:
    with pytest.raises(ExhaustedError) as raised, segments.refused(8192):
        raise OSError(code, os.strerror(code))
    failures = FailureReport(2, 2)
    failures.add_error(decode(error_record(1, PeerError("the peer closed its end", 0))).meta)
    failures.add_error(decode(error_record(0, raised.value)).meta)
    outcome = failures.outcome(None)
    assert outcome.error is not None and outcome.error.startswith("rank 0 failed: ExhaustedError: ")
    assert remedy in outcome.error and "\n" not in outcome.error and not outcome.traceback


def test_memory_that_is_gone_when_it_is_touched_is_named() -> None:
    failures = FailureReport(2, 2)
    failures.add_death(1, -7)
    assert "rank 1 was killed by SIGBUS: memory that processes share could not be had" in failures.message()


# -- loaders -----------------------------------------------------------------------------------------------------------

SAID = [
    ("RuntimeError: unable to allocate shared memory(shm) for file </torch_7_9_0>: No space left on device (28)", True),
    (
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader",
        True,
    ),
    ("unable to mmap 9600000 bytes from file </torch_7_9_0>: Cannot allocate memory (12)", True),
    ("unable to open shared memory object </torch_7_9_0> in read-write mode: Too many open files (24)", False),
    ("received 0 items of ancillary data", False),
]


@pytest.mark.parametrize(("text", "room"), SAID)
def test_a_loader_without_room_is_told_in_one_line(text: str, room: bool) -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback:\n{text}")

    loaded = _explained(batches())
    assert next(loaded) == 1
    with pytest.raises(ExhaustedError) as raised:
        next(loaded)
    meta = decode(error_record(0, raised.value)).meta
    assert "\n" not in meta["message"] and not meta["traceback"] and "data.workers" in meta["message"]
    assert ("no room in /dev/shm" in meta["message"]) == room == ("--shm-size" in meta["message"])
    assert ("ulimit -n" in meta["message"]) == (not room)


def test_other_errors_of_a_loader_stay_as_they_are() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise RuntimeError("stack expects each tensor to be equal size")

    loaded = _explained(batches())
    assert next(loaded) == 1
    with pytest.raises(RuntimeError, match="stack expects each tensor") as raised:
        next(loaded)
    assert type(raised.value) is RuntimeError
    assert list(_explained(iter([1, 2]))) == [1, 2]


# -- the start ---------------------------------------------------------------------------------------------------------


def test_files_that_were_open_before_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before, held = inherited_files(), []
    try:
        for _ in range(20):
            held.append(os.dup(2))
            os.set_inheritable(held[-1], True)
        own = socket.socket()  # not handed on to anybody
        assert inherited_files() == before + 20
        own.close()
        monkeypatch.setattr(limits, "open_files", lambda: 40 + before)
        with pytest.raises(ValueError, match=rf"may open \d+ files \({before + 20} of them were open"):
            limits.check_limits(settings(launch="processes"))
    finally:
        for fd in held:
            os.close(fd)
    limits.check_limits(settings(launch="processes"))


def _own_shared_memory(options: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run that sees a /dev/shm of its own."""
    mount = f"mount -t tmpfs -o {options} none /dev/shm"
    if subprocess.run(["unshare", "-m", "bash", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a /dev/shm of its own")
    command = ["unshare", "-m", "bash", "-c", f'{mount}; exec "$@"', "-", sys.executable, "-m", "engine", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False
    )


@pytest.mark.slow(most=2)
@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=1m", "no room in /dev/shm (1 MB"),
        ("size=4k", "no room in /dev/shm (0 MB"),
        ("size=4m,ro", "make room in /dev/shm, or use launch=threads"),
    ],
)
def test_a_dev_shm_that_takes_nothing_is_named_in_one_line(options: str, said: str, tmp_path: Path) -> None:
    arguments = ("model=resnet50", "model.width=8", "train.global_batch_size=64", "train.steps=2", "data.workers=2")
    done = _own_shared_memory(options, tmp_path, *arguments)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr, done.stderr
    assert "data.workers=0" in done.stderr or "launch=threads" in done.stderr
