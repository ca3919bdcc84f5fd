"""Another user of the same host at each door: nothing is told to it, and nothing is taken from it."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launched
import pytest
import torch
from harness import settings
from torch.distributed import HashStore
from workers import over

from engine import environment
from engine.cli.composition import targets
from engine.launch import delivery, handover, joined
from engine.launch.failure_report import FailureReport
from engine.launch.launch import in_processes
from engine.launch.supervise import warm_up
from engine.prepare.prepare import prepare
from engine.settings import AllReduceSettings
from engine.telemetry import position
from engine.telemetry.records import Record, encode
from engine.training.connect import store_in
from engine.transport import Edge, Transport, rendezvous
from engine.transport.credentials import StrangerError
from engine.transport.shared import SharedMemoryTransport
from engine.transport.shared.ends import introduction
from engine.transports import shared_memory_missing

NOBODY = 65534
EDGE = Edge(0, 1, "F")


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """The fork server lives as long as this process: start it before a test looks for children left behind."""
    warm_up()


pytestmark = [
    pytest.mark.skipif(bool(shared_memory_missing()), reason="needs Linux"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user"),
]


@contextmanager
def stranger(act: Callable[[], bytes]) -> Iterator[Callable[[], bytes]]:
    """Run `act` as another user, in a process of its own; what is yielded waits for its answer."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, act())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        try:
            yield answers.read
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@contextmanager
def listening(kind: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """A stranger's socket: its name, and what the first that connects says to it."""
    name = f"stranger-{os.getpid()}-{kind}"
    ready, go = os.pipe()

    def act() -> bytes:
        with socket.socket(socket.AF_UNIX, kind) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            os.write(go, b"!")
            end, _ = listener.accept()
            end.settimeout(20)
            return b"heard " + end.recv(4096)

    with stranger(act) as answer:
        os.read(ready, 1)
        os.close(ready)
        os.close(go)
        yield name, answer


def connecting(name: str, kind: int, says: bytes, files: int = 0) -> Callable[[], bytes]:
    """What a stranger does who connects to a socket of ours: what it is told."""

    def act() -> bytes:
        with socket.socket(socket.AF_UNIX, kind) as end:
            end.settimeout(20)
            end.connect(f"\0{name}")
            try:
                socket.send_fds(end, [says], [os.memfd_create("x") for _ in range(files)])
                return b"told " + end.recv(4096)
            except OSError:
                return b"told "

    return act


# ---- channels ------------------------------------------------------------------------------------------------------


def test_a_sender_says_nothing_to_another_user_s_socket() -> None:
    """The stranger has written its own address into the store, before the receiver could."""
    store = HashStore()
    with listening(socket.SOCK_SEQPACKET) as (name, answer):
        store.set("shared/1/1", name)
        transport = SharedMemoryTransport(0, 2, store, 5.0)
        with pytest.raises(StrangerError, match=rf"connecting .*peer 1: user {NOBODY} listens there, not user 0"):
            transport.open([EDGE])
        transport.close()
        assert answer() == b"heard "


def test_a_receiver_lets_no_other_user_in() -> None:
    store = HashStore()

    def main(transport: Any) -> float:
        if transport.rank == 0:
            name = store.get("shared/1/1").decode()
            with stranger(connecting(name, socket.SOCK_SEQPACKET, introduction(EDGE), files=3)) as answer:
                assert answer() == b"told "
        transport.open([EDGE])
        channel, tensor = transport.channel(EDGE), torch.full((1,), float(transport.rank == 0))
        (channel.isend if transport.rank == 0 else channel.irecv)(tensor).wait()
        return float(tensor)

    assert over(2, main, lambda rank: SharedMemoryTransport(rank, 2, store, 20.0)) == [1.0, 1.0]


def test_a_member_of_a_sum_says_nothing_to_another_user_s_socket() -> None:
    store = HashStore()
    with listening(socket.SOCK_SEQPACKET) as (name, answer):
        store.set("sum/0-1/norms/0", name)
        transport = SharedMemoryTransport(1, 2, store, 5.0)
        with pytest.raises(StrangerError, match=rf"connecting group norms .*peer 0: user {NOBODY} listens there"):
            transport.open_group([0, 1], "norms")
        transport.close()
        assert answer() == b"heard "


def test_a_member_of_a_sum_lets_no_other_user_in() -> None:
    store = HashStore()

    def main(transport: Transport) -> float:
        if transport.rank == 1:
            store.wait(["sum/0-1/norms/0"])
            name = store.get("sum/0-1/norms/0").decode()
            with stranger(connecting(name, socket.SOCK_SEQPACKET, b"1 sum/0-1/norms")) as answer:
                assert answer() == b"told "
        transport.open_group([0, 1], "norms")
        tensor = torch.ones(1)
        transport.all_reduce(tensor, [0, 1], "norms").wait()
        return float(tensor)

    assert over(2, main, lambda rank: SharedMemoryTransport(rank, 2, store, 20.0)) == [2.0, 2.0]


@pytest.mark.process
@pytest.mark.parametrize(
    ("given", "listens"),
    [({}, False), ({"transport": "gloo"}, True), ({"allreduce": AllReduceSettings("native")}, True)],
    ids=["default", "gloo", "native"],
)
def test_no_rank_of_a_default_run_listens_on_a_port(given: dict[str, Any], listens: bool) -> None:
    job = prepare(settings("1f1b", 2, 4, 2, launch="processes", **given), ".", ".")
    records: list[Record] = []
    assert in_processes(job, records.append, launched.wired).status == "completed"
    said = sorted(record.meta["message"].split(" on ports ") for record in records if record.kind == "log")
    assert [total for total, _ in said] == ["2.0", "2.0", "4.0", "4.0"]  # the last ranks of the replicas add theirs
    assert [ports != "[]" for _, ports in said] == [listens] * job.world


# ---- the job -------------------------------------------------------------------------------------------------------


def test_a_rank_takes_no_job_from_another_user() -> None:
    with listening(socket.SOCK_STREAM) as (name, answer):
        with pytest.raises(StrangerError, match=rf"rank 1 asking rank 0 for the job: user {NOBODY} listens there"):
            delivery.fetch(name, 1)
        assert answer() == b"heard "


def test_the_job_is_handed_to_no_other_user() -> None:
    counter, heard, gone = delivery.Counter(2), queue.SimpleQueue[bytes](), queue.SimpleQueue[int]()
    counter.open(b"the job", heard.put, gone.put)
    with stranger(connecting(counter.name, socket.SOCK_STREAM, b"\1\0\0\0\0\0\0\0")) as answer:
        assert answer() == b"told "
    content, positions, end = delivery.fetch(counter.name, 1)
    assert content == b"the job"
    positions[1] = 7
    assert counter.positions[1] == 7 and counter.positions[0] == position.NOWHERE
    records = [b"", b"x" * 3_000_000, b"last"]
    mail = delivery.Mail(lambda record: pytest.fail("not through the store"))
    mail.use(end)
    for record in records:
        mail.post(record)
    assert [heard.get(timeout=20) for _ in records] == records
    assert gone.empty()
    end.close()
    assert gone.get(timeout=20) == 1


def test_what_no_rank_has_sent_ends_the_run_in_a_line() -> None:
    """Between hosts records come through the store, into which others can write."""
    for content in (b"garbage", b"\x00\xf0\x49\x02" + b"[" * 200_000, encode("step", {"rank": 0})[:-3]):
        listener = joined._Listener(FailureReport(2, 2), queue.SimpleQueue(), None, lambda record: None, None)
        with pytest.raises(RuntimeError, match="somebody else than this run's ranks writes into the launcher's store"):
            listener._take(content)


class Evil:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def met(monkeypatch: pytest.MonkeyPatch, content: bytes, one_host: bool) -> joined.JoinedRank:
    """Rank 1 of two, whose store says that `content` is the job."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2" if one_host else "1")
    for name, value in (("RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    store = HashStore()
    store.set(joined.JOB, content)
    store.set(joined.CLOSED, b"")
    place = SimpleNamespace(rank=1, world=2, root=store, store=lambda: store)
    monkeypatch.setattr(rendezvous, "meet", lambda limit_s: place)
    return joined.JoinedRank(5.0)


@pytest.mark.parametrize("one_host", [True, False])
@pytest.mark.parametrize("prefix", [b"", b"+"])
def test_a_pickle_in_the_store_is_never_unpickled(
    one_host: bool, prefix: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here = met(monkeypatch, prefix + pickle.dumps(Evil(tmp_path / "mark")), one_host)
    assert here.follow(dict) == 1
    assert not (tmp_path / "mark").exists()
    err = capfd.readouterr().err
    assert err.startswith("rank 1: ") and err.count("\n") == 1 and "Traceback" not in err, err


def test_a_job_in_the_store_is_not_taken_where_rank_0_is_on_the_same_host(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here = met(monkeypatch, handover.written(prepare(settings("gpipe", 2, 2), ".", ".")), one_host=True)
    monkeypatch.setattr(joined, "guarded", lambda *_: pytest.fail("it works"))
    assert here.follow(dict) == 1
    assert "rank 0 went away" in capfd.readouterr().err


OWN = [
    "model._target_=toys.mlp4", "model.loss._target_=toys.TokenLoss", "data._target_=toys.Tokens", "lr_scheduler=none",
    "optimizer=sgd",
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "other", "said"),
    [
        (
            "model",
            {"_target_": "os.system"},
            r"model\._target_=os\.system, and the command line of rank 1 .*toys\.mlp4",
        ),
        ("data", {"x": [{"_target_": "os.system"}]}, r"data\.x\[0\]\._target_=os\.system, .*=None"),
        ("model", {"loss": {}}, r"model\.loss\._target_=None, .*toys\.TokenLoss"),
    ],
)
def test_between_hosts_a_rank_runs_only_what_its_command_line_names(
    section: str,
    other: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked = settings("gpipe", 2, 2)
    job = prepare(asked, "/somewhere/else", ".")
    own = targets(["model=mlp", *OWN])
    own["lr_scheduler._target_"] = None
    job = replace(job, settings=replace(asked, lr_scheduler={"_target_": None}))
    worked: list[Any] = []
    monkeypatch.setattr(joined, "guarded", lambda *_: worked.append(1) or True)
    monkeypatch.setattr(joined, "forward_logging", lambda *_: None)
    monkeypatch.chdir(tmp_path)

    here = met(monkeypatch, handover.written(job), one_host=False)
    monkeypatch.setattr(here, "_work", lambda given, post: worked.append(given))
    monkeypatch.setattr(joined, "guarded", lambda rank, post, work: work() or True)
    assert here.follow(lambda: own) == 0, capfd.readouterr().err
    assert [given.start_dir for given in worked] == [str(tmp_path)]

    changed = replace(job, settings=replace(job.settings, **{section: {**getattr(asked, section), **other}}))
    here = met(monkeypatch, handover.written(changed), one_host=False)
    monkeypatch.setattr(here, "_work", lambda given, post: worked.append(given))
    assert here.follow(lambda: own) == 1 and len(worked) == 1
    with pytest.raises(ValueError, match=said):
        joined.check_targets(changed.settings, own, 1)


# ---- stores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [True, False])
def test_another_user_cannot_enter_the_folder_of_the_run_s_store(
    in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can see the folder, and neither list it, nor read or write the store, nor put another in its place."""
    if not in_memory:
        monkeypatch.setattr(environment, "IN_MEMORY", "/absent")
    with environment.private_folder() as folder:
        store = store_in(folder, 5.0)
        store.set("group/0-1/norms/0", b"where rank 0 listens")
        (path,) = Path(folder).iterdir()
        attempts: list[Callable[[], Any]] = [
            lambda: [*Path(folder).iterdir()],
            path.read_bytes,
            lambda: path.open("ab"),
            path.unlink,
            lambda: Path(folder).rename(f"{folder}x"),
        ]

        def act() -> bytes:
            return b" ".join(denied(attempt) for attempt in attempts)

        with stranger(act) as answer:
            assert answer() == b" ".join([b"denied"] * len(attempts))
        assert store_in(folder, 5.0).get("group/0-1/norms/0") == b"where rank 0 listens"
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert not Path(folder).exists()


def denied(act: Callable[[], Any]) -> bytes:
    try:
        act()
    except PermissionError:
        return b"denied"
    return b"done"


def test_what_only_this_host_needs_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    for local in ("1", "2"):  # what is told of hosts, and an address that can be reached from this one alone
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with rendezvous._listen("127.0.0.1", 0) as listener:
            assert listener.getsockname()[0] == "127.0.0.1"
