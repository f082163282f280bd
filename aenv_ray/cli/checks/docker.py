"""The check of the Docker daemon's OCI runtimes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import Any, Final

from aenv_ray.engines.docker.link import has_own_kernel
from aenv_ray.findings import Finding, Verdict

NAME: Final = "docker runtimes"
_KNOWN: Final = ("crun", "runsc", "kata-runtime")
"""Programs to mention if they are installed and not registered."""


def check(
    info: Mapping[str, Any],
    wanted: str | None,
    find: Callable[[str], str | None] = shutil.which,
) -> Finding:
    """Check that the wanted runtime is registered, and that the programs of all runtimes exist."""
    described: dict[str, dict[str, Any]] = {
        name: dict(one or {})
        for name, one in sorted(dict(info.get("Runtimes") or {}).items())
        if not name.startswith("io.containerd.")
    }
    default = str(info.get("DefaultRuntime") or "runc")
    absent = [name for name, one in described.items() if one.get("path") and not find(one["path"])]
    words = []
    for name, one in described.items():
        notes = ["default"] if name == default else []
        notes += ["its own kernel"] if has_own_kernel(one) else []
        notes += [f"{one['path']} is not installed"] if name in absent else []
        words.append(f"{name} ({', '.join(notes)})" if notes else name)
    found = ", ".join(words) or "none reported"
    if wanted and wanted not in described:
        found = f"AENV_DOCKER_RUNTIME is {wanted}, which the daemon does not have; it has {found}"
        return Finding(NAME, Verdict.FAILED, found, _registering(wanted, find(wanted)))
    if absent:
        mend = f"install {', '.join(absent)}, or remove it from the daemon's runtimes"
        return Finding(NAME, Verdict.WARNING, found, mend)
    programs = {str(one.get("path", "")).rpartition("/")[2] for one in described.values()}
    unused = [
        f"{program} is installed and not registered"
        for program in _KNOWN
        if find(program) and program not in programs and program not in described
    ]
    return Finding(NAME, Verdict.OK, "; ".join([found, *unused]))


def _registering(name: str, path: str | None) -> str:
    return f"dockerd --add-runtime {name}={path or '/path/to/it'}, or unset AENV_DOCKER_RUNTIME"
