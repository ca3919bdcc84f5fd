"""The reference pages: what is committed is what the code writes, and runs leave the files and tags that they list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import ROOT, Engine, engine  # noqa: F401
from scripted import script
from tensorboards import tags_of

reference = script("reference")
ROWS = [row for rows in reference.TAGS.values() for row in rows]
TINY = [
    "model=mlp", "model.features=3072", "model.hidden=8", "data.size=32", "launch=threads", "train.steps=3",
    "pipeline.microbatches=2", "train.global_batch_size=8", "hydra.run.dir=run",
]  # fmt: skip
RUNS = {
    "replicas": ["data_parallel.replicas=2", "train.clip_norm=1", "checkpoint.every_steps=2"],
    "async": ["data_parallel.replicas=2", "data_parallel.mode=async", "allreduce=parameter_server"],
    "pipedream": ["schedule=pipedream", "train.steps=8"],
}


@pytest.mark.parametrize("name", reference.PAGES)
def test_pages_are_what_the_code_writes(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == reference.PAGES[name](), "run scripts/reference"


def pattern(tag: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{[rs]\\\}", r"\\d+", re.sub(r"\\\{(name|bar|kind)\\\}", r"\\w+", re.escape(tag))))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_runs_leave_the_tags_and_files_that_the_pages_list(engine: Engine, tmp_path: Path) -> None:  # noqa: F811
    seen: set[str] = set()
    names: set[str] = set()
    for name, arguments in RUNS.items():
        said = engine(*TINY, *arguments, f"hydra.run.dir={name}")
        assert said.code == 0, said.err
        names |= {re.sub(r"(tfevents).*", r"\1.*", path.name) for path in (tmp_path / name).iterdir()}
        seen |= {
            tag for tag in tags_of(tmp_path / name) if not tag.startswith(("_hparams_", "custom_scalars", "pipeline/"))
        }
    unlisted = {
        tag for tag in seen if not any(pattern(row.tag).fullmatch(re.sub(r"/text_summary$", "", tag)) for row in ROWS)
    }
    assert unlisted == set()
    listed = {
        row.tag
        for row in ROWS
        if not any(pattern(row.tag).fullmatch(re.sub(r"/text_summary$", "", tag)) for tag in seen)
    }
    assert listed == set()
    files = {row.name.rstrip("/"): row.when for row in reference.FILES["Of a run"]}
    assert names <= set(files)
    assert {file for file, when in files.items() if when in ("failed", "`plan.compare`", "`resume`")} == set(
        files
    ) - names
