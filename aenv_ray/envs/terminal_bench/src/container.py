"""The task's container: programs that run in it with a Python that the agent cannot change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from aenv_ray.runtime import sidecar

_DIRECTORY: Final = Path(__file__).resolve().parent.parent / "programs"
# Read at import: later the project's files are hidden.
_SOURCES: Final = {
    name: (_DIRECTORY / f"{name}.py").read_text(encoding="utf-8")
    for name in (
        "screen",
        "terminal",
        "fingerprints",
        "package_managers",
        "hidden",
        "grader",
        "python_start",
        "report_plugin",
    )
}
GRADER: Final = ("fingerprints", "package_managers", "hidden", "grader")
"""The grader and what it imports."""
PLUGIN: Final = _SOURCES["report_plugin"]
START: Final = _SOURCES["python_start"]
_LOADER: Final = """
import sys, types
for name, source in zip(sys.argv[1::2], sys.argv[2::2]):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name + ".py", "exec"), module.__dict__)
sys.modules[sys.argv[-2]].main()
"""


class ProgramFailed(RuntimeError):
    """A program in the task's container ended without an answer."""


def run(
    *modules: str,
    request: dict[str, Any],
    timeout_s: float,
    directory: str | None = None,
    as_image: bool = False,
) -> dict[str, Any]:
    """Run the last of some modules in the task's container and return its answer.

    Args:
        modules: Their names.
        request: What the module gets.
        timeout_s: Seconds after which it is killed.
        directory: Working directory. None: that of the image.
        as_image: Run it with all variables of the image, also those that name libraries.

    Raises:
        TimeoutError: It did not end in time.
        ProgramFailed: It was ended, or failed.
    """
    arguments = [part for name in modules for part in (name, _SOURCES[name])]
    shell = ["/bin/sh", "-c", 'exec "$@"', "sh"] if as_image else []
    done = sidecar.exec(
        [*shell, *sidecar.PYTHON, "-c", _LOADER, *arguments],
        cwd=directory,
        stdin=json.dumps(request).encode(),
        timeout_s=timeout_s,
    )
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        end = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = end[0] if end else f"exit code {done.exit_code}"
        raise ProgramFailed(f"{modules[-1]} in the task's container: {why}") from None
