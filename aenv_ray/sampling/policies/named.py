"""Policies by name: a built-in one, or a function or class of the user's module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray.actors.ray_shell.remote_call import is_remote
from aenv_ray.errors import ConfigError
from aenv_ray.sampling.policies.base import AgentPolicy, check_policy
from aenv_ray.sampling.policies.openai import OpenAIPolicy
from aenv_ray.sampling.policies.remote import RemotePolicy
from aenv_ray.sampling.policies.scripted import RandomPolicy, null, reference

FORMS: Final = "reference, null, random:SEED, openai:MODEL, module:function or file.py:function"


def checked_policy(given: Any) -> AgentPolicy | type:
    """Return the policy that `sample` was given: by name, on Ray, or as it is.

    Raises:
        ConfigError: See `named_policy` and `check_policy`.
    """
    if isinstance(given, str):
        given = named_policy(given)
    elif is_remote(given):
        given = RemotePolicy(given)
    check_policy(given)
    policy: AgentPolicy | type = given
    return policy


def named_policy(text: str, options: Mapping[str, Any] | None = None) -> AgentPolicy | type:
    """Return the policy that `text` names, in one of `FORMS`. A class is returned as it is.

    Args:
        text: The name.
        options: For a model: arguments of `OpenAIPolicy`.

    Raises:
        ConfigError: It does not exist, its module cannot be imported, or it takes no such options.
    """
    kind, _, detail = text.partition(":")
    if kind == "openai":
        return OpenAIPolicy(detail, **(options or {}))
    if options:
        raise ConfigError(
            f"the policy {text!r} takes no {', '.join(options)}",
            hint="these options are for --policy openai:MODEL",
        )
    match kind:
        case "reference" | "null" if not detail:
            return reference if kind == "reference" else null
        case "random":
            return RandomPolicy(_seed(detail))
        case _:
            policy: AgentPolicy | type = imported(text, "policy", FORMS)
            return policy


def _seed(text: str) -> int:
    try:
        return int(text or 0)
    except ValueError:
        raise ConfigError(
            f"invalid seed {text!r}", hint="write the policy as random or random:7"
        ) from None


def imported(text: str, what: str, forms: str) -> Any:
    """Return a function or class of the user, written ``module:name`` or ``file.py:name``.

    Args:
        text: The name.
        what: What it is, for errors.
        forms: How it can be written, for errors.

    Raises:
        ConfigError: It does not exist, or its module cannot be imported.
    """
    where, colon, name = text.rpartition(":")
    if not (where and colon and name):
        raise ConfigError(f"invalid {what} {text!r}", hint=f"write it as {forms}")
    try:
        module = _of_file(Path(where)) if where.endswith(".py") else _of_name(where)
    except (Exception, SystemExit) as exc:
        raise ConfigError(
            f"{what} {text!r} cannot be imported: {type(exc).__name__}: {exc}",
            hint="modules are searched from the working directory; aenv --verbose … shows the "
            "traceback",
        ) from exc
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(
            f"{where} has no function or class {name!r}",
            hint=f"define it at the top level of {where}",
        )
    return found


def _of_name(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    return module
