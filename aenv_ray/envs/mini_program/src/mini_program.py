"""An environment for rapid application generation: an agent writes a small web application.

The agent has tools for files, validation and a browser. The trainer starts an episode with
`start_app` and calls `app_works`, with the checks of the task, at the end.
"""

from __future__ import annotations

import base64
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from webapp import browser, checks, validation
from webapp.files import AppFiles, FileProblem
from webapp.server import AppServer, answer

from aenv_ray.runtime import (
    Image,
    register_function,
    register_health,
    register_reset,
    register_reward,
    register_tool,
)

PORT: Final = 8000
"""The application's port, which the gateway forwards (``deployConfig.ports``)."""
GRADING_S: Final = 300.0
"""How long a grading may take."""
SETTLE_S: Final = 0.3
"""How long `run` collects messages after the page has loaded."""
MAX_TEXT_CHARACTERS: Final = 4000
_GRADE_ATTEMPTS: Final = 2

_server: AppServer | None = None
_browser_lock = threading.Lock()
_server_lock = threading.Lock()


def _files() -> AppFiles:
    return AppFiles(Path.cwd() / "app")


# --- files ----------------------------------------------------------------------------------------


@register_tool(idempotent=True)
def write_file(path: str, content: str) -> dict[str, Any]:
    """Write a text file of the application, and create its directories.

    Args:
        path: Relative to the application, for example "index.html" or "js/app.js".
        content: The whole new content, at most 1 MiB.
    """
    entry = _files().write(path, content.encode())
    return {"path": entry.path, "size_bytes": entry.size_bytes}


@register_tool(idempotent=True)
def read_file(path: str) -> str:
    """Return the content of a text file of the application.

    Args:
        path: Relative to the application.
    """
    try:
        return _files().read(path).decode()
    except UnicodeDecodeError:
        raise FileProblem(f"{path} is not a text file in UTF-8") from None


@register_tool(idempotent=True)
def list_files(directory: str = "/") -> list[dict[str, Any]]:
    """Return path and size of the application's files.

    Args:
        directory: Only files below it; "/" is the whole application.
    """
    return [
        {"path": entry.path, "size_bytes": entry.size_bytes} for entry in _files().list(directory)
    ]


@register_tool
def delete_file(path: str) -> dict[str, int]:
    """Delete a file, or a directory with everything in it.

    Args:
        path: Relative to the application.
    """
    return {"deleted": _files().delete(path)}


@register_tool
def move_file(source: str, destination: str) -> dict[str, str]:
    """Rename a file or directory. The destination must not exist.

    Args:
        source: The present path.
        destination: The new path; its directories are created.
    """
    _files().move(source, destination)
    return {"path": destination}


# --- validation and running -----------------------------------------------------------------------


@register_tool(idempotent=True)
def validate(path: str = "") -> dict[str, Any]:
    """Look for errors in HTML, CSS and JavaScript files, and for references to missing files.

    Args:
        path: One file; empty for all files.

    Returns:
        ``valid``, which is false if there are errors, and ``problems``: file, line, column,
        severity ("error" or "warning") and message.
    """
    files = _files().snapshot()
    if path:
        path = path.lstrip("/")
        if path not in files:
            raise FileProblem(f"{path} does not exist")
    found = [
        problem
        for one in ([path] if path else sorted(files))
        for problem in validation.validate(files, one)
    ]
    errors = sum(problem.severity is validation.Severity.ERROR for problem in found)
    return {"valid": not errors, "problems": [problem.as_json() for problem in found]}


