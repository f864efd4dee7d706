"""Pages in headless Chromium, over its DevTools protocol: what they say to the console, how wide they are, pictures."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
# Elements that reach beyond the window. What lies in a part that scrolls by itself is allowed, the part is not.
TOO_WIDE = """
[...document.querySelectorAll("body, body *")]
  .filter(e => !e.closest("svg *") && !e.parentElement.closest("SCROLLS"))
  .filter(e => {
    const box = e.getBoundingClientRect();
    return e.scrollWidth > e.clientWidth + 1 && e === document.body
      || box.width && (box.right > WIDTH + 0.5 || box.left < -0.5);
  })
  .map(e => `${e.tagName}.${e.className}`)
"""


@dataclass
class Browser:
    """One browser; a context manager. `problems` has errors and warnings of all pages so far."""

    problems: list[str] = field(default_factory=list)

    def __enter__(self) -> Browser:
        assert CHROMIUM
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def as_3_and_4() -> None:
            # Copies first: one of them may be 3 or 4 itself.
            ours = os.dup(to_read), os.dup(to_write)
            os.dup2(ours[0], 3)
            os.dup2(ours[1], 4)

        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]
        self._process = subprocess.Popen(
            [CHROMIUM, *options, f"--user-data-dir={self._folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=as_3_and_4,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, AssertionError):
            self.call("Browser.close")
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result; events that come meanwhile are looked at for problems."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path, size: str, dark: bool = False) -> None:
        """Loads a page at a size of the window, and waits until it is there."""
        width, height = SIZES[size]
        self._width = width
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=size == "phone",
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.absolute().as_uri())
        while True:
            event = self._next()
            self._note(event)
            if event.get("method") == "Page.loadEventFired":
                return

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def too_wide(self, scrolls: str = ".scroll") -> list[str]:
        """Elements wider than the page; scrolls: a selector of the parts that scroll by themselves."""
        return self.evaluate(
            TOO_WIDE.replace("WIDTH", str(self._width)).replace("SCROLLS", scrolls)
        )

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 20)
            assert piece, "Chromium ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method = event.get("method")
        params = event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and params["request"]["url"].startswith("http"):
            self.problems.append(f"it asks the network for {params['request']['url']}")
