"""`aenv run` serves a project on this machine, leaves nothing behind, and follows its changes."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from aenv_ray.cli.main import main

pytestmark = pytest.mark.e2e

AENV = [sys.executable, "-m", "aenv_ray.cli.main"]
URL = re.compile(r"is served at (http://\S+)")
SERVER = "aenv_ray.runtime"


class Running:
    """An `aenv run` under test, in its own session as a terminal would give it."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*AENV, "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def wait_for(self, text: str) -> str:
        """Read lines until one has `text`; the suite's timeout bounds the wait."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} never came; the output was:\n{''.join(self.lines)}")

    def wait_until_served(self) -> str:
        match = URL.search(self.wait_for("is served at"))
        assert match
        self.wait_for("Ctrl-C")
        return match[1]

    def server_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        (pid,) = [int(p) for p in children.split() if SERVER in command_of(int(p))]
        return pid

    def finish(self) -> int:
        """Read what is left and return the exit code; fail when it does not end in time."""
        out, err = self.process.communicate(timeout=30)
        self.lines.append(err)
        assert out == "", "stdout is for data, and aenv run has none"
        return self.process.returncode

    @property
    def output(self) -> str:
        return "".join(self.lines)


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def wait_until_gone(pid: int, deadline_s: float = 10) -> None:
    """Wait on the process itself, which is no child of ours."""
    import select

    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([watched], [], [], deadline_s)
        assert ready, f"process {pid} is still there after {deadline_s} s"
    finally:
        os.close(watched)


def request(url: str, path: str, body: Any = None) -> Any:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=20)
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    method = "GET" if body is None else "POST"
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def call_tool(url: str, name: str, **arguments: Any) -> str:
    params = {"name": name, "arguments": arguments}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    return str(request(url, "/mcp", message)["result"]["content"][0]["text"])


@pytest.fixture
def todo(tmp_path: Path) -> Path:
    assert main(["init", "todo", "-w", str(tmp_path)]) == 0
    return tmp_path / "todo"


@pytest.fixture
def aenv_run() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*arguments: str, **options: Any) -> Running:
        started.append(Running(*arguments, **options))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate(timeout=30)


def test_the_new_project_is_served_as_the_template_promises(todo, aenv_run):
    running = aenv_run(str(todo), "-p", "0")
    url = running.wait_until_served()
    assert re.search(r"tools +guess\n", running.output)
    assert f"DUMMY_INSTANCE_IP={url}\n" in running.output
    assert request(url, "/health")["data"]["status"] == "healthy"
    request(url, "/functions/new_game", {"seed": 1})
    assert call_tool(url, "guess", number=0) == "higher"
    assert request(url, "/task/reward", {})["data"] == 0.0


def test_the_url_is_printed_as_json(todo):
    command = [*AENV, "run", str(todo), "-p", "0", "-o", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = ""
        for line in process.stdout:
            text += line
            if line == "}\n":
                break
        told = json.loads(text)
        assert (told["environment"], told["tools"]) == ("todo@1.0.0", ["guess"])
        assert request(told["url"], "/health")["data"]["status"] == "healthy"
        process.terminate()
        assert process.stdout.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_and_exits_with_0(todo, aenv_run, number):
    running = aenv_run(str(todo), "-p", "0")
    running.wait_until_served()
    server = running.server_pid()
    running.process.send_signal(number)
    assert running.finish() == 0
    assert running.output.endswith("stopped\n")
    wait_until_gone(server)


def test_ctrl_c_also_ends_a_server_that_hangs_and_what_it_started(todo, aenv_run):
    (todo / "src" / "todo_env.py").write_text(
        "import signal, subprocess, threading\n"
        "from aenv_ray.runtime import register_tool\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print('child', child.pid)\n"
        "@register_tool\ndef hang() -> str:\n    threading.Event().wait()\n    return ''\n"
    )
    running = aenv_run(str(todo), "-p", "0")
    child = int(running.wait_for("child ").split()[1])
    running.wait_until_served()
    server = running.server_pid()
    os.kill(server, signal.SIGSTOP)  # it answers no signal but SIGKILL
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0
    wait_until_gone(server)
    wait_until_gone(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PR_SET_PDEATHSIG")
def test_kill_9_of_aenv_run_does_not_leave_the_server(todo, aenv_run):
    """Invariant 3: nothing that we started outlives us, whichever process was killed."""
    running = aenv_run(str(todo), "-p", "0")
    running.wait_until_served()
    server = running.server_pid()
    running.process.kill()
    wait_until_gone(server)


def test_a_closed_pipe_ends_the_server(todo, aenv_run):
    running = aenv_run(str(todo), "-p", "0", "--reload")
    running.wait_until_served()
    server = running.server_pid()
    running.process.stderr.close()  # as in: aenv run 2>&1 | head
    (todo / "notes.txt").write_text("makes it say something")
    assert running.process.wait(30) == 1
    wait_until_gone(server)


def test_the_error_for_a_port_in_use_has_a_hint(todo, aenv_run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        running = aenv_run(str(todo), "--port", port)
        assert running.finish() == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in running.output
    assert "hint: choose another port" in running.output


def test_a_project_that_does_not_load_shows_its_traceback_and_fails(todo, aenv_run):
    (todo / "src" / "todo_env.py").write_text("import no_such_module\n")
    running = aenv_run(str(todo), "-p", "0", "--quiet")
    assert running.finish() == 1
    assert "No module named 'no_such_module'" in running.output
    assert "error: the server of todo@1.0.0 ended with code 1" in running.output


def test_a_server_that_dies_gives_its_exit_code(todo, aenv_run):
    source = todo / "src" / "todo_env.py"
    source.write_text(
        source.read_text() + "\n\n@register_tool\ndef die(code: int) -> str:\n"
        "    import os, sys\n    print('last words')\n    sys.stdout.flush()\n    os._exit(code)\n"
    )
    running = aenv_run(str(todo), "-p", "0")
    url = running.wait_until_served()
    with pytest.raises((OSError, http.client.HTTPException)):
        call_tool(url, "die", code=9)
    assert running.finish() == 9
    assert "last words\n" in running.output
    assert "error: the server of todo@1.0.0 ended with code 9" in running.output


def test_a_server_killed_from_outside_gives_the_signals_code(todo, aenv_run):
    running = aenv_run(str(todo), "-p", "0")
    running.wait_until_served()
    os.kill(running.server_pid(), signal.SIGKILL)
    assert running.finish() == 128 + signal.SIGKILL
    assert "was killed by signal 9" in running.output


def test_variables_are_those_of_the_config_then_of_the_option(todo, aenv_run):
    config = json.loads((todo / "config.json").read_text())
    config["deployConfig"]["environmentVariables"] = {"A": "config", "B": "config"}
    (todo / "config.json").write_text(json.dumps(config))
    source = todo / "src" / "todo_env.py"
    shown = "import os\nprint('seen', os.environ['A'], os.environ['B'], os.environ['C'])\n"
    source.write_text(source.read_text() + "\n\n" + shown)
    running = aenv_run(str(todo), "-p", "0", "-e", "B=x=y", "-e", "C=", environment={"A": "shell"})
    assert running.wait_for("seen ") == "seen config x=y \n"


def test_quiet_prints_nothing_without_an_error(todo, aenv_run):
    source = todo / "src" / "todo_env.py"
    marker = todo.parent / "loaded.fifo"
    os.mkfifo(marker)
    source.write_text(
        source.read_text() + f"\n\nprint('loud')\nopen({str(marker)!r}, 'w').close()\n"
    )
    running = aenv_run(str(todo), "-p", "0", "--quiet")
    marker.read_text()  # returns when the server has loaded the project
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0
    assert running.output == ""


def test_reload_follows_a_change_of_the_code_at_the_same_url(todo, aenv_run):
    running = aenv_run(str(todo), "-p", "0", "--reload")
    url = running.wait_until_served()
    source = todo / "src" / "todo_env.py"
    source.write_text(source.read_text().replace('"higher"', '"more"'))
    running.wait_for("the project changed")
    assert running.wait_until_served() == url
    request(url, "/functions/new_game", {"seed": 1})
    assert call_tool(url, "guess", number=0) == "more"


def test_reload_outlives_broken_code_and_a_broken_config(todo, aenv_run):
    running = aenv_run(str(todo), "-p", "0", "--reload")
    url = running.wait_until_served()
    source, config = todo / "src" / "todo_env.py", todo / "config.json"
    good_source, good_config = source.read_text(), config.read_text()
    source.write_text("def broken(:\n")
    running.wait_for("SyntaxError")
    running.wait_for("waiting for the project to change")
    source.write_text(good_source)
    assert running.wait_until_served() == url
    config.write_text("{")
    running.wait_for("config.json, line 1")
    running.wait_for("waiting for the project to change")
    config.write_text(good_config)
    assert running.wait_until_served() == url
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0


def test_inspector_needs_npx(todo, aenv_run):
    running = aenv_run(str(todo), "--inspector", environment={"PATH": "/nowhere"})
    assert running.finish() == 3
    assert running.output.startswith("error: --inspector needs npx")
    assert "hint: install Node.js" in running.output


def test_the_inspector_starts_with_its_port_and_ends_with_us(todo, aenv_run, tmp_path):
    """A stand-in for npx: the real one needs the network."""
    npx = tmp_path / "bin" / "npx"
    npx.parent.mkdir()
    npx.write_text('#!/bin/sh\necho "inspector $$ $CLIENT_PORT $*"\nexec sleep 600\n')
    npx.chmod(0o755)
    path = f"{npx.parent}{os.pathsep}{os.environ['PATH']}"
    assert shutil.which("npx", path=path) == str(npx)
    running = aenv_run(
        str(todo), "-p", "0", "--inspector", "--inspector-port", "7001", environment={"PATH": path}
    )
    _, pid, port, arguments = running.wait_for("inspector ").split(maxsplit=3)
    assert (port, arguments) == ("7001", "--yes @modelcontextprotocol/inspector\n")
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0
    wait_until_gone(int(pid))
