"""Tasks of SWE-bench's form: repair a repository so that hidden tests pass.

The agent acts in the sidecar, which runs in the image of the task. Its patch is graded in the
sidecar of another instance, which gets the tests only then.
"""

from __future__ import annotations

import os
import posixpath
import shlex
from typing import Any, Final

from grading import GradingError, grade, introduce, packages, run_git
from repository import LISTED, numbered, replaced, run, shown

from aenv_ray.runtime import register_function, register_reward, register_tool, sidecar

PACKAGES: Final = os.environ.get("SWEBENCH_PACKAGES", "/opt/swebench")
"""Where the image has the official package, in a directory for each release."""
MAX_COMMAND_S: Final = 3600
SNAPSHOT: Final = (
    'index=$(mktemp) && cp "$(git rev-parse --git-path index)" "$index" && '
    'export GIT_INDEX_FILE=$index && git add -A >/dev/null && git write-tree && rm "$index"'
)
"""Writes the tree of all files that are not ignored, and leaves the repository's index as it is."""
PATCH_LIMIT: Final = 5_000_000
"""Longest patch that is graded, in characters."""

state: dict[str, Any] = {"directory": "/testbed", "start": "HEAD", "submitted": False}
"""`start` is the tree of all files when the agent starts, of which some may be in no commit."""


@register_tool(timeout=MAX_COMMAND_S)
def shell(command: str, timeout: float = 120.0) -> dict[str, Any]:
    """Run a command with bash in the repository.

    Each command starts in the root of the repository; directory and variables do not persist.

    Args:
        command: What to run.
        timeout: Seconds after which it is killed.
    """
    try:
        exit_code, output = run(command, state["directory"], timeout)
    except TimeoutError:
        return {"output": f"killed after {timeout:g} s", "exit_code": 124}
    return {"output": shown(output), "exit_code": exit_code}


@register_tool(timeout=60)
def view(path: str, start: int = 1, end: int | None = None) -> str:
    """Show a file with line numbers, or the entries of a directory.

    Args:
        path: Absolute, or relative to the repository.
        start: First line, from 1.
        end: Last line; default: the end of the file.
    """
    place = _place(path)
    listing = sidecar.exec(["ls", "-1Ap", "--", f"{place}/"])
    if listing.exit_code == 0:
        names = listing.text().splitlines()
        more = f"\n… and {len(names) - LISTED} more" if len(names) > LISTED else ""
        return "\n".join(names[:LISTED]) + more
    return shown(numbered(sidecar.read_file(place).decode(errors="replace"), start, end))


@register_tool(timeout=60)
def edit(path: str, old: str, new: str) -> str:
    """Replace text in a file, or create a file.

    Args:
        path: Absolute, or relative to the repository.
        old: Text that occurs once in the file. Empty: create the file.
        new: What replaces it.
    """
    place = _place(path)
    if not old and sidecar.exec(["test", "-e", place]).exit_code:
        sidecar.write_file(place, new)
        return f"created {path}"
    text = sidecar.read_file(place).decode()
    sidecar.write_file(place, replaced(text, old, new, path))
    return f"edited {path}"


@register_tool(timeout=60)
def submit() -> str:
    """Say that the repository is repaired. What it is at the end of the episode is graded."""
    state["submitted"] = True
    return "submitted"


@register_function(timeout=900)
def start_task(
    specs: dict[str, str],
    directory: str = "/testbed",
    bug_patch: str = "",
    remove: list[str] | None = None,
) -> str:
    """Prepare the repository for an agent, and return the tree of its files.

    Args:
        specs: Repository, version and log parser, which the official package must know.
        directory: The repository in the sidecar.
        bug_patch: Applied first, for tasks whose image has the correct repository.
        remove: Paths of hidden tests in the image, which are removed.

    Raises:
        GradingError: The task could not be graded, or its image has no repository.
    """
    packages(PACKAGES)({"do": "check", "specs": specs})
    state.update(directory=directory, submitted=False)
    if remove:
        command = f"rm -rf -- {shlex.join(remove)}"
        run_git(command, directory, sidecar, "the hidden tests cannot be removed")
    if bug_patch:
        introduce(bug_patch, directory, sidecar)
    what = f"{directory} of the task's image is not a git repository, or the image lacks git"
    run_git("git rev-parse HEAD", directory, sidecar, what)
    tree = run_git(SNAPSHOT, directory, sidecar, "git cannot read the files of the repository")
    state["start"] = tree.strip().splitlines()[-1]
    return str(state["start"])


@register_function(timeout=900)
def submission() -> dict[str, Any]:
    """Return the patch of everything that the agent has changed, new files included."""
    try:
        output = run_git(
            f"git add -A >/dev/null && git diff --cached --binary {state['start']}",
            state["directory"], sidecar, "git cannot make a patch",
        )  # fmt: skip
    except (GradingError, TimeoutError, OSError) as exc:
        return {"patch": "", "problem": str(exc), "submitted": state["submitted"]}
    if len(output) > PATCH_LIMIT:
        problem = f"the patch has {len(output)} characters; at most {PATCH_LIMIT} are graded"
        return {"patch": "", "problem": problem, "submitted": state["submitted"]}
    return {"patch": output, "problem": "", "submitted": state["submitted"]}


@register_reward
def resolved(
    instance: dict[str, Any], submission: dict[str, Any], timeout_s: float = 1800.0
) -> dict[str, Any]:
    """Grade a patch in this instance's sidecar, which no agent may have used.

    Args:
        instance: A row of a data set, as the loader hands it over.
        submission: ``{"patch": …}``.
        timeout_s: Longest run of the tests in seconds.

    Raises:
        GradingError: It cannot be graded, whatever the patch.
    """
    patch = str(submission.get("patch") or "")
    verdict = grade(instance, patch, sidecar, packages(PACKAGES), timeout_s=timeout_s)
    result = verdict.result()
    if submission.get("problem"):
        result["reason"] = f"{submission['problem']}; {result['reason']}"
    return result


def _place(path: str) -> str:
    return posixpath.join(state["directory"], path)