@register_tool(timeout=90)
def run(
    page: str = "index.html",
    steps: list[dict[str, Any]] | None = None,
    width: int = 1024,
    height: int = 768,
) -> dict[str, Any]:
    """Serve the application, open a page in a real browser, and report what happens.

    The application stays available on the port. Each call opens a new browser with empty storage.

    Args:
        page: The file to open.
        steps: What to do and expect on the page, in order. Examples: {"click": "#add"},
            {"fill": "#name", "text": "Ada"}, {"press": "Enter"}, {"reload": true},
            {"expect": "#count", "text": "3"}, {"expect": "li", "count": 2},
            {"expect": "#error", "hidden": true}, {"no_errors": true}.
        width: Width of the viewport in pixels.
        height: Height of the viewport in pixels.

    Returns:
        ``port``; ``browser``, its version, or null with a ``note`` if the sandbox has none;
        ``errors`` and ``console``, what the page reported, with file, line and column; ``title``
        and ``text`` of the page; and ``failed``, the first step that failed, or null.
    """
    played = checks.steps(steps or [])
    _files().read(page)
    report: dict[str, Any] = {"port": _serve().port, "browser": None}
    if browser.find() is None:
        note = "there is no browser in this sandbox: the page was not opened, no step was played"
        return report | {"note": note}
    with _opened(page, width, height) as (program, opened):
        failed = None
        try:
            checks.play(opened, played, {})
            opened.wait(SETTLE_S)
        except (checks.Failed, browser.PageFailed) as exc:
            failed = str(exc)
        report |= {"browser": program.version, "failed": failed, **_messages(opened)}
        try:
            report |= opened.run(_SUMMARY, MAX_TEXT_CHARACTERS)
        except browser.PageFailed as exc:
            report["failed"] = failed or str(exc)
        return report


@register_tool(timeout=60)
def screenshot(page: str = "index.html", width: int = 1024, height: int = 768) -> Image:
    """Return a picture of a page as a real browser shows it.

    Args:
        page: The file to open.
        width: Width of the viewport in pixels.
        height: Height of the viewport in pixels.
    """
    _files().read(page)
    browser.require()
    with _opened(page, width, height) as (_, opened):
        opened.wait(SETTLE_S)
        return Image(data=opened.screenshot(), mime_type="image/png")


_SUMMARY: Final = """function (limit) {
  const text = document.body ? document.body.innerText : '';
  return {title: String(document.title),
    text: text.length > limit ? text.slice(0, limit) + '… [cut]' : text};
}"""


def _serve() -> AppServer:
    """Return the server of the application; the first call starts it.

    Raises:
        RuntimeError: Another program uses the port.
    """
    global _server
    with _server_lock:
        if _server is None:
            try:
                _server = AppServer(_content, PORT)
            except OSError as exc:
                raise RuntimeError(
                    f"port {PORT} cannot be served: {exc.strerror}; without namespaces, only one "
                    "instance of a node can use it"
                ) from None
        return _server


def _content(path: str) -> bytes | None:
    try:
        return _files().read(path)
    except FileProblem:
        return None


@contextmanager
def _opened(page: str, width: int, height: int) -> Iterator[tuple[browser.Browser, browser.Page]]:
    """Yield a browser with a page of the application."""
    for name, size in (("width", width), ("height", height)):
        if not 200 <= size <= 4000:
            raise ValueError(f"{name} is {size}; use 200 to 4000 pixels")
    with _browser_lock, browser.Browser() as program:
        opened = program.page(width, height)
        url = _serve().url
        opened.load(url + page.lstrip("/"), url)
        yield program, opened


def _messages(page: browser.Page) -> dict[str, Any]:
    """Return what a page reported, as `run` shows it."""
    shown = [
        {"kind": one.kind, "text": one.text, "file": one.file, "line": one.line,
         "column": one.column}
        for one in page.messages
    ]  # fmt: skip
    errors = [row for row, one in zip(shown, page.messages, strict=True) if one.is_error]
    others = [row for row, one in zip(shown, page.messages, strict=True) if not one.is_error]
    dropped = {"dropped_messages": page.dropped} if page.dropped else {}
    return {"errors": errors, "console": others, **dropped}


# --- for the trainer ------------------------------------------------------------------------------


@register_function
def start_app(browser_required: bool = True, files: dict[str, str] | None = None) -> dict[str, Any]:
    """Start a task with an application of these files, or an empty one.

    Args:
        browser_required: Whether the task's checks need a browser.
        files: Content by path.

    Raises:
        NoBrowser: The task needs a browser, and the sandbox has none.
    """
    program = browser.require() if browser_required else browser.find()
    app = _files()
    for entry in app.list():
        app.delete(entry.path)
    for path, content in (files or {}).items():
        app.write(path, content.encode())
    return {"browser": str(program) if program else None, "files": sorted(files or {})}


