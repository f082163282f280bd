"""`aenv instance exec` sends the command as it was written."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.cli.main import main
from aenv_ray.cli.terminal import config_file
from aenv_ray.config import settings


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
