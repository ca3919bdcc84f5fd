"""The built wheel: it holds the code and the configuration, and `python -m engine` works from it in any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
PARTS = ("engine", "models", "conf")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built, without the network, from a copy of the checkout's packaged files."""
    source = tmp_path_factory.mktemp("source")
    for name in PARTS:
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(source / "dist")]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


def test_wheel_holds_the_code_the_configuration_and_the_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        path.relative_to(CHECKOUT).as_posix()
        for part in PARTS
        for path in (CHECKOUT / part).rglob("*")
        if path.suffix in {".py", ".yaml", ".js", ".css"}
    }
    assert "conf/config.yaml" in ours
    assert ours <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == set(PARTS)


def test_wheel_tells_tensorboard_of_the_tab(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (name,) = [name for name in content.namelist() if name.endswith("entry_points.txt")]
        told = content.read(name).decode()
    assert told.split() == [
        *("[console_scripts]", "pipeline-engine", "=", "engine.__main__:console"),
        *("[tensorboard_plugins]", "pipeline", "=", "engine.tab.plugin:PipelinePlugin"),
    ]


def test_plan_from_the_wheel_in_a_folder_of_its_own(wheel: Path, tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "somewhere else"
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    # A user's own conf/ must not be taken for ours.
    (folder / "conf").mkdir()
    command = [sys.executable, "-m", "engine", "mode=plan", "schedule=gpipe", "pipeline.ranks=4"]
    env = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run(
        [*command, "pipeline.microbatches=8", "hydra.run.dir=plan"],
        cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0F0" in (folder / "plan" / "program.csv").read_text()
    assert "0.27" in run.stdout  # 3/11, the bubble of four ranks and eight micro-batches

    where = [sys.executable, "-c", "import engine; print(engine.__file__)"]
    loaded = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == str(site / "engine" / "__init__.py")
