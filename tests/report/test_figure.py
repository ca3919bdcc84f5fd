"""matplotlib as a guest: it says nothing, leaves nothing, reads nothing of the user's, and gives everything back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import json, logging, os, sys
from engine.report.pictures.waterfall import draw_bars
from engine.report.pictures.figure import preload
logging.basicConfig(level=logging.INFO)
before = dict(os.environ)
preload()
png = draw_bars({"work": 1.0}, "$a_b$").png
import matplotlib
print(json.dumps({
    "png": png.hex(), "tex": matplotlib.rcParams["text.usetex"], "same": dict(os.environ) == before,
    "modules": [name for name in ("matplotlib.pyplot", "tkinter", "IPython") if name in sys.modules],
}))
"""


def drawn(tmp_path: Path, home: str) -> dict[str, object]:
    """What a process says that draws in a folder with settings of matplotlib's that would not do."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfigure.facecolor: red\nfont.size: 99\n")
    aside = tmp_path / "temporary"
    aside.mkdir(exist_ok=True)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": home, "TMPDIR": str(aside)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert list(aside.iterdir()) == []
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_it_says_and_leaves_nothing_wherever_home_is(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    there, missing = drawn(tmp_path, str(home)), drawn(tmp_path, "/nowhere/at/all")
    assert list(home.iterdir()) == []
    assert there == missing and there["same"] and there["modules"] == []
    assert str(there["png"]).startswith(b"\x89PNG".hex())


@pytest.mark.parametrize("usual", [True, False])
def test_settings_are_given_back(usual: bool) -> None:
    import matplotlib

    from engine.report.pictures.waterfall import draw_bars

    with matplotlib.rc_context({} if usual else {"font.size": 33, "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        picture = draw_bars({"work": 1.0}, "title")
        assert picture.png and picture.svg and dict(matplotlib.rcParams) == before
