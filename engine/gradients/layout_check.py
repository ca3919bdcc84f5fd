"""Do all members describe the same thing? Found out once, before it matters, with a message that says what differs.

Each member has a list of texts (a parameter and its shape, say). What travels is first one digest of the whole list,
and only where these differ one digest per text: a sum in which every member fills a row of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from engine.collectives.allreduce.base import Collective


def require_alike(collective: Collective, words: Sequence[str], what: str, items: str) -> None:
    """Raise ValueError on every member unless all have the same `words`; waits for all of them.

    `what` says in the message what must be equal, `items` of what the list is.
    """
    counts, digests = zip(*gather(collective, [len(words), digest("\n".join(words))]), strict=True)
    if len(set(digests)) == 1:
        return
    longest = max(counts)
    table = gather(collective, [digest(text) for text in words] + [0] * (longest - len(words)))
    own = table[collective.position]
    at = next(i for i in range(longest) if any(row[i] != own[i] for row in table))
    other = next(m for m, row in zip(collective.members, table, strict=True) if row[at] != own[at])
    here = words[at] if at < len(words) else f"no more {items}"
    raise ValueError(
        f"{collective.label}: {what}, but their {items} differ, first at number {at}: here (rank "
        f"{collective.transport.rank}) {here}; rank {other} has something else"
    )


def gather(collective: Collective, numbers: Sequence[int]) -> list[list[int]]:
    """Return every member's list, all of equal length."""
    rows = torch.zeros(len(collective.members), len(numbers), dtype=torch.int64)
    rows[collective.position] = torch.tensor(numbers, dtype=torch.int64)
    flat = rows.flatten().to(collective.transport.device)
    collective.all_reduce(flat)
    return flat.view(rows.shape).tolist()


def digest(text: str) -> int:
    """Return 63 bits that are the same in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
