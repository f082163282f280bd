"""Agents as environments: `agent_env` writes a project whose tool `chat` is an agent.

    environment = agent_env(helper, name="helper")
    env = aenv_ray.create(environment)
    ray.get(env.call_tool.remote("chat", {"message": "Hello"}))

The project contains the source file of the agent, so that it can be read, published and run like
any other. In the sandbox `aenv_ray.runtime.serve_agent` does the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from aenv_ray import ids
from aenv_ray.errors import ConfigError
from aenv_ray.integrations.support.projects import write_project
from aenv_ray.runtime import ChatEndpoint
from aenv_ray.runtime.door.agent import starter

_MODULE: Final = "serve_the_agent"
_WAY_OUT: Final = (
    "define it as a variable or function at the top level of a file; or write a project that calls "
    "aenv_ray.runtime.serve_agent(agent)"
)


def agent_env(
    agent: Any,
    *,
    name: str,
    version: str = "1.0.0",
    reward: Callable[[list[dict[str, Any]]], Any] | None = None,
    requirements: Sequence[str] = (),
    network: Literal["none", "host"] = "host",
    environment_variables: Mapping[str, str] | None = None,
    directory: str | Path | None = None,
) -> Path:
    """Write an environment whose tool `chat` is an agent, and return its directory.

    Each instance has an agent with a history for each conversation; `env.reset` forgets them. The
    pieces of an answer are progress reports, which ``stream_tool`` yields.

    Args:
        agent: A variable or function at the top level of a Python file: a callable that takes the
            messages of a conversation and returns the answer (sync, async, or an async generator
            of its pieces), an `Agent` of the OpenAI Agents SDK, a runnable of LangChain or
            LangGraph, or a `ChatAgent` of CAMEL. Or an `aenv_ray.runtime.ChatEndpoint`. The file is
            imported in the sandbox, so programs in it belong below ``if __name__ == "__main__"``.
        name: Name of the environment.
        version: Version of the environment.
        reward: A function of the same kind of file, which takes the messages of a conversation.
            None: the environment has no reward.
        requirements: Packages that the file needs, as in ``requirements.txt``. Empty: only the
            packages of the node's Python are available.
        network: As ``deployConfig.network``; ``none`` suits agents that call no model.
        environment_variables: Variables of all instances. Give keys to `create` instead, which
            keeps them out of the project.
        directory: Directory to write to; files of the same names are replaced. None: one in the
            data directory, named by the content.

    Raises:
        ConfigError: It is not an agent, or is not at the top level of a file.
    """
    ids.split_reference(f"{name}@{version}")
    try:
        starter(agent)
    except TypeError as exc:
        raise ConfigError(
            str(exc), hint="pass a ChatEndpoint, or a function or class at the top level of a file"
        ) from None
    files: dict[str, str] = {}
    if isinstance(agent, ChatEndpoint):
        lines = ["from aenv_ray.runtime import ChatEndpoint, serve_agent", "", f"agent = {agent!r}"]
    else:
        lines = ["from aenv_ray.runtime import serve_agent", "", _import(agent, "agent", files)]
    if reward is not None:
        lines.append(_import(reward, "reward", files))
    given = "agent" if reward is None else "agent, reward"
    files[f"src/{_MODULE}.py"] = "\n".join([*lines, "", f"serve_agent({given})", ""])
    deploy = {"network": network, "environmentVariables": dict(environment_variables or {})}
    config = {"name": name, "version": version, "deployConfig": deploy}
    return write_project(config, files, requirements, directory)


def _import(value: Any, what: str, files: dict[str, str]) -> str:
    """Return the line that imports a value as `what`; add its file unless it is in a package.

    Raises:
        ConfigError: It is not at the top level of a file, or the file's name is not a Python
            identifier.
    """
    for home, attribute in _homes(value):
        module = home
        source = getattr(sys.modules[home], "__file__", None)
        if source is None or not source.endswith(".py"):
            continue
        path = Path(source)
        if module == "__main__" or "." not in module:
            files[f"src/{path.stem}.py"] = path.read_text(encoding="utf-8")
            module = path.stem
        if not module.rpartition(".")[2].isidentifier():
            raise ConfigError(
                f"the file {path.name} of the {what} cannot be imported: its name is not a Python "
                "identifier",
                hint="rename it, for example to my_agent.py",
            )
        return f"from {module} import {attribute} as {what}"
    raise ConfigError(f"the {what} {value!r:.200} is not at the top level of a file", hint=_WAY_OUT)


def _homes(value: Any) -> list[tuple[str, str]]:
    """Return the modules that have a value as a variable, with its name; its own one first."""
    own = getattr(value, "__module__", None)
    found = [
        (module, attribute)
        for module, loaded in list(sys.modules.items())
        for attribute, other in list(getattr(loaded, "__dict__", {}).items())
        if other is value and attribute.isidentifier()
    ]
    return sorted(found, key=lambda home: home[0] != own)
