"""Files that a call of a task brings, packed when the call is made."""

from __future__ import annotations

import asyncio
import base64
import io
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.trajectories.schema import Call, Task, ToolCall

MAX_BYTES: Final = 64 << 20
"""Largest archive in an argument: a call holds 128 MiB of JSON."""


def check_files(
    tasks: Iterable[Task], whose: str, below: Sequence[Path] = (), *, hint: str
) -> None:
    """Check that tasks written by others name only files of this machine that they may use.

    The files that a task names are packed and sent into the sandbox, or into an image's build.

    Args:
        tasks: The tasks.
        whose: Where they come from.
        below: Directories whose files they may name.
        hint: The way out.

    Raises:
        ConfigError: One names a file elsewhere, also by a symbolic link.
    """
    roots = [root.resolve() for root in below]
    allowed = ", ".join(map(str, roots)) or "none"
    for task in tasks:
        for path in _files_of(task):
            if not any(path.resolve().is_relative_to(root) for root in roots):
                raise ConfigError(
                    f"{whose}: task {task.id[:100]!r} brings {str(path)[:200]!r} of this machine; "
                    f"directories whose files it may bring: {allowed}",
                    hint=hint,
                )


def _files_of(task: Task) -> Iterator[Path]:
    for call in (task.setup, task.reward, task.submission, *task.reference, *task.wrong):
        if call is not None:
            for paths in call.archives.values():
                yield from map(Path, paths)
    if task.instance is not None and task.instance.build is not None:
        build = task.instance.build
        yield Path(build.context)
        yield Path(build.context, build.dockerfile)


async def packed(call: Call | ToolCall) -> dict[str, Any]:
    """Return the arguments of a call, with those that are archives.

    Raises:
        SandboxStartFailed: A path does not exist on this node, cannot be read, or the archive is
            too large: as with an image that cannot be built, only episodes of this task fail.
    """
    if not call.archives:
        return call.arguments
    found = dict(call.arguments)
    for name, paths in call.archives.items():
        found[name] = await asyncio.to_thread(archive, paths)
    return found


async def check_archives(task: Task) -> None:
    """Check that the calls of a task can be made, so that no agent acts without a reward.

    The archives are not kept: those of all running episodes would fill the memory.

    Raises:
        SandboxStartFailed: As for `packed`.
    """
    for call in (task.setup, task.submission, task.reward):
        if call is not None:
            await packed(call)


def archive(paths: Sequence[str]) -> str:
    """Return base64 of a tar archive of files, and of the content of directories.

    Raises:
        SandboxStartFailed: As for `packed`.
    """
    target = io.BytesIO()
    try:
        with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as tar:
            for path in map(Path, paths):
                members = sorted(path.iterdir()) if path.is_dir() else [path]
                for member in members:
                    tar.add(member, member.name, filter=_anonymous)
    except OSError as exc:
        raise SandboxStartFailed(
            f"a file of the task cannot be read on this node: {exc}",
            hint="put the task's directory at this path on every node that plays episodes",
        ) from exc
    if target.tell() > MAX_BYTES:
        raise SandboxStartFailed(
            f"{', '.join(paths)}: {target.tell()} bytes packed exceed the limit of {MAX_BYTES}",
            hint="leave large files out, and fetch them in the image or in a setup command",
        )
    return base64.b64encode(target.getvalue()).decode()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member that belongs to nobody in particular, so that archives are comparable."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member
