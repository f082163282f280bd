"""Findings about an environment project, for its authors: loaded and asked in a fresh sandbox.

    from aenv_ray.testing.environment_check import check_environment

    def test_the_environment_is_fit():
        assert check_environment("path/to/project") == []

Nothing is called but the listings and the health check: tools and rewards may have effects.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from aenv_ray import units
from aenv_ray.actors.host.fresh_sandbox import fresh_sandbox
from aenv_ray.engines.base import Engine, Sandbox
from aenv_ray.errors import AenvError
from aenv_ray.ids import HostId
from aenv_ray.project import project
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.runtime.door.dispatch import HEALTHY

TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What OpenAI and most model servers accept."""
MAX_TOOLS: Final = 128
"""OpenAI's limit of functions in one request."""
_CALL_S: Final = 60.0
_SEMANTIC_VERSION: Final = re.compile(r"\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?")
_COMBINERS: Final = ("oneOf", "anyOf", "allOf", "not", "enum")


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """The environment does not work, or not everywhere."""
    WARNING = "warning"
    """It works; a model, a trainer or an operator may stumble."""


@dataclass(frozen=True)
class Finding:
    """One thing that the author should look at."""

    severity: Severity
    where: str
    """``config.json``, ``tool echo``, ``health`` …"""
    message: str
    hint: str = ""

    def __str__(self) -> str:
        way_out = f" ({self.hint})" if self.hint else ""
        return f"{self.severity.value}: {self.where}: {self.message}{way_out}"


def check_environment(
    path: str | Path, make_engine: Callable[[HostId], Engine] | None = None
) -> list[Finding]:
    """Return what is wrong with a project, errors first; an empty list when nothing is.

    Args:
        path: The project's directory.
        make_engine: None: the process engine, of which nothing is left afterwards.

    Not to be called from a running event loop; `find` is the same for there.
    """
    return asyncio.run(find(path, make_engine))


async def find(
    path: str | Path, make_engine: Callable[[HostId], Engine] | None = None
) -> list[Finding]:
    """Return the findings; arguments as for `check_environment`."""
    try:
        loaded = project.load(path)
    except AenvError as exc:
        return [Finding(Severity.ERROR, str(path), exc.message, exc.hint or "")]
    findings = list(_config(loaded.config))
    try:
        async with fresh_sandbox(
            loaded, lifetime_s=units.DEFAULT_TTL_S, make_engine=make_engine
        ) as sandbox:
            findings += await _in_sandbox(sandbox)
    except AenvError as exc:
        findings.append(Finding(Severity.ERROR, "start", exc.message, exc.hint or ""))
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


async def _in_sandbox(sandbox: Sandbox) -> list[Finding]:
    findings = list(_start_mode(sandbox))
    tools = (await sandbox.request("tools/list", {}, deadline_s=_CALL_S))["tools"]
    findings += _tools(tools)
    functions = await sandbox.request("aenv/functions", {}, deadline_s=_CALL_S)
    findings += _rewards(functions, {tool["name"] for tool in tools})
    health = await sandbox.request("aenv/health", {}, deadline_s=_CALL_S)
    findings += _health(health["data"])
    return findings


# --- what is looked at --------------------------------------------------------------------------


def _config(config: EnvironmentConfig) -> Iterator[Finding]:
    if not _SEMANTIC_VERSION.fullmatch(config.version):
        yield Finding(
            Severity.WARNING, "config.json", f"version {config.version!r} is not semantic",
            "write it as 1.2.3, so that versions can be compared",
        )  # fmt: skip
    if config.deploy.network is None:
        yield Finding(
            Severity.WARNING, "config.json", "deployConfig.network is not set, so it is the host's",
            'set "network": "none" unless its tools need a network',
        )  # fmt: skip
    if not config.description.strip():
        yield Finding(Severity.WARNING, "config.json", "it has no description")


def _start_mode(sandbox: Sandbox) -> Iterator[Finding]:
    mode, _, reason = sandbox.start_mode.partition(": ")
    if mode == "bare":
        yield Finding(
            Severity.WARNING, "start", f"instances load the code each for itself: {reason}",
            "do it when a tool is called first, and instances start in milliseconds",
        )  # fmt: skip


def _tools(tools: list[dict[str, Any]]) -> Iterator[Finding]:
    if len(tools) > MAX_TOOLS:
        yield Finding(
            Severity.WARNING, "tools", f"there are {len(tools)}; model servers take {MAX_TOOLS}"
        )
    for tool in tools:
        where = f"tool {tool['name']}"
        if not TOOL_NAME.fullmatch(tool["name"]):
            yield Finding(
                Severity.ERROR, where, "model servers refuse this name",
                "use 1 to 64 letters, digits, _ and -",
            )  # fmt: skip
        if not (tool.get("description") or "").strip():
            yield Finding(
                Severity.WARNING, where, "it has no description for the model",
                "give the function a docstring",
            )  # fmt: skip
        yield from _schema(where, tool["inputSchema"])


def _schema(where: str, schema: Mapping[str, Any]) -> Iterator[Finding]:
    if schema.get("type") != "object":
        yield Finding(Severity.ERROR, where, "its input schema is not an object")
    for word in _COMBINERS:
        if word in schema:
            yield Finding(Severity.ERROR, where, f"its input schema has {word!r} at the top")
    if schema.get("additionalProperties") is True:
        yield Finding(
            Severity.WARNING, where, "it takes any argument (**kwargs), so typos go unnoticed"
        )
    for name, prop in schema.get("properties", {}).items():
        typed = {"type", "$ref", "const", "enum", "anyOf", "allOf", "oneOf"} & prop.keys()
        if not typed:
            yield Finding(
                Severity.WARNING, where, f"argument {name!r} has no type",
                "annotate the parameter",
            )  # fmt: skip
        if not TOOL_NAME.fullmatch(name):
            yield Finding(Severity.ERROR, where, f"model servers refuse the argument {name!r}")


def _rewards(listing: Mapping[str, Any], tools: set[str]) -> Iterator[Finding]:
    if not listing["reward"]:
        yield Finding(
            Severity.WARNING, "rewards", "there is none, so nothing can be learned here",
            "decorate a function with @register_reward",
        )  # fmt: skip
    for kind in ("reward", "functions"):
        for entry in listing[kind]:
            name, where = entry["name"], f"{kind.rstrip('s')} {entry['name']}"
            if not name.strip() or "\n" in name or "/" in name:
                yield Finding(Severity.ERROR, where, "it cannot be called by this name")
            if name in tools:
                yield Finding(
                    Severity.ERROR, where, "a tool has the same name: agents can call that one"
                )


def _health(health: Mapping[str, Any]) -> Iterator[Finding]:
    if health.get("status") not in HEALTHY:
        text = health.get("message") or health.get("status")
        yield Finding(Severity.ERROR, "health", f"a fresh instance is not healthy: {text}")
