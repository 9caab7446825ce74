"""A headless Chromium driven over its DevTools pipe; needs no driver package."""

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Path of an installed Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a fresh browser; collects what it logs, throws and asks for."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._ids = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        to_read, self._to_browser = os.pipe()
        self._from_browser, to_write = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        launch = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        command = [
            *("bash", "-c", launch, "launch", str(find_chromium())),
            *("--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--no-first-run", "--mute-audio"),
            *("--disable-background-networking", "--disable-component-update"),
            *(f"--user-data-dir={profile}", f"--window-size={width},{height}"),
            *("--remote-debugging-pipe", "about:blank"),
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)

    def __enter__(self) -> "Page":
        pages: list[Any] = []
        while not pages:
            targets = self.call("Target.getTargets")["targetInfos"]
            pages = [target for target in targets if target["type"] == "page"]
        attached = self.call(
            "Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._to_browser)
        os.close(self._from_browser)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def call(self, method: str, timeout: float = 30, **params: Any) -> dict[str, Any]:
        """Send one DevTools command and wait for its answer."""
        number = next(self._ids)
        command = {"id": number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive(timeout)
            if message.get("id") != number:
                self._note(message)
            elif "error" in message:
                raise RuntimeError(f"{method}: {message['error']}")
            else:
                return dict(message["result"])

    def open(self, url: str) -> None:
        """Load a page and wait until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.wait(
            "document.readyState === 'complete' && location.href !== 'about:blank'"
        )

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, condition: str, timeout: float = 20) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + timeout
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press and release a key, as a person would."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, selector: str) -> None:
        """Click into the middle of the first element that matches."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                clickCount=1,
            )

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _receive(self, timeout: float) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select(
                [self._from_browser], [], [], max(0.0, end - time.monotonic())
            )
            data = os.read(self._from_browser, 1 << 20) if ready else b""
            if not data:
                state = "ended" if ready else f"silent for {timeout} s"
                raise RuntimeError(f"the browser is {state}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(f"{params['type']}: {params['args']}")
        elif method == "Log.entryAdded":
            self.problems.append(str(params["entry"]))
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {params}")
