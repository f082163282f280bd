"""Validation of the parameters of a handle's methods, and their conversion to the wire format."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aenv_ray.actors.calls.wire import MAX_WRITE_BYTES
from aenv_ray.errors import ConfigError, FileAccessError, ToolInputInvalid
from aenv_ray.ids import CallId, new_call_id


def object_of(name: str | None, arguments: Any) -> Mapping[str, Any]:
    """Return the arguments of a call; None means no arguments.

    Raises:
        ToolInputInvalid: They are not a mapping.
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
    """Return the calls of a batch as ``(name, arguments)``, with ``{}`` for no arguments.

    Invalid arguments of one call are not rejected here: that call fails when the batch runs.

    Raises:
        ToolInputInvalid: The calls are not a list of pairs.
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
    """Return the caller's call id, or a new one.

    Raises:
        ConfigError: The id is not a string, or is empty: calls with the same id run once.
    """
    if call_id is None:
        return new_call_id()
    if not isinstance(call_id, str) or not call_id:
        raise ConfigError(
            f"invalid call_id {call_id!r}: expected a non-empty string",
            hint="leave it out, or make it unique",
        )
    return CallId(call_id)


def exec_arguments(command: Any, cwd: Any, env: Any, stdin: Any) -> dict[str, Any]:
    """Return the arguments of `EnvHandle.exec`.

    Raises:
        ToolInputInvalid: The command is neither a string nor a list, the variables are not a
            mapping, or the input is not bytes.
    """
    if isinstance(command, bytes) or not isinstance(command, str | Sequence):
        raise _invalid("exec", "command", command, 'write it as "ls -l" or ["ls", "-l"]')
    arguments: dict[str, Any] = {"command": command if isinstance(command, str) else list(command)}
    if cwd is not None:
        arguments["cwd"] = cwd
    if env is not None:
        if not isinstance(env, Mapping):
            raise _invalid("exec", "env", env, 'write it as {"NAME": "value"}')
        arguments["env"] = dict(env)
    if stdin is not None:
        if not isinstance(stdin, bytes | bytearray | memoryview):
            raise _invalid("exec", "stdin", stdin, "pass bytes: encode text with .encode()")
        arguments["stdin"] = base64.b64encode(stdin).decode()
    return arguments


def write_arguments(
    path: Any, data: Any, append: bool, mode: int | None, instance_id: str
) -> dict[str, Any]:
    """Return the arguments of `EnvHandle.write_file`.

    Raises:
        ToolInputInvalid: The data is neither bytes nor text.
        FileAccessError: The data exceeds the limit of one write.
    """
    if isinstance(data, str):
        try:
            payload = data.encode()
        except UnicodeEncodeError as exc:
            raise ToolInputInvalid(
                f"data of 'write_file' cannot be encoded as UTF-8: {exc}",
                tool_name="write_file",
                hint="encode the text yourself and pass bytes",
            ) from None
    elif isinstance(data, bytes | bytearray | memoryview):
        payload = bytes(data)
    else:
        raise _invalid("write_file", "data", data, "pass bytes or text")
    if len(payload) > MAX_WRITE_BYTES:
        raise FileAccessError(
            f"{str(path)!r} cannot be written: {len(payload):,} bytes are more than the limit of "
            f"{MAX_WRITE_BYTES:,} per write",
            instance_id=instance_id,
            hint="write it in pieces, with append=True after the first",
        )
    return {
        "path": path,
        "data": base64.b64encode(payload).decode(),
        "append": append,
        "mode": mode,
    }


def _invalid(method: str, what: str, value: Any, hint: str) -> ToolInputInvalid:
    message = f"{what} of {method!r} is {type(value).__name__}"
    return ToolInputInvalid(message, tool_name=method, hint=hint)
