"""Checks an environment project for its authors, in a fresh sandbox: ``aenv test --check``.

    from aenv_ray.testing.environment_check import check_environment

    def test_the_environment_has_no_findings():
        assert check_environment("path/to/project") == []

Only the listings and the health check are called, because tools and rewards may have effects.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray import units
from aenv_ray.actors.host.fresh_sandbox import fresh_sandbox
from aenv_ray.engines.base import Engine, Sandbox
from aenv_ray.errors import AenvError
from aenv_ray.findings import Finding, Verdict
from aenv_ray.ids import HostId
from aenv_ray.project import project
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.project.dockerfile import EXPOSED_HINT, exposes_source
from aenv_ray.project.project import Project
from aenv_ray.runtime.door.dispatch import HEALTHY

TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Names that OpenAI and most model servers accept."""
MAX_TOOLS: Final = 128
"""OpenAI's limit of functions per request."""
_CALL_S: Final = 60.0
_SEMANTIC_VERSION: Final = re.compile(r"\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?")
_COMBINERS: Final = ("oneOf", "anyOf", "allOf", "not", "enum")


def check_environment(
    path: str | Path, make_engine: Callable[[HostId], Engine] | None = None
) -> list[Finding]:
    """Return the problems of a project, failed findings first; empty if there are none.

    Args:
        path: The project's directory.
        make_engine: Returns the engine to use. None: the process engine.

    In a running event loop, await `find_problems` instead.
    """
    return asyncio.run(find_problems(path, make_engine))


async def find_problems(
    path: str | Path, make_engine: Callable[[HostId], Engine] | None = None
) -> list[Finding]:
    """Return the problems of a project; see `check_environment`."""
    try:
        loaded = project.load(path)
    except AenvError as exc:
        return [Finding(str(path), Verdict.FAILED, exc.message, exc.hint or "")]
    findings = [*_config(loaded.config), *_image(loaded)]
    try:
        async with fresh_sandbox(
            loaded, lifetime_s=units.DEFAULT_TTL_S, make_engine=make_engine
        ) as sandbox:
            findings += await _in_sandbox(sandbox)
    except AenvError as exc:
        findings.append(Finding("start", Verdict.FAILED, exc.message, exc.hint or ""))
    return sorted(findings, key=lambda finding: finding.verdict is not Verdict.FAILED)


async def _in_sandbox(sandbox: Sandbox) -> list[Finding]:
    findings = list(_start_mode(sandbox))
    tools = (await sandbox.request("tools/list", {}, deadline_s=_CALL_S))["tools"]
    findings += _tools(tools)
    functions = await sandbox.request("aenv/functions", {}, deadline_s=_CALL_S)
    findings += _rewards(functions, {tool["name"] for tool in tools})
    health = await sandbox.request("aenv/health", {}, deadline_s=_CALL_S)
    findings += _health(health["data"])
    return findings


# --- the checks ---------------------------------------------------------------------------------


def _failed(name: str, found: str, hint: str = "") -> Finding:
    return Finding(name, Verdict.FAILED, found, hint)


def _warning(name: str, found: str, hint: str = "") -> Finding:
    return Finding(name, Verdict.WARNING, found, hint)


def _config(config: EnvironmentConfig) -> Iterator[Finding]:
    where = "config.json"
    if not _SEMANTIC_VERSION.fullmatch(config.version):
        found = f"version {config.version!r} is not a semantic version"
        yield _warning(where, found, "write it as 1.2.3, so that versions can be compared")
    if config.deploy.network is None:
        found = "deployConfig.network is not set, so instances use the node's network"
        yield _warning(where, found, 'set "network": "none" unless the tools need a network')
    if not config.description.strip():
        yield _warning(where, "the description is empty", 'set "description"')


def _image(loaded: Project) -> Iterator[Finding]:
    if exposed := exposes_source(loaded):
        yield _warning("Dockerfile", exposed, EXPOSED_HINT)


def _start_mode(sandbox: Sandbox) -> Iterator[Finding]:
    mode, _, reason = sandbox.start_mode.partition(": ")
    if mode == "bare":
        found = f"each instance loads the code itself, which is slow: {reason}"
        yield _warning("start", found, "do this in the first tool call instead of at import")


def _tools(tools: list[dict[str, Any]]) -> Iterator[Finding]:
    if len(tools) > MAX_TOOLS:
        yield _warning("tools", f"{len(tools)} tools; model servers accept {MAX_TOOLS}")
    for tool in tools:
        where = f"tool {tool['name']}"
        if not TOOL_NAME.fullmatch(tool["name"]):
            hint = "use 1 to 64 letters, digits, _ and -"
            yield _failed(where, "model servers reject this name", hint)
        if not (tool.get("description") or "").strip():
            hint = "give the function a docstring"
            yield _warning(where, "it has no description for the model", hint)
        yield from _schema(where, tool["inputSchema"])


def _schema(where: str, schema: Mapping[str, Any]) -> Iterator[Finding]:
    if schema.get("type") != "object":
        yield _failed(where, "its input schema is not an object")
    for word in _COMBINERS:
        if word in schema:
            yield _failed(where, f"its input schema has {word!r} at the top level")
    if schema.get("additionalProperties") is True:
        yield _warning(where, "it accepts any argument (**kwargs), so typos go unnoticed")
    for name, prop in schema.get("properties", {}).items():
        typed = {"type", "$ref", "const", "enum", "anyOf", "allOf", "oneOf"} & prop.keys()
        if not typed:
            yield _warning(where, f"argument {name!r} has no type", "annotate the parameter")
        if not TOOL_NAME.fullmatch(name):
            yield _failed(where, f"model servers reject the argument name {name!r}")


def _rewards(listing: Mapping[str, Any], tools: set[str]) -> Iterator[Finding]:
    if not listing["reward"]:
        hint = "decorate a function with @register_reward"
        yield _warning("rewards", "there is no reward, so a model cannot learn from it", hint)
    for kind in ("reward", "functions"):
        for entry in listing[kind]:
            name, where = entry["name"], f"{kind.rstrip('s')} {entry['name']}"
            if not name.strip() or "\n" in name or "/" in name:
                hint = "use a name without / and line breaks"
                yield _failed(where, "it cannot be called by this name", hint)
            if name in tools:
                hint = "rename one of them"
                yield _failed(where, "a tool has the same name, and agents can call tools", hint)


def _health(health: Mapping[str, Any]) -> Iterator[Finding]:
    if health.get("status") not in HEALTHY:
        text = health.get("message") or health.get("status")
        yield _failed("health", f"a fresh instance is not healthy: {text}")
