"""A real headless Chromium, driven through ChromeDriver's own protocol (W3C WebDriver)."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.conftest import free_port

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
_FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
_FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
_FLAGS += ["--disable-dev-shm-usage", "--hide-scrollbars"]


class Browser:
    def __init__(self, width: int, height: int) -> None:
        self._size = width, height

    def __enter__(self) -> "Browser":
        port = free_port()
        self._profile = tempfile.TemporaryDirectory()
        self._base = f"http://127.0.0.1:{port}"
        assert DRIVER is not None
        self._process = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_until_ready()
        width, height = self._size
        options = {
            "binary": CHROMIUM,
            "args": [
                *_FLAGS,
                f"--window-size={width},{height}",
                f"--user-data-dir={self._profile.name}",
            ],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._base += f"/session/{answer['sessionId']}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._call("DELETE", "", None)
        finally:
            self._process.terminate()
            self._process.wait(10)
            self._profile.cleanup()

    def open(self, path: Path) -> None:
        self._call("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def theme(self, name: str) -> None:
        """As if the reader's system were light or dark, once the page has drawn itself so."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._call("POST", "/goog/cdp/execute", command)
        self.wait_until_drawn(name)

    def wait_until_drawn(self, theme: str) -> None:
        end = time.monotonic() + 30
        while self.run("return document.documentElement.dataset.drawn") != theme:
            assert time.monotonic() < end, f"the page did not draw itself in the {theme} theme"
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """What the page has complained about."""
        log = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path) -> bytes:
        """The whole page, whatever its length."""
        command = {"cmd": "Page.captureScreenshot", "params": {"captureBeyondViewport": True}}
        picture = base64.b64decode(self._call("POST", "/goog/cdp/execute", command)["data"])
        path.write_bytes(picture)
        return picture

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                if self._call("GET", "/status", None)["ready"]:
                    return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("chromedriver does not answer")

    def _call(self, verb: str, place: str, content: Any) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self._base + place, data=data, method=verb)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]
