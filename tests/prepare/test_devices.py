"""CPUs or GPUs, and which one: decided by the ranks of a host, also where this host has no GPU to try it on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_threads, settings
from plain_loops import built, sgd
from recorded import job, recorder
from torch.distributed import HashStore
from workers import over

from engine.cli import run
from engine.distributed import DistributedOptimizer, World
from engine.environment import seat_of, tasks_here
from engine.pipeline.batches.batch import ReplicaBatch
from engine.prepare.devices import choose, passed_over
from engine.training import device
from engine.transport.threads import ThreadHub, ThreadTransport

TORCHRUN = {"MASTER_ADDR": "x", "MASTER_PORT": "1"}


def torchrun(rank: int, world: int, per_host: int) -> dict[str, str]:
    where = {"LOCAL_RANK": rank % per_host, "LOCAL_WORLD_SIZE": per_host}
    return TORCHRUN | {key: str(value) for key, value in ({"RANK": rank, "WORLD_SIZE": world} | where).items()}


def slurm(rank: int, world: int, local: int, **tasks: str) -> dict[str, str]:
    return TORCHRUN | {"RANK": str(rank), "WORLD_SIZE": str(world), "SLURM_LOCALID": str(local)} | tasks


# visible GPUs, ranks of the run, environment of a rank -> the rank's GPU; None: CPUs
CASES: list[tuple[int, int, dict[str, str], int | None]] = [
    (0, 2, {}, None),
    (1, 2, {}, None),
    (2, 2, {}, 0),
    (8, 1, {}, 0),
    (4, 8, torchrun(0, 8, 4), 0),  # README's command on two hosts
    (4, 8, torchrun(6, 8, 4), 2),
    (3, 8, torchrun(0, 8, 4), None),
    (1, 2, torchrun(0, 2, 2), None),  # one GPU for two ranks of a host, hidden from neither
    (1, 2, torchrun(1, 2, 1), 0),
    (1, 8, slurm(5, 8, 1, SLURM_NTASKS_PER_NODE="4"), 0),  # each task sees its own GPU alone
    (4, 8, slurm(5, 8, 1, SLURM_NTASKS_PER_NODE="4"), 1),
    (2, 8, slurm(5, 8, 1, SLURM_NTASKS_PER_NODE="4"), None),
    (0, 8, slurm(5, 8, 1, SLURM_NTASKS_PER_NODE="4"), None),
    (4, 7, slurm(5, 7, 1, SLURM_STEP_TASKS_PER_NODE="4,3", SLURM_NODEID="1"), 1),
    (3, 7, slurm(1, 7, 1, SLURM_STEP_TASKS_PER_NODE="4,3", SLURM_NODEID="0"), None),
    (4, 4, torchrun(3, 4, 4) | {"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}, 3),  # torchrun in a Slurm task
]


@pytest.mark.parametrize(("gpus", "world", "env", "index"), CASES)
def test_every_rank_of_a_host_finds_a_gpu_or_all_take_the_cpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, world: int, env: dict[str, str], index: int | None
) -> None:
    wanted = settings(ranks=world, launch="processes", device="auto")
    chosen = choose(wanted, env, gpus)
    assert chosen == ("cpu" if index is None else "cuda")
    line = passed_over(wanted, env, gpus)
    assert (line is None) == (gpus == 0 or index is not None)
    if line is not None:
        assert line.startswith(f"device=auto took the CPUs: this host has {gpus} visible GPUs for ")
    if index is None:
        with pytest.raises(ValueError, match=f"device=cuda, but this host has {gpus} visible GPUs for .* ranks"):
            choose(replace(wanted, device="cuda"), env, gpus)
        return
    assert choose(replace(wanted, device="cuda"), env, gpus) == "cuda"
    rank = int(env.get("RANK", "0"))
    assert seat_of(rank, world, env, gpus).gpu(gpus) == index
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    seen: Any = type("Job", (), {"settings": replace(wanted, device="cuda"), "world": world})
    assert device.device_of(seen, rank) == torch.device("cuda", index)


def test_threads_share_gpus() -> None:
    wanted = settings(ranks=4, device="auto")
    assert [choose(wanted, {}, gpus) for gpus in (0, 1, 4)] == ["cpu", "cuda", "cuda"]


@pytest.mark.parametrize(("text", "node", "tasks"), [("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2", 0, 2), ("", 0, 1)])
def test_tasks_as_slurm_writes_them(text: str, node: int, tasks: int) -> None:
    assert tasks_here({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}) == tasks


def test_cpus_taken_beside_gpus_are_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    record, console = recorder(job(), tmp_path)
    run._note_device(settings(ranks=2, launch="processes", device="cpu"), record)
    assert "GPU" not in console.getvalue()
    run._note_device(settings(ranks=2, launch="processes", device="auto"), record)
    record.finish("completed")
    (said,) = [line for line in console.getvalue().splitlines() if "GPU" in line]
    assert "device=auto took the CPUs: this host has 1 visible GPUs for 2 ranks" in said


def test_counts_are_summed_where_the_stage_is() -> None:
    """NCCL adds nothing that lies on a CPU; here another device stands for the GPU."""
    devices: list[torch.device] = []

    def watch(worker: Any) -> None:
        pipeline = worker.pipeline
        inner = pipeline.communicators.sum_counts

        def summed(count: torch.Tensor) -> Any:
            devices.append(count.device)
            return inner(count.cpu()) if count.device.type == "cpu" else lambda: None

        pipeline.communicators.sum_counts = summed
        own, pipeline.device = pipeline.device, torch.device("meta")
        empty = ReplicaBatch(None, None, [])
        assert pipeline.counted(0, empty) == 0.0
        pipeline.count(0, empty)
        pipeline.device = own

    ran = run_threads(settings(ranks=1, replicas=2), watch)
    assert [device.type for device in devices].count("meta") == 2  # one of each worker
    assert len(ran.losses()) == 3


class BesideGpu(ThreadTransport):
    """A transport between GPUs, on which nothing can be carried here."""

    device = torch.device("cuda", 0)


def test_gradients_on_cpus_do_not_go_between_gpus() -> None:
    """A model stays where it is, on a host with GPUs too."""
    hubs, stores = {name: ThreadHub(2, 20.0) for name in ("gpus", "cpus")}, HashStore()
    opened: list[str] = []

    def main(transport: Any) -> torch.Tensor:
        cpus = hubs["cpus"].transport(transport.rank)
        world = World(transport, stores, between_cpus=lambda: cpus)
        inner = transport.open
        transport.open = lambda edges: (opened.append("gpus"), inner(edges))
        net = built()
        for _ in range(2):  # a second one over the same transport
            optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), world=world)
        net(torch.full((3, 6), float(world.rank), dtype=torch.float64)).sum().backward()
        optimizer.step()
        return net[0].weight.detach()

    first, second = over(2, main, lambda rank: BesideGpu(hubs["gpus"], rank))
    assert torch.equal(first, second) and not opened


def test_parameters_on_gpus_are_refused_where_cpus_are_connected() -> None:
    hub, store = ThreadHub(2, 20.0), HashStore()

    def main(transport: Any) -> str:
        world = World(transport, store)
        with pytest.raises(ValueError) as refused:
            world.ring([torch.device("cuda", 0)])
        with pytest.raises(ValueError, match="the parameters are on cpu and cuda: move the model to one device first"):
            world.ring([torch.device("cuda", 0), torch.device("cpu")])
        return str(refused.value)

    for said in over(2, main, hub.transport):
        assert said.startswith("the parameters are on cuda, but the ranks are connected for cpu: call engine.init(")
