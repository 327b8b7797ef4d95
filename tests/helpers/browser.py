"""Pages as a person sees them: headless Chromium, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--remote-debugging-pipe",
]
_PATIENCE = 60.0


@dataclass
class Opened:
    """A page that is open.

    ``console`` holds all that the page said or threw, ``requests`` the addresses it asked for besides its own, those among
    them that its security policy refused.
    """

    browser: Browser
    session: str
    address: str
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.browser.call("Runtime.evaluate", self.session, expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script!r} threw {_thrown(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Text of the first element, every run of white space as one blank."""
        return " ".join(self.run(f"document.querySelector({json.dumps(selector)}).textContent").split())

    @property
    def dom(self) -> str:
        return self.run("document.documentElement.outerHTML")

    def screenshot(self, path: Path) -> Path:
        """The whole height of the page as PNG."""
        shot = self.browser.call("Page.captureScreenshot", self.session, format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def move(self, x: float, y: float) -> None:
        """The pointer to a place of the view."""
        self.browser.call("Input.dispatchMouseEvent", self.session, type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """A key, named as in KeyboardEvent."""
        self.browser.call("Input.dispatchKeyEvent", self.session, type="keyDown", key=key)

    def notice(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.console.append(_thrown(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            said = " ".join(str(a.get("value", a.get("description"))) for a in event["args"])
            self.console.append(f"{event['type']}: {said}")
        elif method == "Log.entryAdded":
            self.console.append(f"{event['entry']['level']}: {event['entry']['text']}")
        elif method == "Network.requestWillBeSent" and event["request"]["url"] != self.address:
            self.requests.append(event["request"]["url"])


class Browser:
    """Chromium with a fresh profile; a context manager."""

    def __enter__(self) -> Browser:
        if CHROMIUM is None:
            pytest.skip("no Chromium on this machine: apt-get install chromium")
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        (their_in, self._out), (self._in, their_out) = (_high(os.pipe()), _high(os.pipe()))
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        # Chromium reads commands from descriptor 3 and answers on 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "bash", *command],
            pass_fds=(their_in, their_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._number, self._rest, self._pages = 0, b"", {}
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def open_page(self, path: Path, width: int = 1200, dark: bool = False) -> Opened:
        """Open a file and wait until it is loaded and drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Opened(self, session, path.resolve().as_uri())
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable", session)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[theme])
        self.call(
            "Emulation.setDeviceMetricsOverride", session, width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", session, url=page.address)
        page.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return page

    def close_page(self, page: Opened) -> None:
        self.call("Page.close", page.session)
        del self._pages[page.session]

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what pages tell in between is handed to them."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        _write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if answer.get("sessionId") in self._pages and "method" in answer:
                self._pages[answer["sessionId"]].notice(answer["method"], answer["params"])

    def _receive(self, method: str) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium did not answer {method} within {_PATIENCE:g} s"
            read = os.read(self._in, 1 << 20)
            assert read, f"Chromium ended during {method}"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def _high(pipe: tuple[int, int]) -> tuple[int, int]:
    """Descriptors that do not stand where Chromium's are put."""
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipe)
    for end in pipe:
        os.close(end)
    return moved


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _thrown(details: dict[str, Any]) -> str:
    return f"thrown: {details.get('exception', {}).get('description', details['text'])}"
