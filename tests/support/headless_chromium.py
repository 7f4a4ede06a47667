"""A headless Chromium that tests control through its DevTools pipe, without a driver, a library or a port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """The path of an installed browser; ``CHROMIUM`` names another one."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *NAMES))), None)


class Chromium:
    """One page of a running browser."""

    def __init__(self, commands: int, answers: int) -> None:
        """``commands`` and ``answers`` are our ends of the pipes; the browser's ends are 3 and 4."""
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        """The page's log messages, warnings and exceptions."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol; returns its answer."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        event = json.loads(message)
        if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(json.dumps(event["params"]))
        return event

    def open(
        self, page: Path, *, width: int = 1280, height: int = 1000, dark: bool = False, fragment: str = ""
    ) -> None:
        """Load a page into a window of the given size, and wait until it has loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.messages.clear()
        self.call("Page.navigate", url=page.absolute().as_uri() + fragment)
        deadline = time.monotonic() + 60
        while self.run("document.readyState !== 'complete' || location.protocol !== 'file:'"):
            assert time.monotonic() < deadline, "the page does not load"

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key at the focused element."""
        code = {"Enter": 13, "Tab": 9, " ": 32}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            given = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **given)

    def type(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=False)["data"]))


@contextlib.contextmanager
def chromium(program: str) -> Iterator[Chromium]:
    """Start a browser, and end it."""
    browser_reads, commands = os.pipe()
    answers, browser_writes = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser expects its ends of the pipes as descriptors 3 and 4, whatever they are here.
        shell = f'exec "$0" "$@" 3<&{browser_reads} 4>&{browser_writes}'
        process = subprocess.Popen(
            ["bash", "-c", shell, program, *options, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(browser_reads, browser_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            yield Chromium(commands, answers)
        finally:
            process.terminate()
            process.wait(timeout=60)
            os.close(commands)
            os.close(answers)
