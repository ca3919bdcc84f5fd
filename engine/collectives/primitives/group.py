"""Some ranks that call collectives together: what torch.distributed calls a process group.

    edges = Group.edges(members, "weights")          on every rank of the run, before anything is built
    transport.open([*edges, ...])
    group = Group(transport, members, "weights")     on the members
    broadcast(tensor, src=0, group=group)            see one_to_many, many_to_one, many_to_many

Ranks are world ranks, as there. Calls block. All members call the same collectives in the same order, with equal
arguments where torch.distributed wants them equal; this is compared before anything is moved (`agree`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.ring import Ring
from engine.collectives.peers import Peers, mesh
from engine.collectives.primitives.agree import agree
from engine.collectives.primitives.tensors import described
from engine.transport import Edge, Transport


class Group:
    """Some ranks that call collectives together, with a channel between any two of them.

    `algorithm` is the all-reduce. One call at a time. `checked=False` leaves out the comparison of calls, for callers
    that have agreed in another way.
    """

    def __init__(
        self,
        transport: Transport,
        members: Sequence[int],
        label: str,
        algorithm: type[Collective] = Ring,
        checked: bool = True,
    ) -> None:
        if transport.rank not in members:
            raise ValueError(f"group {label}: rank {transport.rank} is none of its members {list(members)}")
        if len(set(members)) < len(members):
            raise ValueError(f"group {label}: its members {list(members)} name a rank twice")
        self.members, self.label, self.checked = tuple(members), label, checked
        self.collective = algorithm(transport, members, label)
        self.peers: Peers = self.collective.peers
        self.size, self.position, self.rank = self.peers.size, self.peers.position, transport.rank

    @staticmethod
    def edges(members: Sequence[int], label: str, algorithm: type[Collective] = Ring) -> list[Edge]:
        """Return the channels that `Transport.open` must be given, on all ranks."""
        pairs = ((a, b) for a in range(len(members)) for b in range(len(members)) if a != b)
        return list(dict.fromkeys([*mesh(members, pairs, label), *algorithm.edges(members, label)]))

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent in this group so far, tickets included."""
        return self.peers.sent.nbytes

    @property
    def messages_sent(self) -> int:
        """Messages that this rank has sent in this group so far, tickets included."""
        return self.peers.sent.messages

    @property
    def others(self) -> list[int]:
        """Other positions, beginning behind our own: no two members begin with the same one."""
        return [(self.position + step) % self.size for step in range(1, self.size)]

    def agree(self, words: str, complaint: str | None = None) -> None:
        """Compare this call with the other members'; see `agree`. `complaint`: what is wrong with ours, if anything."""
        if self.checked:
            self.meet(words, complaint)
        elif complaint is not None:
            raise ValueError(f"{self.label}: {complaint}")

    def meet(self, words: str, complaint: str | None = None) -> None:
        """Compare this call with the other members', checked or not."""
        agree(self.peers, words, complaint)

    def place(self, rank: int) -> int:
        """Return the position of a member, by its world rank."""
        return self.members.index(rank)

    def list_complaint(
        self, role: str, name: str, root: int, list_name: str, given: Sequence[Tensor] | None, like: Tensor
    ) -> str | None:
        """Say what is wrong with the list of tensors that the root alone gives, one per member, each as `like`."""
        if self.rank != root:
            return self.stranger(name, root) or (f"only the {role} gives a {list_name}" if given else None)
        if given is None or len(given) != self.size:
            count = "none" if given is None else str(len(given))
            return f"the {role}'s {list_name} needs {self.size} tensors, one per member, not {count}"
        for number, each in enumerate(given):
            if (each.shape, each.dtype) != (like.shape, like.dtype):
                return f"{list_name}[{number}] is {described(each)}, tensor is {described(like)}"
        return None

    def stranger(self, name: str, rank: int) -> str | None:
        """Say that a rank is none of the members."""
        return None if rank in self.members else f"{name}={rank} is none of the members {list(self.members)}"
