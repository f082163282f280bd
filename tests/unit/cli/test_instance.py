"""`aenv instance exec` sends the command as it was written."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.cli import instance
from aenv_ray.cli.main import main
from aenv_ray.cli.terminal import config_file
from aenv_ray.config import settings
from aenv_ray.errors import FabricUnavailable, QuotaExceeded, RateLimited


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., tuple[int, Any]]]:
    """Run ``aenv`` against a server that runs nothing; return exit code and the command it got."""
    commands: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            commands.append(body["command"])
            data = {"exit_code": 3, "stdout": "", "stderr": ""}
            answer = json.dumps({"success": True, "data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: Any) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(config_file, "SYSTEM_FILE", tmp_path / "none")
    monkeypatch.setenv("AENV_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("AENV_SYSTEM_URL", f"http://127.0.0.1:{server.server_port}")
    settings.cache_clear()

    def run(*words: str) -> tuple[int, Any]:
        commands.clear()
        code = main(["instance", "exec", *words])
        return code, commands[0] if commands else None

    yield run
    settings.cache_clear()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("a-1", "ls", "/"), ["ls", "/"]),
        (("a-1", "ls | wc -l"), "ls | wc -l"),
        (("a-1", "--", "sh", "-c", "exit 3"), ["sh", "-c", "exit 3"]),
        (("--", "a-1", "sh", "-c", "exit 3"), ["sh", "-c", "exit 3"]),
        (("a-1", "--", "ls | wc -l"), "ls | wc -l"),
        (("a-1", "git", "log", "--", "file"), ["git", "log", "--", "file"]),
        (("a-1", "sh", "--timeout", "5"), ["sh", "--timeout", "5"]),
    ],
)
def test_a_double_dash_before_the_command_is_not_part_of_it(
    run: Callable[..., tuple[int, Any]], words: tuple[str, ...], command: Any
) -> None:
    assert run(*words) == (3, command)


def test_a_double_dash_without_a_command_is_wrong_usage(
    run: Callable[..., tuple[int, Any]],
) -> None:
    assert run("a-1", "--") == (2, None)


class _Gateway:
    """Answers creates in turn, and remembers what is deleted."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, bool]] = []
        self.deleted: list[str] = []

    def create(self, environment: str, options: dict[str, Any], **request: Any) -> Any:
        del environment
        self.requests.append((request["key"], options.get("wait", True)))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def delete(self, instance_id: str) -> None:
        self.deleted.append(instance_id)


def _interrupted(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> tuple[_Gateway, BaseException]:
    """Interrupt a create; the gateway gives these answers to the request that undoes it."""
    monkeypatch.setattr(instance.time, "sleep", lambda _: None)
    gateway = _Gateway(KeyboardInterrupt(), *answers)
    request = instance._IdempotentCreate(gateway, "e", {}, 10.0, 3)  # type: ignore[arg-type]
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # KeyboardInterrupt, too
        request.send(None)
    assert len({key for key, _ in gateway.requests}) == 1
    assert [wait for _, wait in gateway.requests] == [True] + [False] * len(gateway.requests[1:])
    return gateway, caught.value


def test_an_interrupted_create_is_asked_for_until_it_is_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = [FabricUnavailable("still in progress") for _ in range(20)]
    gateway, error = _interrupted(monkeypatch, *busy, [SimpleNamespace(id="e-1")])
    assert isinstance(error, KeyboardInterrupt)
    assert gateway.deleted == ["e-1"]


def test_an_interrupted_create_that_is_refused_left_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway, error = _interrupted(
        monkeypatch, RateLimited("slowly", retry_after_s=0.1), QuotaExceeded("the quota is full")
    )
    assert isinstance(error, KeyboardInterrupt)
    assert (len(gateway.requests), gateway.deleted) == (3, [])


def test_an_interrupted_create_that_cannot_be_undone_says_what_may_be_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instance, "_UNDO_S", 0.0)
    _, error = _interrupted(monkeypatch, FabricUnavailable("no answer"))
    assert isinstance(error, FabricUnavailable)
    assert "until their TTL ends" in str(error.hint)