@register_function
def serve() -> dict[str, int]:
    """Serve the application without opening it; returns the port that the gateway forwards."""
    return {"port": _serve().port}


@register_function
def fetch(target: str) -> dict[str, Any]:
    """Return what the application's server answers, for previews that relay it.

    Args:
        target: Path of the request, with a leading slash.

    Returns:
        ``status``, ``media_type``, and ``body`` in base64.
    """
    status, media_type, body = answer(_content, target)
    return {
        "status": int(status),
        "media_type": media_type,
        "body": base64.b64encode(body).decode(),
    }


@register_reward(timeout=GRADING_S)
def app_works(
    behaviour: list[dict[str, Any]] | None = None, structure: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Check the application. The score is 1.0 if all checks pass, and otherwise 0.0.

    The files are read once, and served to a new browser by a new server.

    Args:
        behaviour: What the application must do in a browser; see `Behaviour`.
        structure: What its files must contain; see `Structure`.

    Returns:
        ``score``; ``passed``; ``reason``, the first failure; ``checks`` with name, kind
        ("structure" or "browser"), passed and reason; and ``browser``, the version of the browser
        that ran, or null if none was needed.

    Raises:
        ValueError: There are no checks, or they are malformed.
        NoBrowser: There are behaviour checks, and no browser starts. There is no score then.
    """
    behaviours = checks.behaviours(behaviour or [])
    structures = checks.structures(structure or [])
    if not behaviours and not structures:
        raise ValueError("the task has no checks: give the reward behaviour, structure, or both")
    if behaviours:
        browser.require()
    try:
        files = _files().snapshot()
    except FileProblem as exc:
        return _result([checks.CheckResult("files", "structure", False, str(exc))], None)
    verdicts = [checks.check_structure(check, files) for check in structures]
    absent = sorted({check.page for check in behaviours} - files.keys())
    verdicts += [
        checks.CheckResult("page", "structure", False, f"{page} does not exist") for page in absent
    ]
    if not behaviours or not all(verdict.passed for verdict in verdicts):
        return _result(verdicts, None)
    version, found = _play(behaviours, files)
    return _result(verdicts + found, version)


def _play(
    behaviours: tuple[checks.Behaviour, ...], files: dict[str, bytes]
) -> tuple[str, list[checks.CheckResult]]:
    """Return the browser's version and the verdicts of the behaviour checks."""
    source = random.SystemRandom()
    server = AppServer(files.get)
    try:
        verdicts: list[checks.CheckResult] = []
        with _started() as program:
            for check in behaviours:
                verdicts.append(checks.check_behaviour(check, program, server.url, source))
                if not verdicts[-1].passed:
                    break  # the score is known
            return program.version, verdicts
    finally:
        server.close()


def _started() -> browser.Browser:
    """Return a browser in which an empty page works, before a page of the agent is loaded.

    Raises:
        NoBrowser: The last attempt failed, too.
    """
    for _ in range(_GRADE_ATTEMPTS - 1):
        with suppress(browser.NoBrowser):
            return _tried()
    return _tried()


def _tried() -> browser.Browser:
    started = browser.Browser()
    try:
        page = started.page()
        page.run("function () { return 1; }")
        page.close()
    except browser.PageFailed as exc:
        started.close()
        raise browser.NoBrowser(f"the browser does not work: {exc}") from None
    return started


def _result(verdicts: list[checks.CheckResult], version: str | None) -> dict[str, Any]:
    failed = [verdict for verdict in verdicts if not verdict.passed]
    return {
        "score": 0.0 if failed else 1.0,
        "passed": not failed,
        "reason": f"{failed[0].name}: {failed[0].reason}" if failed else "all checks passed",
        "checks": [
            {"name": one.name, "kind": one.kind, "passed": one.passed, "reason": one.reason}
            for one in verdicts
        ],
        "browser": version,
    }


@register_reset(state=["_server"])
def start_over() -> None:
    """Stop serving; the runtime removes the files."""
    global _server
    with _server_lock:
        if _server is not None:
            _server.close()
            _server = None


@register_health
def health() -> dict[str, str]:
    """Return that the tools work, and whether there is a browser."""
    found = browser.find()
    return {"status": "healthy", "browser": str(found) if found else "none"}
