"""A Chromium without a window, driven by chromedriver's own protocol: no package is needed."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-unsafe-swiftshader", "--hide-scrollbars"),  # WebGL without a graphics card
)
STARTED = re.compile(r"started successfully on port (\d+)")


class Page:
    """The page that a browser shows.

    Args:
        session: the address of the browser's session.
    """

    def __init__(self, session: str) -> None:
        self.session = session

    def post(self, command: str, **values: Any) -> Any:
        return ask(f"{self.session}/{command}", values)

    def open(self, path: Path) -> None:
        self.post("url", url=path.resolve().as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns, such as ``return document.title``."""
        return self.post("execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, *arguments: Any, seconds: float = 30) -> Any:
        """Run a script until what it returns is true, and return that."""
        end = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)
        return found

    def click(self, selector: str) -> None:
        """A true click, in the middle of an element that can be seen."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        found = self.post("element", using="css selector", value=selector)
        self.post(f"element/{next(iter(found.values()))}/click")

    def errors(self) -> list[str]:
        """What the console has been told since the last call, but for advice."""
        entries = self.post("se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(ask(f"{self.session}/screenshot")))

    def resize(self, width: int, height: int, is_dark: bool = False) -> None:
        """The size of the page in pixels, smaller than a window may be, and its scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        for name, values in (
            ("setDeviceMetricsOverride", size),
            ("setEmulatedMedia", {"features": [scheme]}),
        ):
            self.post("goog/cdp/execute", cmd=f"Emulation.{name}", params=values)


def ask(address: str, values: dict[str, Any] | None = None, method: str | None = None) -> Any:
    data = None if values is None else json.dumps(values).encode()
    request = Request(address, data, {"Content-Type": "application/json"}, method=method)
    with urlopen(request, timeout=120) as answer:
        return json.load(answer)["value"]


@contextmanager
def browser() -> Iterator[Page]:
    """A new browser with a profile of its own; both end with the block."""
    assert DRIVER
    with tempfile.TemporaryDirectory() as profile:
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            assert driver.stdout is not None
            started = next(filter(None, map(STARTED.search, driver.stdout)))
            root = f"http://127.0.0.1:{started[1]}/session"
            options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            found = ask(root, {"capabilities": {"alwaysMatch": wanted}})
            session = f"{root}/{found['sessionId']}"
            yield Page(session)
            ask(session, method="DELETE")
        finally:
            driver.terminate()
            driver.wait()
            driver.stdout.close()
