"""Relays calls from our fast door to the server of an image.

An unmodified AEnvironment image serves its public door on port 8081. In such a container our
runtime is process 1: it starts the image's server, asks for the list of its functions, and forwards
calls to it over the loopback interface. So the server needs no port of the node and no network, and
calls have ids, deadlines and cancellation as everywhere else. The container ends with the server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from urllib.parse import quote, urlencode

from aenv_ray.runtime.api.registry import DEFAULT_REWARD_PATH, Registered, Registry
from aenv_ray.runtime.api.results import Passed
from aenv_ray.runtime.api.signature import Signature
from aenv_ray.runtime.container.relay_http import PublicServer
from aenv_ray.runtime.door.calls import current_call
from aenv_ray.runtime.faults import Fault
from aenv_ray.runtime.system import carried_python
from aenv_ray.runtime.system.threads import start_thread

PORT: Final = 8081
_POLL_S: Final = 0.02
_MISSING_EXIT: Final = 127
_FIRST_SIGNAL_EXIT: Final = 128
_KILLED_EXIT: Final = 70  # EX_SOFTWARE
_INVALID: Final = re.compile(r"^(Error calling tool [^:]*: )?\d+ validation errors? for ")
"""FastMCP's message for invalid arguments, which nothing else identifies."""
_WRAPPED: Final = "x-fastmcp-wrap-result"


def serve(command: Sequence[str], directory: str) -> Registry:
    """Start an image's server, wait until it listens, and return its functions.

    Args:
        command: The server's command.
        directory: Its working directory.

    This process exits with the server's exit code, or with 70 if a signal ended the server, as soon
    as the server ends. The engine bounds how long the start may take.
    """
    start_thread(lambda: _run(command, directory))
    server = PublicServer(PORT)
    while not server.is_listening:
        time.sleep(_POLL_S)
    return registry_of(server)


def _run(command: Sequence[str], directory: str) -> None:
    """Run the server as a child of this thread: the main thread reaps only orphans."""
    try:
        variables = carried_python.variables_for(command[0])
        process = subprocess.Popen(command, cwd=directory, env=variables, stdin=subprocess.DEVNULL)
    except OSError as exc:
        print(f"{command[0]}: {exc}", flush=True)  # noqa: T201  # stdout is the instance's log
        os._exit(_MISSING_EXIT)
    code = process.wait()
    if 0 <= code < _FIRST_SIGNAL_EXIT:
        os._exit(code)
    # An exit with 128 + N would look as if signal N had ended process 1, which happens only from
    # outside the sandbox.
    print(f"the image's server ended with {code}", flush=True)  # noqa: T201  # to the log
    os._exit(_KILLED_EXIT)


def registry_of(server: PublicServer) -> Registry:
    """Return the functions of a public door; each entry forwards its calls.

    Raises:
        Fault: The server does not list its functions.
    """
    registry = Registry()
    for tool in _tools(server):
        registry.tools[tool["name"]] = Remote(
            name=tool["name"],
            function=_tool_call(server, tool),
            kind="tool",
            description=tool.get("description"),
            listed=tool,
        )
    listed = _listing(server)
    for entry in listed.get("functions") or []:
        registry.functions[entry["name"]] = _remote(server, entry, "function")
    rewards = listed.get("reward") or []
    for number, entry in enumerate(rewards):
        # AEnvironment serves only the first of several rewards, and without its name.
        paths = [] if len(rewards) == 1 else [f"{DEFAULT_REWARD_PATH}/{quote(entry['name'])}"]
        paths += [DEFAULT_REWARD_PATH] if number == 0 else []
        registry.rewards[entry["name"]] = _remote(server, entry, "reward", paths)
    health = {"name": "health", "endpoint": "/health", "method": "GET", "parameters": {}}
    registry.health = _remote(server, health, "health")
    return registry


def _tools(server: PublicServer) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    params: dict[str, Any] = {}
    while True:
        page = server.rpc("tools/list", params)
        tools += page.get("tools") or []
        if not page.get("nextCursor"):
            return tools
        params = {"cursor": page["nextCursor"]}


def _listing(server: PublicServer) -> dict[str, Any]:
    status, answer = server.ask("GET", "/functions/list")
    if status == 404:
        return {}  # a plain MCP server
    if status != 200 or not isinstance(answer, dict) or not answer.get("success"):
        raise Fault("sandbox_start_failed", f"/functions/list answered HTTP {status}: {answer}")
    return dict(answer["data"])


# --- entries -------------------------------------------------------------------------------------


