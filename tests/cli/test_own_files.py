"""A user's own modules and folders, met by every process of a run: ranks and the processes of their data loaders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command import LIMIT_S, engine_process

MODEL = """
import helper
from torch import nn

def net(width):
    return nn.Sequential(nn.Linear(16, width), helper.Last(width, 10))
"""
HELPER = "from torch import nn\n\nclass Last(nn.Linear):\n    pass\n"
CONFIG = "_target_: models.own.net\nwidth: 8\nloss: {_target_: torch.nn.CrossEntropyLoss}\n"


@pytest.mark.process
@pytest.mark.slow
def test_a_folder_of_ones_own_is_seen_by_every_process(tmp_path: Path) -> None:
    """Folders called as ours are, one with an `__init__.py` that must not be taken for ours; loaders in processes."""
    files = {
        "models/__init__.py": "raise RuntimeError('this is not the package beside engine')",
        "models/own.py": MODEL,
        "helper.py": HELPER,
        "conf/config.yaml": "mode: shadowed",
        "mine/model/own.yaml": CONFIG,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = ["--config-dir", "mine", "model=own"]
    data = ["data=synthetic", "data.shape=[16]", "data.samples=32", "data.workers=2", "train.global_batch_size=8"]
    layout = ["data_parallel.replicas=2", "pipeline.microbatches=2", "train.steps=2", "seed=null"]
    process = engine_process([*own, *data, *layout], tmp_path)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (0, "")
    (folder,) = tmp_path.glob("runs/*/*")
    assert json.loads((folder / "summary.json").read_text())["samples"] == 16
    assert len(list(folder.glob("events*"))) == 1
    (seed,) = re.findall(r", seed (\d+)", (folder / "engine.log").read_text())  # drawn once, for all ranks
    assert json.loads((folder / "config.json").read_text())["seed"] == int(seed)
