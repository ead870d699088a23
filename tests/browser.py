"""A headless Chromium, driven by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")

START = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
"""Chromium reads commands from descriptor 3, and writes answers to descriptor 4."""


class Page:
    """One page of a browser.

    Attributes:
        log: What the page has logged as a warning or an error.
    """

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self._commands = commands
        self._answers = answers
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.log: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol; an error of it fails the test."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result

    def open(self, url: str) -> None:
        """Shows a page, and waits until it is loaded."""
        self._events.clear()
        self.call("Page.navigate", url=url)
        self.wait_loaded()

    def wait_loaded(self) -> None:
        """Waits until a page is loaded, unless one was since ``open`` or the last wait."""
        while not any(each["method"] == "Page.loadEventFired" for each in self._events):
            self._read()
        self._events.clear()

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression of JavaScript, once it is there if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key by its name, such as ``Tab``."""
        codes = {"Tab": 9, "Enter": 13}
        texts = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **texts)

    def set_size(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Sets the size of the window in CSS pixels, and the colours that its user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def take_picture(self) -> bytes:
        """Returns what the window shows, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _read(self) -> dict[str, Any]:
        content = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            content += byte
        found: dict[str, Any] = json.loads(content)
        if "method" in found:
            self._events.append(found)
            if found["method"] == "Log.entryAdded" and found["params"]["entry"]["level"] in ("warning", "error"):
                self.log.append(found["params"]["entry"]["text"])
        return found


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """Runs a browser with its profile in a folder."""
    read_end, commands = os.pipe()
    answers, write_end = os.pipe()
    ends = [str(read_end), str(write_end)]
    browser = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        ["bash", "-c", START, "bash", *ends, *browser], pass_fds=(read_end, write_end), stderr=subprocess.DEVNULL
    )
    os.close(read_end)
    os.close(write_end)
    try:
        with open(commands, "wb") as to_browser, open(answers, "rb") as from_browser:
            yield Page(to_browser, from_browser)
    finally:
        process.terminate()
        process.wait(30)
