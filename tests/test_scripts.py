"""scripts/: the virtual environment is made once, again after a change or an interruption, and by one caller at a time.

Python and pip are stood in for by a shell script that logs how it was called, so nothing is downloaded here.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[1]

# As python3 it makes a venv that holds a copy of itself; as the venv's python it logs folder and arguments.
STAND_IN = """#!/bin/bash
case "$1" in
    -c) exec "{python}" "$@" ;;
    --version) echo "Python stand-in" ;;
    -m) if [[ "$2" == venv ]]; then mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python"; fi
        [[ "$*" == *"pip"*"--version" ]] && exit 0
        echo "$PWD|$*" >> "{log}"
        if [[ "$2" == pip ]]; then sleep 0.1; [[ ! -e "{broken}" ]]; fi ;;
esac
"""


class Checkout:
    """A folder with our scripts, and a PATH on which python3 is the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"  # a blank in the path
        self.log, self.broken, self.bin = folder / "log", folder / "broken", folder / "bin"
        self.bin.mkdir()
        shutil.copytree(CHECKOUT / "scripts", self.root / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(CHECKOUT / name, self.root)
        stand_in = STAND_IN.format(python=sys.executable, log=self.log, broken=self.broken)
        (self.bin / "python3").write_text(stand_in)
        (self.bin / "python3").chmod(0o755)
        self.env = {**os.environ, "PATH": f"{self.bin}:/usr/bin:/bin"}
        self.env.pop("PYTHON", None)

    def start(self, script: str, *args: str, cwd: Path | None = None, **options: Any) -> subprocess.Popen[str]:
        command = [str(self.root / "scripts" / script), *args]
        pipe, folder = subprocess.PIPE, cwd or self.root
        return subprocess.Popen(command, cwd=folder, env=self.env, stdout=pipe, stderr=pipe, text=True, **options)

    def call(self, script: str, *args: str, cwd: Path | None = None) -> tuple[int, str]:
        process = self.start(script, *args, cwd=cwd)
        out, err = process.communicate(timeout=60)
        return process.returncode, out + err

    def calls(self, word: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if word in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.slow
def test_first_call_installs_and_second_does_not(checkout: Checkout) -> None:
    code, said = checkout.call("run", "schedule=gpipe")
    assert code == 0
    assert "making" in said
    assert "installing" in said
    code, said = checkout.call("run", "schedule=gpipe")
    assert (code, said) == (0, "")
    assert len(checkout.calls("-m venv")) == 1
    assert len(checkout.calls("[dev]")) == 1
    assert all("-c" in line and "constraints.txt" in line for line in checkout.calls("-m pip"))


@pytest.mark.slow
def test_run_passes_arguments_on_in_the_callers_folder(checkout: Checkout, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    checkout.call("run", "schedule=1f1b", "model.name=a b", cwd=folder)
    assert checkout.calls("-m engine") == [f"{folder}|-m engine schedule=1f1b model.name=a b"]


@pytest.mark.slow
def test_test_passes_arguments_on_in_the_checkout(checkout: Checkout, tmp_path: Path) -> None:
    checkout.call("test", "-k", "ring", cwd=tmp_path)
    checkout.call("test", "-n", "4")
    checkout.call("test", "tests/test_x.py::test_y")
    assert checkout.calls("-m pytest") == [
        f"{checkout.root}|-m pytest {arguments}"
        for arguments in ("-n 2 --dist loadfile -k ring", "-n 4", "tests/test_x.py::test_y")
    ]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
@pytest.mark.slow
def test_a_change_of_the_requirements_installs_again_into_the_same_environment(checkout: Checkout, name: str) -> None:
    checkout.call("run")
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    checkout.call("run")
    assert len(checkout.calls("[dev]")) == 2
    assert len(checkout.calls("-m venv")) == 1


@pytest.mark.slow
def test_a_failed_install_ends_the_call_and_is_redone(checkout: Checkout) -> None:
    checkout.broken.touch()
    code, _ = checkout.call("run")
    assert code != 0
    assert not checkout.calls("-m engine")
    checkout.broken.unlink()
    code, said = checkout.call("run")
    assert code == 0
    assert "installing" in said
    assert checkout.calls("-m engine")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.slow
def test_a_long_install_says_what_it_does_and_shows_its_words_only_where_it_fails(
    checkout: Checkout, fails: bool
) -> None:
    library = checkout.root / "scripts" / "lib.sh"
    library.write_text(library.read_text().replace("say_every_s=4", "say_every_s=1"))
    text = (checkout.bin / "python3").read_text()
    speaking = "echo first words; echo Downloading torch; sleep 1.6;"
    (checkout.bin / "python3").write_text(text.replace("sleep 0.1;", speaking))
    if fails:
        checkout.broken.touch()
    code, said = checkout.call("run")
    assert (code != 0) == fails
    assert " 1 s: Downloading torch" in said
    assert ("first words" in said) == fails
    assert ("did not succeed" in said) == fails
    assert (checkout.root / ".venv" / "install.log").read_text() == "first words\nDownloading torch\n"


def test_an_interrupted_install_leaves_nobody_talking(checkout: Checkout, tmp_path: Path) -> None:
    busy = tmp_path / "busy"  # pip is running by then, and not the shell before it
    pip = f"from pathlib import Path; import time; Path('{busy}').touch(); time.sleep(60)"
    text = (checkout.bin / "python3").read_text()
    (checkout.bin / "python3").write_text(text.replace("sleep 0.1;", f'exec "{sys.executable}" -c "{pip}";'))
    # Whoever started the tests in the background may have them ignore Ctrl-C, and what they start with them.
    listening = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = checkout.start("run", start_new_session=True, preexec_fn=listening)
    try:
        while not busy.exists():
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
        process.communicate(timeout=60)  # ends once nobody holds the pipe any more, the narrator included
    finally:
        process.kill()
    assert process.returncode != 0
    assert not (checkout.root / ".venv" / ".installed").exists()


def test_what_builds_from_source_is_pinned_and_there_before_it_is_needed(checkout: Checkout) -> None:
    """antlr4-python3-runtime comes as source. A new environment has no wheel, from Python 3.12 on no setuptools."""
    pins = (CHECKOUT / "constraints.txt").read_text()
    assert {"setuptools", "wheel", "hatchling"} <= {line.partition("==")[0] for line in pins.splitlines()}
    checkout.call("run")
    first, second = checkout.calls("-m pip")
    assert all(f" {name}" in first for name in ("setuptools", "wheel", "hatchling"))
    assert "--no-build-isolation" not in first
    assert "--no-build-isolation" in second


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_pins_that_come_as_source_build_in_an_environment_with_neither_setuptools_nor_wheel(
    tmp_path: Path,
) -> None:
    venv = tmp_path / "a venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "uninstall", "-qq", "-y", "setuptools", "wheel"], check=True, capture_output=True)
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "HOME": str(home), "PIP_NO_CACHE_DIR": "1"}
    for words in ("hatchling setuptools wheel", "--no-build-isolation --no-deps antlr4-python3-runtime"):
        command = [*pip, "install", "-q", "-c", str(CHECKOUT / "constraints.txt"), *words.split()]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if "Failed to establish a new connection" in done.stderr:
            pytest.skip("no package index can be reached")
        assert done.returncode == 0, done.stderr
    code = "import antlr4, sys; print(antlr4.__file__)"
    found = subprocess.run([pip[0], "-c", code], capture_output=True, text=True, check=True).stdout
    assert str(venv) in found


@pytest.mark.slow
def test_an_install_that_breaks_an_older_one_is_redone(checkout: Checkout) -> None:
    checkout.call("run")
    (checkout.root / "constraints.txt").write_text("torch==2.12\n")
    checkout.broken.touch()
    checkout.call("run")
    checkout.broken.unlink()
    shutil.copy(CHECKOUT / "constraints.txt", checkout.root)  # back to what the older stamp was for
    _, said = checkout.call("run")
    assert "installing" in said


@pytest.mark.slow
def test_simultaneous_calls_install_once(checkout: Checkout) -> None:
    processes = [checkout.start("run", f"seed={i}") for i in range(4)]
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum("installing" in text for text in said) == 1
    assert len(checkout.calls("[dev]")) == 1
    assert len(checkout.calls("-m engine")) == 4


def test_no_python_is_a_clear_error(checkout: Checkout) -> None:
    (checkout.bin / "python3").write_text("#!/bin/bash\nexit 1\n")
    for name in ("bash", "dirname", "cat", "cksum"):
        (checkout.bin / name).symlink_to(shutil.which(name) or "")
    checkout.env["PATH"] = str(checkout.bin)
    code, said = checkout.call("run")
    assert code != 0
    assert "no Python 3.11 or newer" in said
    assert "PYTHON=" in said
    assert not checkout.log.exists()


@pytest.mark.slow
def test_a_named_python_comes_first(checkout: Checkout) -> None:
    named = checkout.bin / "my-python"
    (checkout.bin / "python3").rename(named)
    (checkout.bin / "python3").write_text("#!/bin/bash\nexit 1\n")
    checkout.env["PYTHON"] = str(named)
    code, _ = checkout.call("run")
    assert code == 0


@pytest.mark.parametrize(
    "script",
    [*(f"scripts/{name}" for name in ("run", "test", "check", "bench", "pictures", "reference", "outputs")), ".ci/run"],
)
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = CHECKOUT / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert "set -euo pipefail" in path.read_text()


def test_ci_is_a_newcomer(tmp_path: Path) -> None:
    """It clones, empties the home, forbids the cache, and calls there what README says, once."""
    source = tmp_path / "source"
    (source / "scripts").mkdir(parents=True)
    (source / ".ci").mkdir()
    shutil.copy(CHECKOUT / ".ci" / "run", source / ".ci")
    for name in (".ci/browser", "scripts/run", "scripts/check", "scripts/test"):
        seen = '$PWD|$HOME|$(ls -A "$HOME" | wc -l)|$PIP_NO_CACHE_DIR|$*'
        (source / name).write_text(f'#!/bin/bash\necho "{name}|{seen}"\n')
        (source / name).chmod(0o755)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], cwd=source, check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": "x"}
    done = subprocess.run([".ci/run"], cwd=source, env=env, capture_output=True, text=True, check=True)
    browser, run, check, test = (line.split("|") for line in done.stdout.splitlines())
    assert [run[-1], check[-1], test[-1]] == ["schedule=gpipe", "", "--all --durations=15"]
    assert browser[1] == str(source)
    assert {each[1] for each in (run, check, test)} == {run[1]} and not Path(run[1]).is_relative_to(source)
    assert run[2] != os.environ["HOME"] and run[3] == "0" and run[4] == "1"
    assert not Path(run[1]).exists()


APT = """#!/bin/bash
if [[ "$1" == install && {works} == yes ]]; then printf '#!/bin/bash\n' >"{bin}/chromium"; chmod +x "{bin}/chromium"; fi
[[ {works} == yes ]]
"""


@pytest.mark.parametrize(
    ("user", "works", "said"), [("0", "yes", ""), ("0", "no", "skipped"), ("1000", "yes", "skipped")]
)
def test_ci_installs_a_browser_where_it_can_and_says_where_it_cannot(
    user: str, works: str, said: str, tmp_path: Path
) -> None:
    for name, text in {"apt-get": APT.format(works=works, bin=tmp_path), "id": f"#!/bin/bash\necho {user}\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "chmod"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    script = CHECKOUT / ".ci" / "browser"
    assert os.access(script, os.X_OK)
    command = ["/bin/bash", str(script)]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and said in done.stderr, done.stderr
    assert (tmp_path / "chromium").exists() == (not said)
