"""Write the weights of a run as one safetensors file: `python -m engine.export RUN OUT`.

RUN is a run's folder: its model.safetensors, and where it has none (it was killed, or `save=never`) its newest whole
checkpoint; or a checkpoint's folder; or whatever else `init.weights` takes. OUT is a file that is not there yet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.console import forgiving
from engine.files import UnwritableError


def main(arguments: Sequence[str] | None = None) -> int:
    """Export what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.export", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or a file or folder of weights")
    parser.add_argument("out", type=Path, metavar="OUT", help="the safetensors file to write")
    given = parser.parse_args(arguments)
    with forgiving():
        try:
            print(export(given.run, given.out))
        except (ValueError, UnwritableError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def export(run: Path, out: Path) -> str:
    """Write the weights of `run` to `out`; return a line about them. ValueError where there are none."""
    if out.exists():
        raise ValueError(f"{out} is there already: give another name, or remove it")
    from engine.weights.model_file import unstorable, write_tensors

    taken, state = _state(run)
    if wrong := unstorable(state):
        raise ValueError(f"safetensors cannot hold {wrong}")
    write_tensors(out, state, {})
    nbytes = sum(tensor.nbytes for tensor in state.values())
    return f"{out}: {len(state)} tensors, {nbytes / 1e6:.1f} MB, from {taken}"


def _state(run: Path) -> tuple[Path, dict[str, Any]]:
    """Where the weights are, and the weights, name -> tensor; ValueError where there are none."""
    from engine.checkpoint import store
    from engine.checkpoint.manifest import NAME
    from engine.checkpoint.names import FOLDER
    from engine.checkpoint.reader import Reader
    from engine.weights.names import MODEL
    from engine.weights.source import open_weights

    if (run / NAME).is_file():
        checkpoint = store.whole(run)
        return run, Reader(*checkpoint).state()
    if not (run / MODEL).is_file() and (run / FOLDER).is_dir():
        passed_over: list[str] = []
        found = store.newest(run / FOLDER, passed_over.append)
        if found is None:
            raise ValueError(f"{run} has neither {MODEL} nor a whole checkpoint. {'; '.join(passed_over)}".rstrip(". "))
        return found.folder, Reader(*found).state()
    source = open_weights(run)
    return run, dict(source.read(list(source.shapes)))


if __name__ == "__main__":
    sys.exit(main())
