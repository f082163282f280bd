"""Which tests one process runs: a job.

Starting a Ray takes four seconds of a core, so three of them serve all tests that can share one.
Other jobs are short, so that the last ones end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parent
GROUPS: Final = {
    "serve": ("ray/services", "ray/gateway"),
    "ray": (
        "ray/instances",
        "ray/hub",
        "ray/nodes/test_demand.py",
        "ray/nodes/test_remote_tasks.py",
        "attacks/test_inner_instances.py",
        "attacks/test_outcomes.py",
        "attacks/test_tasks.py",
        "e2e/test_quickstart.py",
        "e2e/test_examples.py",
    ),
    "sampling": ("ray/envs", "ray/sampling"),
}
"""Directories and modules by group; a group shares a Ray, and "serve" runs Serve on it."""
ALONE: Final = ("meta/test_linters.py", "ray/nodes/test_multi_machines.py")
"""Long modules, a job each."""
LONG_FIRST: Final = (
    *ALONE,
    "e2e",
    "contract/kubernetes",
    "contract",
    "ray",
    "attacks",
    "meta",
)
"""After the groups, in this order; everything else comes last."""
_MODULES = 3
"""Of a job, unless its tests share a Ray or are unit tests."""
_UNIT_JOBS = 4
"""Unit tests start nothing and take less time than the imports of many jobs would."""


@dataclass(frozen=True)
class Job:
    """What one process runs: paths or ids of tests, as arguments of pytest."""

    name: str
    arguments: tuple[str, ...]


def jobs_below(directories: Sequence[Path], without: Sequence[Path] = ()) -> list[Job]:
    """Return the jobs for all tests in these directories, long ones first."""
    places: dict[tuple[int, str], list[Path]] = {}
    for module in sorted({m for d in directories for m in d.rglob("test_*.py")} - set(without)):
        relative = module.relative_to(TESTS)
        if relative.parts[0] in ("fixtures", "heavy"):
            continue  # projects whose tests are not ours, and what needs torch
        places.setdefault(_place(module, relative), []).append(module)
    jobs = []
    for (_, name), modules in sorted(places.items()):
        jobs_of_it = {"unit": _UNIT_JOBS}.get(name, 1 if name in GROUPS else None)
        size = -(-len(modules) // jobs_of_it) if jobs_of_it else _MODULES
        for start in range(0, len(modules), size):
            part = modules[start : start + size]
            number = f" {start // size + 1}" if len(modules) > size else ""
            jobs.append(Job(f"{name}{number}", tuple(map(str, part))))
    return jobs


def _place(module: Path, relative: Path) -> tuple[int, str]:
    """Return rank and name of the job or jobs of a module."""
    if (group := group_of(module)) is not None:
        return -1, group
    path = relative.as_posix()
    rank = next((n for n, p in enumerate(LONG_FIRST) if path.startswith(p)), len(LONG_FIRST))
    if path in ALONE:
        return rank, path
    return rank, "unit" if relative.parts[0] == "unit" else "/".join(relative.parts[:-1][:2])


def group_of(path: Path) -> str | None:
    """Return the group of a module; None if it shares no Ray."""
    for group, places in GROUPS.items():
        if any(TESTS / place in (path, *path.parents) for place in places):
            return group
    return None
