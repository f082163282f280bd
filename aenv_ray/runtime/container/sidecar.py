"""The second container of an instance, for environment code (``podTemplate: "DualContainer"``).

``from aenv_ray.runtime import second`` and call ``second.exec("pytest -q")`` in a tool, a reward or
a function; ``await second.aio.exec("pytest -q")`` in an async one. It goes through the instance's
host: there is no socket of a daemon in any container. Both containers see ``/shared``.
"""

from __future__ import annotations

import base64
import threading
import uuid
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.runtime.door.calls import DEFAULT_TIMEOUT_S, current_call
from aenv_ray.runtime.door.host_link import HOST
from aenv_ray.runtime.faults import Fault

_GRACE_S: Final = 5.0
"""What an answer may take beyond the timeout, which the second container keeps itself."""
_ERRORS: Final[dict[str, type[Exception]]] = {
    "tool_timeout": TimeoutError,
    "file_access_error": OSError,
    "tool_input_invalid": ValueError,
}


@dataclass(frozen=True)
class CommandResult:
    """A command that ran in the second container to its end; a failing one is a result too."""

    exit_code: int
    """The command's own; 127 when it does not exist, 128 + signal when a signal ended it."""
    stdout: bytes
    stderr: bytes
    truncated: bool
    """Output beyond 10 MiB was cut."""
    duration_s: float

    def text(self) -> str:
        """Return stdout as text; bytes that are no UTF-8 become U+FFFD."""
        return self.stdout.decode(errors="replace")


def exec(
    command: str | list[str],
    *,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    stdin: bytes | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> CommandResult:
    """Run a command in the second container.

    Args:
        command: Program and arguments, or text for ``/bin/sh -c``.
        cwd: Working directory. None: that of its image.
        env: Variables added to the container's.
        stdin: Written to standard input.
        timeout_s: Seconds after which it is killed with all that it started.

    Returns:
        What came out; a command that fails or does not exist is a result.

    Raises:
        TimeoutError: It reached `timeout_s` and was killed.
        OSError: There is no directory `cwd`.
        RuntimeError: The instance is not up yet: this was called while the code is loaded.
        Fault: There is no second container, or it ended; the caller gets that error.

    Stopping the call that runs this kills the command. It runs once, whatever becomes of the host.
    """
    return _command_result(_ask("aenv/exec", _exec_arguments(command, cwd, env, stdin), timeout_s))


def read_file(path: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes:
    """Return a file of the second container.

    Args:
        path: Absolute, or relative to the image's working directory.
        timeout_s: Seconds that it may take.

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
    """Write a file of the second container, making its directories, and return its size in bytes.

    Args:
        path: Absolute, or relative to the image's working directory.
        data: Text is written as UTF-8.
        mode: Permission bits. None: what the umask gives, or what the file has.
        timeout_s: Seconds that it may take.

    Raises:
        OSError: It cannot be written.
        TimeoutError, RuntimeError, Fault: As for `exec`.
    """
    return int(_ask("aenv/write_file", _file_arguments(path, data, mode), timeout_s)["size_bytes"])


class _Aio:
    """The same as coroutines; cancelling one kills its command."""

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
    answers: list[dict[str, Any]] = []
    done = threading.Event()

    def on_answer(answer: dict[str, Any]) -> None:
        answers.append(answer)
        done.set()

    request_id = HOST.new_id()
    try:  # an interrupt may come as soon as the request is on its way
        HOST.ask(request_id, "aenv/second", params, on_answer)
        current_call().bind_stop(done.set)  # a thread that waits is interrupted when it wakes
        done.wait(timeout_s + _GRACE_S)
    finally:
        HOST.cancel(request_id)  # does nothing once it is answered
    if not answers:
        raise _silent(method, timeout_s)
    return _data(answers[0])


async def _ask_async(method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    import asyncio  # code without coroutines stays that much smaller

    params = _params(method, arguments, timeout_s)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[dict[str, Any]] = loop.create_future()

    def settle(answer: dict[str, Any]) -> None:
        if not future.done():
            future.set_result(answer)

    def on_answer(answer: dict[str, Any]) -> None:
        loop.call_soon_threadsafe(settle, answer)

    request_id = HOST.new_id()
    HOST.ask(request_id, "aenv/second", params, on_answer)
    try:
        async with asyncio.timeout(timeout_s + _GRACE_S):
            return _data(await future)
    except TimeoutError:
        if future.done():
            raise  # the command's own
        raise _silent(method, timeout_s) from None
    finally:
        HOST.cancel(request_id)


def _params(method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    if not HOST.was_open:
        raise RuntimeError(
            "the second container can be asked once the instance is up: call it in a tool, a "
            "reward or a function, not while the code is loaded"
        )
    meta = {"aenv/call_id": f"second-{uuid.uuid4().hex}", "aenv/timeout_s": timeout_s}
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
        f"the second container did not answer {method} within {timeout_s:g} s",
        "it may have run; it was not asked again",
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
