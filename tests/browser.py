"""A headless Chromium, driven by the DevTools protocol through a pair of pipes: no driver, no port, no library.

(Protocol: "Chrome DevTools Protocol", the Chromium project. With --remote-debugging-pipe the browser reads commands
from descriptor 3 and writes answers to descriptor 4, JSON with a zero byte after each.)
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 30.0  # a hang, not a promise
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-features=Translate,OptimizationHints,MediaRouter", "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, " ": 32}


def find_chromium() -> str | None:
    """$CHROMIUM where set, else the first browser of the kind on the PATH."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One open page. What its scripts print as errors, and what they throw, is kept in `errors`."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._pending, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that come meanwhile are looked through for errors."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer" if not ready else "the browser has gone")
            self._pending += data
        first, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            url = told["entry"].get("url", "")
            if not url.endswith("/favicon.ico"):  # a browser's own wish, whenever it likes
                self.errors.append(f"{told['entry']['text']} {url}")

    # -- what a reader sees ------------------------------------------------------------------------------------------

    def open(self, address: str, width: int = 1400, height: int = 900, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        self.call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if details := answer.get("exceptionDetails"):
            raise AssertionError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression gives something true, and return that."""
        deadline = time.monotonic() + LIMIT_S
        while not (found := self.value(f"(() => {{ try {{ return {expression}; }} catch {{ return null; }} }})()")):
            if time.monotonic() > deadline:
                shown = self.value("document.body.innerText.slice(0, 600)")
                raise AssertionError(f"never true: {expression}\n{self.errors}\n{shown}")
            time.sleep(0.03)
        return found

    def picture(self) -> bytes:
        """What is on the screen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def saves_to(self, folder: Path) -> None:
        """Where files go that the page saves."""
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    # -- what a reader does ------------------------------------------------------------------------------------------

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        self.point(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, x: float, y: float, by: float) -> None:
        self.point(x, y)
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + by, y=y, button="left")
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x + by, y=y, button="left", clickCount=1)

    def wheel(self, x: float, y: float, by: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def press(self, key: str) -> None:
        known = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper()))}
        self.call("Input.dispatchKeyEvent", type="keyDown", **known)
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser of its own with one page, gone afterwards. `profile`: an empty folder for what it keeps."""
    program = find_chromium()
    assert program, "no Chromium"
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_commands, write_answers)]  # off the two below
    # The shell gives the descriptors the numbers that the browser expects.
    shell = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
    command = ["bash", "-c", shell, "bash", program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with (profile.parent / "browser.log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    for end in (read_commands, write_answers, *theirs):
        os.close(end)
    try:
        yield Page(commands, answers)
    finally:
        os.close(commands)  # the end of its commands is the end of the browser
        try:
            process.wait(LIMIT_S / 3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
