"""Debian's Chromium, and a page in it, spoken to over a pipe: no driver, no library, no port.

The browser reads commands (Chrome DevTools Protocol, JSON, ended by a NUL) from file descriptor 3 and writes answers
and events to 4.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CALL_SECONDS = 30.0
STOP_SECONDS = 10.0
FIRST_FREE_DESCRIPTOR = 10  # beyond those that a shell or the browser gives a meaning
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
Message = dict[str, Any]


def find_chromium() -> str:
    """Its path; installs it where that is allowed and it is missing."""
    found = shutil.which("chromium")
    if found is None and os.geteuid() == 0:
        packages = ("chromium", "fonts-liberation", "fonts-dejavu-core")
        subprocess.run(["apt-get", "update", "-qq"], check=True, timeout=300)
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(install, check=True, timeout=600, env=environment, stdout=subprocess.DEVNULL)
        found = shutil.which("chromium")
    assert found is not None, "chromium is not installed, and only root can install it"
    return found


class Browser:
    """One browser with a profile of its own. `page` opens a page; `close` ends everything."""

    def __init__(self, profile: Path):
        command = [find_chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        to_browser, self._write = _high(os.pipe())
        self._read, from_browser = _high(os.pipe())
        redirect = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        with (profile.parent / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", redirect, "browser", *command],
                pass_fds=(to_browser, from_browser),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._sending = threading.Lock()  # the thread that reads events answers some of them
        self._answers: dict[int, queue.Queue[Message]] = {}
        self._listeners: dict[str, Callable[[Message], None]] = {}
        self._thread = threading.Thread(target=self._listen, name="browser", daemon=True)
        self._thread.start()

    def call(self, method: str, parameters: Message | None = None, session: str = "") -> Message:
        """Wait for the answer. Raises RuntimeError with the browser's error."""
        number = self._send(method, parameters, session)
        try:
            answer = self._answers[number].get(timeout=CALL_SECONDS)
        except queue.Empty:
            raise TimeoutError(f"{method}: no answer within {CALL_SECONDS} s") from None
        finally:
            del self._answers[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error'].get('message')}")
        result: Message = answer["result"]
        return result

    def _send(self, method: str, parameters: Message | None, session: str) -> int:
        with self._sending:
            self._number = number = self._number + 1
            self._answers[number] = queue.Queue(1)
            message: Message = {"id": number, "method": method, "params": parameters or {}}
            if session:
                message["sessionId"] = session
            os.write(self._write, json.dumps(message).encode() + b"\0")
        return number

    def tell(self, method: str, parameters: Message, session: str) -> None:
        """Do not wait: called on the thread that reads events, which would wait for itself."""
        self._send(method, parameters, session)

    def hear(self, session: str, listener: Callable[[Message], None]) -> None:
        self._listeners[session] = listener

    def _listen(self) -> None:
        rest = b""
        while chunk := os.read(self._read, 1 << 16):
            *whole, rest = (rest + chunk).split(b"\0")
            for raw in whole:
                message = json.loads(raw)
                if "id" in message:
                    if message["id"] in self._answers:
                        self._answers[message["id"]].put(message)
                elif listener := self._listeners.get(message.get("sessionId", "")):
                    listener(message)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        self._thread.join(STOP_SECONDS)
        os.close(self._write)
        os.close(self._read)


def _high(pair: tuple[int, int]) -> tuple[int, int]:
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_DESCRIPTOR) for one in pair]
    for one in pair:
        os.close(one)
    return moved[0], moved[1]


class Page:
    """A page, with all it has complained about: console errors, exceptions, what its policy has forbidden."""

    def __init__(self, browser: Browser, *, width: int = 1360, height: int = 900, dark: bool = False):
        self._browser = browser
        target = browser.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._target = target
        attached = browser.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        self.complaints: list[str] = []
        self._fakes: dict[str, tuple[str, str]] = {}
        browser.hear(self._session, self._event)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.media(dark=dark)

    def call(self, method: str, **parameters: Any) -> Message:
        return self._browser.call(method, parameters, self._session)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'", f"{url} is loaded")

    def close(self) -> None:
        self._browser.call("Target.closeTarget", {"targetId": self._target})

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def media(self, *, dark: bool = False, still: bool = False) -> None:
        features = {"prefers-color-scheme": "dark" if dark else "light"}
        features["prefers-reduced-motion"] = "reduce" if still else "no-preference"
        named = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def fake(self, path: str, media_type: str, body: str) -> None:
        """From now on, requests that end in `path` get this answer instead of the server's."""
        self._fakes[path] = (media_type, body)
        self.call("Fetch.enable", patterns=[{"urlPattern": f"*{path}"} for path in self._fakes])

    def run(self, expression: str) -> Any:
        """Its value. Raises RuntimeError if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if thrown := answer.get("exceptionDetails"):
            raise RuntimeError(thrown.get("exception", {}).get("description") or thrown["text"])
        return answer["result"].get("value")

    def wait(self, expression: str, what: str, seconds: float = 30.0) -> None:
        """Polls until the expression is truthy."""
        deadline = time.monotonic() + seconds
        while not self.run(f"!!({expression})"):
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}; {self.complaints}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def focus(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")

    def type(self, selector: str, text: str, *, enter: bool = False) -> None:
        """As a keyboard would."""
        self.focus(selector)
        self.call("Input.insertText", text=text)
        if enter:
            self.press("Enter", "\r")

    def press(self, key: str, text: str = "") -> None:
        common: Message = {"key": key, "code": key, **({"windowsVirtualKeyCode": 13} if text == "\r" else {})}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """In the middle of the element, by mouse: what lies above it would get the click."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _event(self, message: Message) -> None:
        method, parameters = message["method"], message["params"]
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value")) for one in parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            entry = parameters["entry"]
            self.complaints.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")
        elif method == "Fetch.requestPaused":
            self._answer(parameters)

    def _answer(self, parameters: Message) -> None:
        url = parameters["request"]["url"]
        media_type, body = next(fake for path, fake in self._fakes.items() if url.endswith(path))
        told = {
            "requestId": parameters["requestId"],
            "responseCode": 200,
            "responseHeaders": [{"name": "content-type", "value": media_type}],
            "body": base64.b64encode(body.encode()).decode(),
        }
        self._browser.tell("Fetch.fulfillRequest", told, self._session)


@contextlib.contextmanager
def open_browser(directory: Path) -> Iterator[Browser]:
    profile = directory / "profile"
    profile.mkdir(parents=True)
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
