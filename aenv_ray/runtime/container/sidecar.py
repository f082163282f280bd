"""Commands and files in the sidecar of an instance (``podTemplate: "DualContainer"``).

In a tool, reward or function: ``from aenv_ray.runtime import sidecar`` and
``sidecar.exec("pytest -q")``; in async code ``await sidecar.aio.exec("pytest -q")``. Requests go
through the instance's host, so no container has a socket of the Docker daemon. Both containers
share the directory ``/shared``.
"""

from __future__ import annotations

import base64
import uuid
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.runtime.door.caller import DEFAULT_TIMEOUT_S
from aenv_ray.runtime.door.calls import current_call
from aenv_ray.runtime.door.host.link import AFTER_TOOLS, HOST, OUTER_REWARDS, SIDECAR_METHOD
from aenv_ray.runtime.door.host.requests import ask_host, ask_host_async
from aenv_ray.runtime.faults import Fault
from aenv_ray.runtime.system import carried_python

PYTHON: Final = carried_python.COMMAND
"""Command of a Python with the standard library in every sidecar of the docker engine, whatever its
image. It is read-only there, and loads no code of the image: not by files such as
``/etc/ld.so.preload``, nor by variables, of which it does not get those that name libraries.
"""
_GRACE_S: Final = 5.0
"""How much longer than the timeout, which the sidecar enforces, this side waits."""
_ERRORS: Final[dict[str, type[Exception]]] = {
    "tool_timeout": TimeoutError,
    "file_access_error": OSError,
    "tool_input_invalid": ValueError,
}


@dataclass(frozen=True)
class CommandResult:
    """A command that ran in the sidecar to its end, successfully or not."""

    exit_code: int
    """The exit code of the command; 127 if it does not exist, 128 + N if signal N ended it."""
    stdout: bytes
    stderr: bytes
    truncated: bool
    """Whether output beyond 10 MiB was cut."""
    duration_s: float

    def text(self) -> str:
        """Return stdout as text; invalid UTF-8 becomes U+FFFD."""
        return self.stdout.decode(errors="replace")


def exec(
    command: str | list[str],
    *,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    stdin: bytes | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> CommandResult:
    """Run a command in the sidecar.

    Args:
        command: Program and arguments, or text for ``/bin/sh -c``.
        cwd: Working directory. None: that of the image.
        env: Variables added to the container's.
        stdin: Written to standard input.
        timeout_s: Seconds after which it is killed, with all processes that it started.

    Returns:
        The result, also of a command that fails or does not exist.

    Raises:
        TimeoutError: It reached `timeout_s` and was killed.
        OSError: The directory `cwd` does not exist.
        RuntimeError: The instance is not up: this was called while its code was imported.
        Fault: The instance has no sidecar, or it ended. The caller of the tool gets this error.

    Stopping the call that runs this kills the command. It runs once, even if the host is replaced.
    """
    return _command_result(_ask("aenv/exec", _exec_arguments(command, cwd, env, stdin), timeout_s))


def read_file(path: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes:
    """Return the content of a file in the sidecar.

    Args:
        path: Absolute, or relative to the image's working directory.
        timeout_s: Time limit in seconds.

    Raises:
        OSError: It cannot be read.
        TimeoutError, RuntimeError, Fault: As for `exec`.
    """
    return base64.b64decode(_ask("aenv/read_file", {"path": path}, timeout_s)["data"])


def write_file(
    path: str,
    data: bytes | str,
    *,
    mode: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Write a file in the sidecar, create its directories, and return its size in bytes.

    Args:
        path: Absolute, or relative to the image's working directory.
        data: Text is written as UTF-8.
        mode: Permission bits. None: those of the existing file, or by the umask.
        timeout_s: Time limit in seconds.

    Raises:
        OSError: It cannot be written.
        TimeoutError, RuntimeError, Fault: As for `exec`.
    """
    return int(_ask("aenv/write_file", _file_arguments(path, data, mode), timeout_s)["size_bytes"])


class _Aio:
    """The same functions as coroutines; cancelling one kills its command."""

    async def exec(
        self,
        command: str | list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> CommandResult:
        """Run a command, as `exec` does."""
        arguments = _exec_arguments(command, cwd, env, stdin)
        return _command_result(await _ask_async("aenv/exec", arguments, timeout_s))

    async def read_file(self, path: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes:
        """Return a file, as `read_file` does."""
        data = await _ask_async("aenv/read_file", {"path": path}, timeout_s)
        return base64.b64decode(data["data"])

    async def write_file(
        self,
        path: str,
        data: bytes | str,
        *,
        mode: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """Write a file, as `write_file` does."""
        arguments = _file_arguments(path, data, mode)
        return int((await _ask_async("aenv/write_file", arguments, timeout_s))["size_bytes"])


aio: Final = _Aio()


# --- asking --------------------------------------------------------------------------------------


def _ask(method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    params = _params(method, arguments, timeout_s)
    answer = ask_host(SIDECAR_METHOD, params, timeout_s + _GRACE_S, current_call())
    if answer is None:
        raise _silent(method, timeout_s)
    return _data(answer)


async def _ask_async(method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    params = _params(method, arguments, timeout_s)
    answer = await ask_host_async(SIDECAR_METHOD, params, timeout_s + _GRACE_S)
    if answer is None:
        raise _silent(method, timeout_s)
    return _data(answer)


def _params(method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    if not HOST.was_open:
        raise RuntimeError(
            "the sidecar is not available while the code is imported: call it in a tool, a reward "
            "or a function"
        )
    meta = {
        "aenv/call_id": f"second-{uuid.uuid4().hex}",
        "aenv/timeout_s": timeout_s,
        AFTER_TOOLS: HOST.agent_has_acted,
        OUTER_REWARDS: current_call().rewards_before,
    }
    return {"method": method, "params": {"arguments": arguments, "_meta": meta}}


def _data(answer: dict[str, Any]) -> dict[str, Any]:
    error = answer.get("error")
    if error is None:
        return dict(answer["result"]["data"])
    data = error.get("data") or {}
    code, message = str(data.get("code", "internal_error")), str(error.get("message"))
    if code in _ERRORS:
        raise _ERRORS[code](message)
    raise Fault(code, message, data.get("hint"))


def _silent(method: str, timeout_s: float) -> Fault:
    return Fault(
        "call_outcome_unknown",
        f"the sidecar did not answer {method} within {timeout_s:g} s",
        "it may have run, and was not sent again",
    )


def _exec_arguments(
    command: str | list[str], cwd: str | None, env: dict[str, str] | None, stdin: bytes | None
) -> dict[str, Any]:
    coded = None if stdin is None else base64.b64encode(stdin).decode()
    wanted = {"command": command, "cwd": cwd, "env": env, "stdin": coded}
    return {name: value for name, value in wanted.items() if value is not None}


def _file_arguments(path: str, data: bytes | str, mode: int | None) -> dict[str, Any]:
    content = data.encode() if isinstance(data, str) else data
    wanted = {"path": path, "data": base64.b64encode(content).decode(), "mode": mode}
    return {name: value for name, value in wanted.items() if value is not None}


def _command_result(data: dict[str, Any]) -> CommandResult:
    return CommandResult(
        exit_code=data["exit_code"],
        stdout=base64.b64decode(data["stdout"]),
        stderr=base64.b64decode(data["stderr"]),
        truncated=data["truncated"],
        duration_s=data["duration_s"],
    )
