"""What a handle's methods are given, checked where the caller gives it, in the wire's shape."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aenv_ray.actors.calls.wire import MAX_WRITE_BYTES
from aenv_ray.errors import ConfigError, FileAccessError, ToolInputInvalid
from aenv_ray.ids import CallId, new_call_id


def object_of(name: str | None, arguments: Any) -> Mapping[str, Any]:
    """Return the arguments of a call; None, and nothing else, is none.

    Raises:
        ToolInputInvalid: They are no object.
    """
    if arguments is None:
        return {}
    if type(arguments) is not dict and not isinstance(arguments, Mapping):
        raise ToolInputInvalid(
            f"arguments of {name!r} are {type(arguments).__name__}, not an object",
            tool_name=name,
            hint='write them as {"name": value}',
        )
    return arguments


def call_pairs(calls: Any) -> list[tuple[Any, Any]]:
    """Return the calls of a batch as ``(name, arguments)``, no arguments as ``{}``.

    What is wrong with the arguments of one is that call's own failure, and found when it runs.

    Raises:
        ToolInputInvalid: They are no list, or one is no pair.
    """
    hint = 'write them as [("tool", {"name": value}), …]'
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
        raise ToolInputInvalid(f"calls are {type(calls).__name__}, not a list of pairs", hint=hint)
    pairs = []
    for n, call in enumerate(calls):
        if isinstance(call, str | bytes) or not isinstance(call, Sequence) or len(call) != 2:
            raise ToolInputInvalid(
                f"calls[{n}] is {str(call)[:80]!r}, not a pair of name and arguments", hint=hint
            )
        name, arguments = call
        pairs.append((name, {} if arguments is None else arguments))
    return pairs


def call_id_of(call_id: Any) -> CallId:
    """Return the caller's id of a call; a new one where there is none.

    Raises:
        ConfigError: It is no text, or empty: calls of one id are one call.
    """
    if call_id is None:
        return new_call_id()
    if not isinstance(call_id, str) or not call_id:
        raise ConfigError(f"call_id {call_id!r} is no id", hint="leave it out, or make it unique")
    return CallId(call_id)


def exec_arguments(command: Any, cwd: Any, env: Any, stdin: Any) -> dict[str, Any]:
    """Return the arguments of a command.

    Raises:
        ToolInputInvalid: The command is neither text nor a list, the variables are no mapping, or
            the input is not bytes.
    """
    if isinstance(command, bytes) or not isinstance(command, str | Sequence):
        raise _unfit("exec", "command", command, 'write it as "ls -l" or ["ls", "-l"]')
    arguments: dict[str, Any] = {"command": command if isinstance(command, str) else list(command)}
    if cwd is not None:
        arguments["cwd"] = cwd
    if env is not None:
        if not isinstance(env, Mapping):
            raise _unfit("exec", "env", env, 'write it as {"NAME": "value"}')
        arguments["env"] = dict(env)
    if stdin is not None:
        if not isinstance(stdin, bytes | bytearray | memoryview):
            raise _unfit("exec", "stdin", stdin, "it is bytes: encode text with .encode()")
        arguments["stdin"] = base64.b64encode(stdin).decode()
    return arguments


def write_arguments(
    path: Any, data: Any, append: bool, mode: int | None, instance_id: str
) -> dict[str, Any]:
    """Return the arguments of a write.

    Raises:
        ToolInputInvalid: The data are neither bytes nor text.
        FileAccessError: They are more than one write carries.
    """
    if isinstance(data, str):
        try:
            payload = data.encode()
        except UnicodeEncodeError as exc:
            raise ToolInputInvalid(
                f"data of 'write_file' cannot be UTF-8: {exc}",
                tool_name="write_file",
                hint="encode the text yourself and pass bytes",
            ) from None
    elif isinstance(data, bytes | bytearray | memoryview):
        payload = bytes(data)
    else:
        raise _unfit("write_file", "data", data, "pass bytes or text")
    if len(payload) > MAX_WRITE_BYTES:
        raise FileAccessError(
            f"{str(path)!r} cannot be written: {len(payload):,} bytes are more than the "
            f"{MAX_WRITE_BYTES:,} that one write carries",
            instance_id=instance_id,
            hint="write it in pieces, with append=True from the second on",
        )
    return {
        "path": path,
        "data": base64.b64encode(payload).decode(),
        "append": append,
        "mode": mode,
    }


def _unfit(method: str, what: str, value: Any, hint: str) -> ToolInputInvalid:
    message = f"{what} of {method!r} is {type(value).__name__}"
    return ToolInputInvalid(message, tool_name=method, hint=hint)
