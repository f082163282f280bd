"""A headless Chromium, controlled over a pipe.

The pipe (``--remote-debugging-pipe``) is open to this process alone: no page and no other process
of the sandbox can reach the browser's controls. Pages are observed from an isolated world, whose
JavaScript objects a page cannot replace, and operated by real input events.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "MINI_PROGRAM_BROWSER"
"""Environment variable of the instance with the path of another Chromium."""
PLACES: Final = (
    "/usr/lib/chromium/chromium",
    "/usr/lib64/chromium-browser/chromium-browser",
    "/opt/google/chrome/chrome",
    "/usr/bin/chromium",
    "/usr/bin/chromium-browser",
    "/usr/bin/google-chrome",
)
START_S: Final = 60.0
ANSWER_S: Final = 60.0
"""How long a page may take to load, or to answer a command."""
ANSWER_CPU_S: Final = 5.0
"""CPU time that it may use for that. A script that does not end uses it up; a busy machine does not
make an honest page fail."""
_LOOK_S: Final = 0.25
"""How often the CPU time is looked at."""
MAX_MESSAGES: Final = 200
MAX_MESSAGE_CHARACTERS: Final = 500
_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
_WORLD: Final = "mini-program"

_FLAGS: Final = (
    "--headless",
    "--remote-debugging-pipe",
    # The sandbox around the whole environment stays; Chromium's own needs namespaces of its own.
    "--no-sandbox",
    "--no-zygote",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-service-autorun",
    "--no-startup-window",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-crash-reporter",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-features=Translate,MediaRouter,OptimizationHints,DialMediaRouteProvider",
    "--disable-popup-blocking",
    "--disable-quic",
    "--disable-renderer-backgrounding",
    "--disable-sync",
    "--block-new-web-contents",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--mute-audio",
    "--password-store=basic",
    "--use-mock-keychain",
    "--lang=en-US",
)


class NoBrowser(RuntimeError):
    """The sandbox has no Chromium, or it does not start."""


class PageFailed(Exception):
    """The page did something that ends its use: its scripts do not end, or it crashed."""


@dataclass(frozen=True)
class Message:
    """Something that a page reported.

    Attributes:
        kind: ``log``, ``warning``, ``error`` …, as the console names it; ``exception``;
            ``request``, which failed; or ``dialog``, which was accepted.
        text: The message.
        file: The script, as a path of the application; empty if unknown.
        line: From 1; 0 if unknown.
        column: From 1; 0 if unknown.
    """

    kind: str
    text: str
    file: str = ""
    line: int = 0
    column: int = 0

    @property
    def is_error(self) -> bool:
        """Whether a developer would have to act."""
        return self.kind in {"error", "assert", "exception", "request"}


def find() -> Path | None:
    """Return the path of Chromium; None if there is none.

    Fixed places rather than PATH, so that the grader does not run a program of the agent.
    """
    named = os.environ.get(VARIABLE)
    for place in (named,) if named else PLACES:
        if os.access(place, os.X_OK):
            return Path(place)
    return None


def require() -> Path:
    """Return the path of Chromium.

    Raises:
        NoBrowser: There is none.
    """
    found = find()
    if found is None:
        places = os.environ.get(VARIABLE) or ", ".join(PLACES)
        raise NoBrowser(
            f"the sandbox has no Chromium ({places}): install the package chromium on the node, "
            f"use the image of this project's Dockerfile, or set {VARIABLE}"
        )
    return found


class Browser:
    """A running Chromium with an empty profile; a context manager.

    Raises:
        NoBrowser: There is none, or it does not start within `START_S`.
    """

    def __init__(self) -> None:
        program = require()
        self._directory = tempfile.mkdtemp(prefix="mini-program-browser-")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        # A shell moves its standard streams to the descriptors 3 and 4, which Chromium uses.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null', str(program),
             *_FLAGS, f"--user-data-dir={self._directory}/profile"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env={"HOME": self._directory, "TMPDIR": self._directory, "LANG": "C.UTF-8",
                 "PATH": "/usr/bin:/bin"},
            cwd=self._directory, start_new_session=True,
        )  # fmt: skip
        self._messages: deque[dict[str, Any]] = deque()
        self._buffer = bytearray()
        self._last_id = 0
        self.pages: dict[str, Page] = {}
        try:
            told = self.call("Browser.getVersion", timeout_s=START_S)
        except PageFailed as exc:
            self._errors.seek(0)
            said = self._errors.read()[-2000:].decode(errors="replace")
            self.close()
            raise NoBrowser(f"{program} does not start: {exc}\n{said}") from None
        self.version: str = told["product"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and delete its profile."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(BrokenPipeError):
                stream.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def page(self, width: int = 1024, height: int = 768) -> Page:
        """Return a new empty page that shares no storage with others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(self, context, target, session["sessionId"])
        self.pages[session["sessionId"]] = page
        for domain in ("Page", "Runtime", "Network", "Log", "Inspector"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        return page

    def call(
        self,
        method: str,
        params: dict[str, Any] | None = None,
        session: str = "",
        timeout_s: float = ANSWER_S,
    ) -> dict[str, Any]:
        """Send a command and return its result; handles events while it waits.

        Raises:
            PageFailed: No answer came within `timeout_s`, the browser ended, or it refused.
        """
        number = self.send(method, params, session)
        limit = _Limit(self._process.pid, timeout_s)
        while True:
            message = self._receive(limit, method)
            if message is None:
                continue
            if message.get("id") != number:
                self._handle(message)
            elif "error" in message:
                raise PageFailed(f"{method}: {message['error'].get('message')}")
            else:
                result: dict[str, Any] = message["result"]
                return result

    def send(self, method: str, params: dict[str, Any] | None = None, session: str = "") -> int:
        """Send a command and return its number, without waiting for its answer.

        Raises:
            PageFailed: The browser has ended.
        """
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\0")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PageFailed("the browser ended") from None
        return self._last_id

    def wait(self, deadline: float) -> None:
        """Handle the events that arrive before `deadline`, in seconds of the monotonic clock.

        Raises:
            PageFailed: The browser has ended.
        """
        while time.monotonic() < deadline:
            if self._poll(deadline):
                self._handle(self._messages.popleft())

    def _handle(self, message: dict[str, Any]) -> None:
        page = self.pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.handle(message["method"], message.get("params", {}))

    def _receive(self, limit: _Limit, what: str) -> dict[str, Any] | None:
        """Return the next message; None if none came for a while and the limit is not reached."""
        if self._poll(time.monotonic() + _LOOK_S):
            return self._messages.popleft()
        limit.check(what)
        return None

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Handle events until `is_done`.

        Raises:
            PageFailed: It takes longer than `ANSWER_S`, or more CPU time than `ANSWER_CPU_S`.
        """
        limit = _Limit(self._process.pid, ANSWER_S)
        while not is_done():
            message = self._receive(limit, what)
            if message is not None:
                self._handle(message)

    def _poll(self, deadline: float) -> bool:
        """Read until there is a message; return whether one came before `deadline`."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        while not self._messages:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([stream], [], [], remaining_s)[0]:
                return False
            data = os.read(stream, 1024 * 1024)
            if not data:
                raise PageFailed("the browser ended")
            self._buffer += data
            if len(self._buffer) > _MAX_ANSWER_BYTES:
                raise PageFailed(f"the page sent more than {_MAX_ANSWER_BYTES} bytes at once")
            if b"\0" in data:
                *whole, rest = bytes(self._buffer).split(b"\0")
                self._buffer = bytearray(rest)
                self._messages.extend(json.loads(text) for text in whole)
        return True


class _Limit:
    """Limits of wall time and CPU time from now on, for the processes of a session."""

    def __init__(self, session: int, wall_s: float) -> None:
        self._session = session
        self._deadline = time.monotonic() + wall_s
        self._cpu_s = _cpu_s(session) + ANSWER_CPU_S

    def check(self, what: str) -> None:
        """Raise `PageFailed` if a limit is reached."""
        if _cpu_s(self._session) > self._cpu_s:
            raise PageFailed(f"{what}: the page's scripts do not end")
        if time.monotonic() > self._deadline:
            raise PageFailed(f"{what}: the page does not answer")


def _cpu_s(session: int) -> float:
    """Return the CPU time of the living processes of a session."""
    ticks = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                # The name of the program, in parentheses, may contain anything.
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Page:
    """A page of a `Browser`."""

    def __init__(self, browser: Browser, context: str, target: str, session: str) -> None:
        self._browser = browser
        self._context = context
        self._session = session
        self._frame = target  # the main frame has the id of its target
        self._requests: dict[str, str] = {}
        self._base = ""
        self._loads = 0
        self._has_crashed = False
        self.messages: list[Message] = []
        self.dropped = 0
        """Errors beyond `MAX_MESSAGES`, and other messages beyond it, which are not kept."""
        self._kept = {True: 0, False: 0}
        """Kept messages that are errors, and others: a page cannot hide errors behind others."""

    def call(
        self, method: str, params: dict[str, Any] | None = None, timeout_s: float = ANSWER_S
    ) -> dict[str, Any]:
        """Send a command of this page; see `Browser.call`.

        Raises:
            PageFailed: Also if the page has crashed.
        """
        if self._has_crashed:
            raise PageFailed("the page crashed")
        return self._browser.call(method, params, self._session, timeout_s)

    def close(self) -> None:
        """Discard the page and its storage."""
        self._browser.pages.pop(self._session, None)
        self._browser.send("Target.disposeBrowserContext", {"browserContextId": self._context})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the viewport in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)

    def load(self, url: str, base: str = "") -> None:
        """Load a page and wait until it has.

        Args:
            url: Its address.
            base: Address of the application, which messages leave out.

        Raises:
            PageFailed: It does not load within `ANSWER_S`, or its scripts do not end.
        """
        self._base = base or self._base
        before = self._loads
        told = self.call("Page.navigate", {"url": url})
        if told.get("errorText"):
            raise PageFailed(f"{url} does not load: {told['errorText']}")
        if "loaderId" in told:  # else only the fragment changed
            self._await_load(before, url)

    def reload(self) -> None:
        """Load the page again and wait until it has.

        Raises:
            PageFailed: As `load`.
        """
        before = self._loads
        self.call("Page.reload")
        self._await_load(before, "the page")

    def _await_load(self, before: int, what: str) -> None:
        self._browser.wait_until(
            lambda: self._has_crashed or self._loads > before, f"{what} does not load"
        )
        if self._has_crashed:
            raise PageFailed("the page crashed")

    def wait(self, seconds: float) -> None:
        """Handle the page's messages for some time."""
        self._browser.wait(time.monotonic() + seconds)

    def run(self, function: str, *arguments: Any) -> Any:
        """Call a JavaScript function in the isolated world and return its result.

        Raises:
            PageFailed: It raised, or the page does not answer.
        """
        world = self.call(
            "Page.createIsolatedWorld", {"frameId": self._frame, "worldName": _WORLD}
        )["executionContextId"]
        told = self.call(
            "Runtime.callFunctionOn",
            {
                "functionDeclaration": function,
                "executionContextId": world,
                "arguments": [{"value": value} for value in arguments],
                "returnByValue": True,
            },
        )
        if "exceptionDetails" in told:
            details = told["exceptionDetails"]
            text = details.get("exception", {}).get("description") or details.get("text", "")
            raise PageFailed(text.split("\n")[0])
        return told["result"].get("value")

    def screenshot(self) -> bytes:
        """Return the visible part of the page as PNG."""
        told = self.call("Page.captureScreenshot", {"format": "png"})
        return base64.b64decode(told["data"])

    # --- input ------------------------------------------------------------------------------------

    def click(self, x: float, y: float) -> None:
        """Click with the left button."""
        at = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
        self.call("Input.dispatchMouseEvent", {"type": "mousePressed", "buttons": 1, **at})
        self.call("Input.dispatchMouseEvent", {"type": "mouseReleased", **at})

    def type(self, text: str) -> None:
        """Type a text, key by key."""
        for character in text:
            key = {"key": character, "text": character, "unmodifiedText": character}
            if character.isascii() and character.isalnum():
                key |= {"code": f"{'Digit' if character.isdigit() else 'Key'}{character.upper()}"}
            self._key(key)

    def press(self, key: str) -> None:
        """Press a key with a name, such as ``Enter``."""
        code, text = KEYS[key]
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._key(named | ({"text": text} if text else {}))

    def select_all(self) -> None:
        """Select the whole text of the focused field."""
        key = {"key": "a", "code": "KeyA", "windowsVirtualKeyCode": 65, "modifiers": 2}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", "commands": ["selectAll"], **key})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **key})

    def _key(self, key: dict[str, Any]) -> None:
        down = "keyDown" if "text" in key else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", {"type": down, **key})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **key, "text": ""})

    # --- events -----------------------------------------------------------------------------------

    def handle(self, method: str, params: dict[str, Any]) -> None:
        """Note an event of the page."""
        match method:
            case "Page.loadEventFired":
                self._loads += 1
            case "Inspector.targetCrashed":
                self._has_crashed = True
            case "Page.javascriptDialogOpening":
                self._note(Message("dialog", params.get("message", "")))
                answer = {"accept": True, "promptText": params.get("defaultPrompt", "")}
                self._browser.send("Page.handleJavaScriptDialog", answer, self._session)
            case "Runtime.consoleAPICalled":
                text = " ".join(map(_shown, params.get("args", [])))
                frames = params.get("stackTrace", {}).get("callFrames", [])
                self._note(self._message(params["type"], text, frames[0] if frames else {}))
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                shown = details.get("exception", {}).get("description") or details["text"]
                self._note(self._message("exception", shown.split("\n")[0], details))
            case "Network.requestWillBeSent":
                if len(self._requests) < MAX_MESSAGES:
                    self._requests[params["requestId"]] = params["request"]["url"]
            case "Network.responseReceived":
                response = params["response"]
                if response["status"] >= 400:
                    text = f"{self._path(response['url'])}: {response['status']}"
                    self._note(Message("request", text))
            case "Network.loadingFailed" if not params.get("canceled"):
                url = self._requests.get(params["requestId"], "a request")
                self._note(Message("request", f"{self._path(url)}: {params['errorText']}"))
            case "Log.entryAdded" if params["entry"]["source"] not in {"network", "javascript"}:
                entry = params["entry"]
                self._note(self._message(entry["level"], entry["text"], entry))

    def _message(self, kind: str, text: str, place: dict[str, Any]) -> Message:
        url = str(place.get("url", ""))
        is_own = bool(self._base) and url.startswith(self._base)
        file = (self._path(url).partition("?")[0] or "index.html") if is_own else url
        line, column = int(place.get("lineNumber", -1)), int(place.get("columnNumber", -1))
        return Message(kind, text, file, line + 1 if url else 0, column + 1 if url else 0)

    def _path(self, url: str) -> str:
        return url.removeprefix(self._base) if self._base else url

    def _note(self, message: Message) -> None:
        if self._kept[message.is_error] >= MAX_MESSAGES:
            self.dropped += 1
            return
        self._kept[message.is_error] += 1
        text = message.text
        if len(text) > MAX_MESSAGE_CHARACTERS:
            text = text[:MAX_MESSAGE_CHARACTERS] + "…"
        self.messages.append(
            Message(message.kind, text, message.file, message.line, message.column)
        )


def _shown(value: dict[str, Any]) -> str:
    """Return a value of the console as text."""
    if "value" in value:
        return value["value"] if isinstance(value["value"], str) else json.dumps(value["value"])
    return str(value.get("unserializableValue") or value.get("description") or value.get("type"))


KEYS: Final = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "Backspace": (8, ""),
    "Delete": (46, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    "Home": (36, ""),
    "End": (35, ""),
}
"""Virtual key code and text of the keys that have names."""
