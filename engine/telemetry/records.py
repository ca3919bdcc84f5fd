"""What a worker tells the parent while it runs: small records of JSON plus integer arrays, never pickles.

    bytes 0..3   length of the header (little endian)
    header       JSON: {"kind": ..., "meta": {...}, "arrays": [[name, shape], ...]}
    rest         the arrays, int64 little endian, one after another

| kind         | meta                                                                                                |
|--------------|-----------------------------------------------------------------------------------------------------|
| `ready`      | rank, pid, device, threads                                                                          |
| `step`       | rank, step (0-based), epoch, samples (of the global batch), microbatches, lr, grad_norm (or null),  |
|              | loss_sum and loss_count (null unless the rank computed the loss), peak_in_flight,                   |
|              | peak_activation_bytes, bytes_sent_between_stages, reduce_bytes_sent (this step's), window           |
|              | [start_ns, end_ns]; array `spans`: [n, 5] = kind, stage, microbatch, start_ns, end_ns (n = 0 where  |
|              | the step was not traced), and `pairs`: [k, 2], the rows of the two computations of each overlapped  |
|              | pair; rows (samples of the largest micro-batch so far), and array `layers`: [n, 4] = layer (the one |
|              | after the last is the loss), ns of its forwards, bytes that the largest micro-batch leaves there    |
|              | for its backward, bytes of its parameters (n = 0 where not traced). Of an asynchronous schedule a   |
|              | step is one update: also weight_versions (the most kept so far) and array `versions`: [n, 4] =      |
|              | stage, microbatch, and the optimizer steps done before the weights that its forward and its         |
|              | backward read. Where replicas are asynchronous also array `pushes`: [n, 5] = stage, replica that is |
|              | its server (or of a shard of it), the version of the weights that the gradient was computed from,   |
|              | the one it was applied to, ns that the replica was held back by `max_staleness`                     |
| `evaluation` | rank, step (optimizer steps done), samples, loss_sum, loss_count, correct, scored (null where the   |
|              | model has no accuracy); only from ranks that computed a loss                                        |
| `clock`      | rank, leader (the first rank with the same clock), offset_ns (to be added to its moments for those  |
|              | of rank 0's clock), uncertainty_ns, at_ns (its own moment); only where the two clocks are not one   |
| `memory`     | rank, and in bytes: parameters (with buffers; one version), gradients, buckets (that gradients are  |
|              | reduced in), optimizer_state; once, of the first step                                               |
| `checkpoint` | rank, step (optimizer steps done), error (what kept this rank from storing its part, or null),      |
|              | copy_ns (training waited), best_loss (of evaluations so far, or null), and where it was copied      |
|              | nbytes, write_ns, shard, tensors, update, extra: see `engine.checkpoint.manifest`                   |
| `log`        | rank, level (logging's number), logger, message                                                     |
| `error`      | rank, stage, microbatch, action (null where unknown), own (false: only a peer's death was seen),    |
|              | peer (the rank waited for, or null), type, message, traceback, time_ns                              |
| `done`       | rank, stopped (the steps after which it has ended because the run was asked to, or null)            |

`rank` is the world rank (`engine.ranks`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SPAN_COLUMNS = 5
START, END = 3, 4  # of them
VERSION_COLUMNS = 4
LAYER_COLUMNS = 4
PUSH_COLUMNS = 5


class Record(NamedTuple):
    """One message of a rank to the parent: its `kind`, plain data, and named int64 arrays."""

    kind: str
    meta: dict[str, Any]
    arrays: dict[str, npt.NDArray[np.int64]]


def encode(kind: str, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[np.int64]] | None = None) -> bytes:
    """Pack one record."""
    little = {name: np.ascontiguousarray(a, dtype="<i8") for name, a in (arrays or {}).items()}
    shapes = [[name, list(a.shape)] for name, a in little.items()]
    header = json.dumps({"kind": kind, "meta": dict(meta), "arrays": shapes}).encode()
    return b"".join([struct.pack("<I", len(header)), header, *(a.tobytes() for a in little.values())])


def decode(data: bytes) -> Record:
    """Unpack one record. Raises ValueError where the bytes are not one."""
    try:
        (length,) = struct.unpack_from("<I", data)
        header = json.loads(data[4 : 4 + length])
        arrays, at = {}, 4 + length
        for name, shape in header["arrays"]:
            size = math.prod(shape)
            found = np.frombuffer(data, dtype="<i8", count=size, offset=at).reshape(shape)
            arrays[name] = found.astype(np.int64, copy=False)  # of the record's own bytes, where these are in order
            at += 8 * size
        return Record(header["kind"], header["meta"], arrays)
    except RecursionError:
        raise ValueError("not a record: nested too deep") from None
    except (struct.error, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"not a record: {data[:40]!r}... ({error})") from error
