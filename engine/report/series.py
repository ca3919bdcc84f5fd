"""The documents of traced steps in the event file: under which tags, and of which steps, so that it stays bounded.

Each document is a time series of its own with one point. A single series would be thinned at random by TensorBoard when
it reads the file, and reading one point of it would mean reading them all. What a list of steps shows is in the series'
metadata, so that listing reads no document.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping

PLUGIN = "pipeline"  # of whom the series are: the tab's name in tensorboard's addresses
ALL_OF_THE_FIRST = 32  # traced steps; then half of as many again, then a quarter of as many again ...
MOST_SPANS = 200_000  # of one step: a browser draws that at once
SHARE = 0.01  # of a run's time that may go into making documents
SPANS_OF_A_RUN = 4_000_000  # about 50 MB of documents


def tag_of(step: int) -> str:
    return f"{PLUGIN}/step{step}"


def packed(document: str) -> bytes:
    """As it lies in the event file. The same document gives the same bytes."""
    return gzip.compress(document.encode(), compresslevel=6, mtime=0)


def unpacked(content: bytes) -> str:
    """The document again; ValueError where the bytes are none."""
    try:
        return gzip.decompress(content).decode()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"not a packed document: {error}") from error


def about(seconds: float, shares: Mapping[str, float]) -> bytes:
    """What a list of steps says of one; `shares`: of the step, by name of the account, the mean over ranks."""
    rounded = {name: round(share, 5) for name, share in shares.items()}
    return json.dumps({"seconds": round(seconds, 9), "shares": rounded}, separators=(",", ":")).encode()


class Thinning:
    """Chooses among traced steps as they come: all at first, then ever fewer: 16 per doubling of their number.

    Making a document takes the parent's processor, which its workers need: about as much as `_cost` says. Fewer are
    chosen where that would be more than SHARE of the time of the steps.
    """

    def __init__(self) -> None:
        self._seen = self._due = self._spans = 0
        self._allowed = self._spent = 0.0

    def keeps(self, spans: int, seconds: float) -> bool:
        """Whether the next traced step, of so many spans and after so many seconds, is to be written."""
        index, self._seen = self._seen, self._seen + 1
        self._allowed += SHARE * seconds
        if index < self._due or self._spent > self._allowed or not self.takes(spans):
            return False
        self._due = index + (1 << (index // ALL_OF_THE_FIRST).bit_length())
        return True

    def takes(self, spans: int) -> bool:
        """The same whatever came before, but for the size of it all: for the last step of a run."""
        if spans > MOST_SPANS or self._spans + spans > SPANS_OF_A_RUN:
            return False
        self._spans += spans
        self._spent += _cost(spans)
        return True


def _cost(spans: int) -> float:
    """Seconds that a document takes to be made, measured on a slow processor."""
    return 2.5e-3 + 9e-6 * spans
