"""A headless Chromium, spoken to over its own pipe: no driver, no port, no package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
_ANSWER_LIMIT_S = 600.0


class Browser:
    """One process with one page."""

    def __init__(self, command: list[str]) -> None:
        to_child, from_us = os.pipe()
        to_us, from_child = os.pipe()

        # Chromium reads descriptor 3 and writes descriptor 4; the originals may lie there already, so they are moved up first.
        script = f'exec 8<&{to_child} 9>&{from_child}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._out, self._in = from_us, to_us
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its answer; events that come first are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _ANSWER_LIMIT_S
        while True:
            found = self._read(until)
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self.events.append(found)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            assert left > 0, "chromium did not answer"
            if select.select([self._in], [], [], left)[0]:
                part = os.read(self._in, 2**20)
                assert part, "chromium went away"
                self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, *, theme: str = "light", width: int = 1240, height: int = 1000) -> None:
        """Open a file and wait until its script is through."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.ask("Page.navigate", url="about:blank")  # so that the page before cannot answer for this one
        self.ask("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + _ANSWER_LIMIT_S
        while self.value("document.documentElement?.dataset?.ready") != "yes":
            assert time.monotonic() < until, f"the page's script did not end: {self.problems()}"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """What a piece of script gives."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """One event of the mouse."""
        button = "none" if kind == "mouseMoved" else "left"
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks, buttons=1)

    def click(self, selector: str) -> None:
        """A real click in the middle of an element."""
        x, y = self.middle(selector)
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where an element is, once it was scrolled to."""
        box = self.box(selector)
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def box(self, selector: str) -> dict[str, float]:
        """An element's place on the screen."""
        place = json.dumps(selector)
        found = self.value(
            f"(() => {{ const node = document.querySelector({place}); node.scrollIntoView({{block: 'center'}}); "
            "return node.getBoundingClientRect().toJSON(); })()"
        )
        assert found is not None, f"nothing is called {selector}"
        return found

    def problems(self) -> list[str]:
        """Console errors and exceptions so far."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address that was asked for."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in sent if url != "about:blank"]

    def screenshot(self, path: Path, *, is_whole_page: bool = True) -> None:
        """The page as a PNG."""
        clip = {}
        if is_whole_page:
            size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole_page, **clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            os.close(self._out)
        self._process.kill()
        self._process.wait()
        os.close(self._in)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, gone at the end."""
    assert CHROMIUM is not None, "asked for only where there is one"
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-extensions",
        "--disable-dev-shm-usage",
    ]
    command = [CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={folder / 'chromium'}", "about:blank"]
    opened = Browser(command)
    try:
        yield opened
    finally:
        opened.close()