class _RemoteSignature(Signature):
    """The parameters of a function as the server lists them; the server validates their types.

    Args:
        schema: JSON Schema of the arguments.
        takes_any: Whether arguments that the schema does not name are passed on.
    """

    def __init__(self, schema: Mapping[str, Any], description: str, *, takes_any: bool) -> None:
        self.description = description
        self.schema = dict(schema)
        self.accepts_any = takes_any

    @property
    def names(self) -> list[str]:
        return list(self.schema.get("properties") or {})

    def bind(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        known = self.names
        problems = [f"{key}: Field required" for key in self.schema.get("required") or ()
                    if key not in arguments]  # fmt: skip
        if not self.accepts_any:
            extra = [key for key in arguments if key not in known]
            problems += [f"{key}: Extra inputs are not permitted" for key in extra]
        if problems:
            raise Fault(
                "tool_input_invalid",
                f"arguments of {name!r} do not fit its schema: {'; '.join(problems)}",
                f"{name} takes {', '.join(known) or 'no arguments'}",
                tool_name=name,
            )
        return dict(arguments)


@dataclass(frozen=True, kw_only=True)
class Remote(Registered):
    """A function of the image's server."""

    is_forwarded: bool = True
    listed: dict[str, Any]
    """What the server lists: an MCP ``Tool`` object, or an entry of ``/functions/list``."""

    @cached_property
    def signature(self) -> Signature:  # noqa: D102
        if self.kind == "tool":
            schema = self.listed.get("inputSchema") or {}
            takes_any = bool(schema.get("additionalProperties"))
        else:
            names = self.listed.get("parameters") or {}
            schema = {"type": "object", "properties": {name: {} for name in names}}
            # AEnvironment lists ``**kwargs`` like an ordinary parameter.
            takes_any = not names or bool({"kwargs", "args"} & set(names))
        return _RemoteSignature(schema, self.description or "", takes_any=takes_any)

    def mcp_tool(self) -> dict[str, Any]:  # noqa: D102
        return {"description": "", **self.listed}

    def listing(self) -> dict[str, Any]:  # noqa: D102
        return dict(self.listed)


def _tool_call(server: PublicServer, tool: Mapping[str, Any]) -> Callable[..., Any]:
    name = tool["name"]
    is_wrapped = bool((tool.get("outputSchema") or {}).get(_WRAPPED))

    def call(**arguments: Any) -> Passed:
        meta = {"progressToken": current_call().call_id}
        wanted = {"name": name, "arguments": arguments, "_meta": meta}
        result = server.rpc("tools/call", wanted)
        known = result.get("_meta") or {}
        error = known.get("aenv/error")
        if isinstance(error, dict):
            context = {k: v for k, v in error.items() if k not in ("code", "message", "hint")}
            raise Fault(error["code"], error["message"], error.get("hint"), **context)
        text = next((b.get("text", "") for b in result.get("content") or []), "")
        if result.get("isError") and _INVALID.match(text):
            raise Fault("tool_input_invalid", f"arguments of {name!r}: {text}", tool_name=name)
        if is_wrapped and not result.get("isError"):
            result["_meta"] = {**known, "aenv/wrapped": True}
        return Passed({"content": [], "isError": False, **result})

    return call


def _remote(
    server: PublicServer, entry: Mapping[str, Any], kind: str, paths: Sequence[str] = ()
) -> Remote:
    """Return an entry that forwards calls to the first of `paths` that the server knows."""
    name, method = str(entry["name"]), str(entry.get("method") or "POST")
    paths = paths or [str(entry.get("endpoint") or f"/functions/{quote(name, safe='')}")]

    def call(**arguments: Any) -> Any:
        status, answer = 0, None
        for path in paths:
            if method == "GET":
                texts = {k: v if isinstance(v, str) else json.dumps(v)
                         for k, v in arguments.items()}  # fmt: skip
                query = f"?{urlencode(texts)}" if texts else ""
                status, answer = server.ask(method, path + query)
            else:
                status, answer = server.ask(method, path, arguments)
            if status != 404:
                break
        return _data(name, kind, status, answer)

    return Remote(
        name=name,
        function=call,
        kind=kind,
        description=entry.get("description"),
        endpoint=DEFAULT_REWARD_PATH if kind == "reward" else paths[0],
        method=method,
        listed=dict(entry),
    )


def _data(name: str, kind: str, status: int, answer: Any) -> Any:
    """Return the ``data`` of an answer.

    Raises:
        Fault: The answer has no data; the code is the server's, if it gives one.
    """
    body = answer if isinstance(answer, dict) else {}
    if status < 400 and body.get("success"):
        return body.get("data")
    text = str(body.get("error") or answer)[:2000]
    if "code" in body:
        raise Fault(str(body["code"]), text, body.get("hint"), tool_name=name)
    if status == 404:
        raise Fault("tool_not_found", f"the image's server has no {kind} {name!r}", tool_name=name)
    # AEnvironment answers invalid arguments with 500 and the message of Python's TypeError.
    wrong = re.match(rf"^{re.escape(name)}\(\) (missing|got an unexpected|takes )", text)
    if status in {400, 413, 422} or wrong:
        raise Fault("tool_input_invalid", f"arguments of {name!r}: {text}", tool_name=name)
    raise Fault("function_failed", f"{kind} {name!r} raised {text}", tool_name=name)
