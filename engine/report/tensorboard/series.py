"""What the event file keeps of a long run, so that it stays bounded; and the documents in it: under which tags, how.

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
ALL_OF_THE_FIRST = 32  # traced steps; then every second of as many again, then every fourth of twice as many ...
CURVES = 512  # the same of points of the curves that there are for each rank; TensorBoard shows 1000 of a curve
MOST_SPANS = 200_000  # of one step: a browser draws that at once
SPANS_OF_A_RUN = 4_000_000  # about 50 MB of documents


def tag_of(step: int) -> str:
    """The tag of the series that holds the document of a step."""
    return f"{PLUGIN}/step{step}"


def packed(document: str) -> bytes:
    """A document as it lies in the event file, compressed. The same document gives the same bytes."""
    return gzip.compress(document.encode(), compresslevel=6, mtime=0)


def unpacked(content: bytes) -> str:
    """The document of these bytes. Raises ValueError where they are none."""
    try:
        return gzip.decompress(content).decode()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"not a packed document: {error}") from error


def about(seconds: float, shares: Mapping[str, float]) -> bytes:
    """What a list of steps says of one; `shares`: of the step, by name of the account, the mean over ranks."""
    rounded = {name: round(share, 5) for name, share in shares.items()}
    return json.dumps({"seconds": round(seconds, 9), "shares": rounded}, separators=(",", ":")).encode()


class Thinning:
    """Chooses among steps as they come: all of the `first`, then half as many for each doubling of their number."""

    def __init__(self, first: int = ALL_OF_THE_FIRST) -> None:
        self._first, self._seen, self._due = first, 0, 0

    def keeps(self) -> bool:
        """Whether the next step is to be written."""
        index, self._seen = self._seen, self._seen + 1
        if index < self._due:
            return False
        self._due = index + (1 << (index // self._first).bit_length())
        return True


class Room:
    """The limit on the spans of all documents of a run together."""

    def __init__(self) -> None:
        self._spans = 0

    def takes(self, spans: int) -> bool:
        """Take room for a step of so many spans; returns whether there was enough."""
        if spans > MOST_SPANS or self._spans + spans > SPANS_OF_A_RUN:
            return False
        self._spans += spans
        return True
