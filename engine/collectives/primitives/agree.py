"""All members of a group say what they are about to do, before they do it: a disagreement ends in one error on all of
them instead of a hang or a wrong result.

Everybody sends a ticket of fixed size to everybody: the words of its call, or its complaint. So everybody knows all
calls, and raises or goes on alike. It costs N-1 small messages per rank, about one α, and makes every checked call a
barrier on entry. What is agreed on once for many calls (a reducer's layout) needs no tickets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from engine.collectives.peers import Peers
from engine.transport import PeerError, PeerTimeout, Work

TICKET_BYTES = 256
COMPLAINT = "!"  # begins a ticket that is no call
DIGEST_CHARACTERS = 16


def agree(peers: Peers, words: str, complaint: str | None = None) -> None:
    """Wait for the other members to call with the same `words`.

    ValueError on all members where one has a `complaint` or calls differ; PeerTimeout, with who came and who did not,
    where one stays away.
    """
    mine = _ticket(words if complaint is None else COMPLAINT + complaint, peers.transport.device)
    others = [k for k in range(peers.size) if k != peers.position]
    theirs = {k: torch.empty_like(mine) for k in others}
    start = time.monotonic()
    arriving = {k: peers.recv(k, theirs[k]) for k in others}
    sending = [peers.send(k, mine) for k in others]
    _await(peers, words, arriving, start)
    for work in sending:
        work.wait()
    tickets = {peers.position: mine, **theirs}
    if complaint is not None or any(not torch.equal(ticket, mine) for ticket in theirs.values()):
        raise ValueError(f"{peers.label}: {_difference(peers.members, tickets)}")


def _await(peers: Peers, words: str, arriving: Mapping[int, Work], start: float) -> None:
    """Wait for the tickets; a time-out says who is missing."""
    late: PeerTimeout | None = None
    missing = []
    for position, work in arriving.items():
        try:
            work.wait()
        except PeerTimeout as error:
            late = late or error
            missing.append(peers.members[position])
        except PeerError:
            if late is None:
                raise
            missing.append(peers.members[position])  # it gave up at the same moment as we did
    if late is None:
        return
    came = [member for member in peers.members if member not in missing]
    raise PeerTimeout(
        f"{peers.label}: {words}: rank(s) {_listed(came)} came, {_listed(missing)} did not for "
        f"{time.monotonic() - start:.1f} s",
        missing[0],
    ) from late


def _ticket(text: str, device: torch.device) -> Tensor:
    """`text` in a message of fixed size; a long one ends in a digest of the whole."""
    raw = text.encode()
    if len(raw) > TICKET_BYTES:
        mark = f"…{sha256(raw).hexdigest()[:DIGEST_CHARACTERS]}".encode()
        raw = raw[: TICKET_BYTES - len(mark)].decode(errors="ignore").encode() + mark
    return torch.frombuffer(bytearray(raw.ljust(TICKET_BYTES, b"\0")), dtype=torch.uint8).to(device)


def _text(ticket: Tensor) -> str:
    return bytes(ticket.tolist()).rstrip(b"\0").decode(errors="replace")


def _difference(members: Sequence[int], tickets: Mapping[int, Tensor]) -> str:
    """Who says what, in rank order; where somebody complains, only that."""
    said = {members[k]: _text(tickets[k]) for k in sorted(tickets)}
    complaints = {rank: text[len(COMPLAINT) :] for rank, text in said.items() if text.startswith(COMPLAINT)}
    by_text: dict[str, list[int]] = {}
    for rank, text in (complaints or said).items():
        by_text.setdefault(text, []).append(rank)
    listed = "; ".join(f"rank(s) {_listed(ranks)}: {text}" for text, ranks in by_text.items())
    return listed if complaints else f"the members call differently: {listed}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
