"""The task set: how each task is set up and how its outcome is checked, by id."""

from tasks import archives, files, logs, processes, repairs, scripts, tables, text
from tasks.base import Failed, Task, as_outcome

TASKS: dict[str, Task] = {
    name: task
    for module in (text, tables, files, archives, logs, scripts, repairs, processes)
    for name, task in module.TASKS.items()
}

__all__ = ["TASKS", "Failed", "Task", "as_outcome"]
