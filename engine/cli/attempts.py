"""Going on in the folder of a run: the command line of the run before, and where its files go meanwhile.

    RUN/attempts/000/     what the first attempt left: configuration, log, summary, report
    RUN/                  the attempt that goes on
    RUN/checkpoints/      of all attempts

`resume=RUN` repeats the overrides of the run before; what is given beside it comes later, and so wins.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.checkpoint.names import AUTO
from engine.checkpoint.names import FOLDER as CHECKPOINTS
from engine.cli.arguments import UsageError
from engine.files import writing
from engine.weights.names import MODEL

CONFIG_NAME = "config.json"  # the resolved configuration of a run that was started
ATTEMPTS, HYDRA = "attempts", ".hydra"
_KEPT = {CHECKPOINTS, ATTEMPTS, HYDRA, MODEL}  # what an attempt finds where it was
_NOT_REPEATED = ("resume", "hydra.")


def going_on(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, completed where `resume=RUN` is among them.

    Overrides of the run are repeated, but for the keys that are given anew, and its folder is the run's. `resume=auto`
    changes nothing. UsageError for a folder that holds no run.
    """
    given = [word.partition("=")[2] for word in words if re.fullmatch(r"\+{0,2}resume=.*", word, re.DOTALL)]
    if not given or given[-1].strip("'\"") in ("null", AUTO, ""):
        return list(words)
    folder = Path(_unquoted(given[-1])).absolute()
    if not (folder / CONFIG_NAME).is_file():
        raise UsageError(f"resume={given[-1]}: {folder} is not the folder of a run that was started")
    keep_configuration(folder)
    own = {_key(word) for word in words}
    before = [word for word in _overrides(folder) if _key(word) not in own and not _key(word).startswith(_NOT_REPEATED)]
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    placed = [] if "hydra.run.dir" in own else [f"hydra.run.dir='{quoted}'"]
    return [*words, *before, *placed]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def keep_configuration(folder: Path) -> None:
    """Copy what Hydra wrote for the last attempt beside that attempt's files, before Hydra overwrites it."""
    place = _next(folder) / HYDRA
    if (folder / HYDRA).is_dir() and not place.exists():
        with writing(place):
            shutil.copytree(folder / HYDRA, place)


def put_away(folder: Path) -> Path | None:
    """Move what the attempt before has left into a folder of its own; return that, None where there was none."""
    if not (folder / CONFIG_NAME).exists():
        return None
    place = _next(folder)
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        for each in sorted(folder.iterdir()):
            if each.name not in _KEPT and each.name != CONFIG_NAME:
                each.rename(place / each.name)
        (folder / CONFIG_NAME).rename(place / CONFIG_NAME)  # last: it says that the attempt is put away
    return place


def may_go_on(resume: str | None, start_dir: Path, folder: Path) -> bool:
    """Whether a run may use a folder that holds one already."""
    return resume is not None and (resume == AUTO or (start_dir / resume).resolve() == folder.resolve())


def _next(folder: Path) -> Path:
    """Where the files of the last attempt go."""
    done = [each for each in (folder / ATTEMPTS).glob("*") if (each / CONFIG_NAME).is_file()]
    return folder / ATTEMPTS / f"{len(done):03d}"


def _overrides(folder: Path) -> list[str]:
    for place in (_next(folder) / HYDRA, folder / HYDRA):
        try:
            content = OmegaConf.to_container(OmegaConf.load(place / "overrides.yaml"))
        except (OSError, ValueError, OmegaConfBaseException):
            continue
        if isinstance(content, list):
            return [str(word) for word in content]
    return []


def _unquoted(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value
