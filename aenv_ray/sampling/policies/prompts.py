"""Prompts from templates over the fields of a task."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from aenv_ray.errors import ConfigError
from aenv_ray.trajectories.schema import Task

SYSTEM: Final = "Solve the task with the tools. When you have finished, answer without a tool call."
PROMPT: Final = "{instruction}"
_FIELD: Final = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*(?:\.\w+)*)\}")


def rendered(template: str, task: Task) -> str:
    """Return a template with the task's fields in place of ``{name}`` and ``{name.key}``.

    Strings are inserted as they are, other values as JSON. ``{{`` and ``}}`` are literal braces;
    braces around anything but a name, such as JSON, are left as they are.

    Raises:
        ConfigError: The task has no such field.
    """
    fields = task.model_dump(mode="json")

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        found: Any = fields
        for key in name.split("."):
            if not isinstance(found, dict) or key not in found:
                raise ConfigError(
                    f"task {task.id!r} has no field {name!r}, which the prompt template names",
                    hint=f"fields: {', '.join(fields)}; write literal braces as {{{{ and }}}}",
                )
            found = found[key]
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    return _FIELD.sub(value, template)


def opening(system: str, prompt: str, task: Task) -> list[dict[str, Any]]:
    """Return the first messages of an episode; an empty system template gives no system message."""
    messages = [{"role": "user", "content": rendered(prompt, task)}]
    if system:
        messages.insert(0, {"role": "system", "content": rendered(system, task)})
    return messages
