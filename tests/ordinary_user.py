"""Runs tests as a user without privileges, from a suite that root runs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

USER_ID = 61_234
RUN_S = 560
"""How long a run may take; the limit of a test that runs one is `pytest.mark.timeout(600)`."""
_BECOME = """
set -e
if [ -n "$BLOCKED" ]; then
    mount --bind "$PREFIX" "$PLACE"
    mount -t tmpfs -o mode=755 tmpfs "$BLOCKED"
    mkdir -p "$PREFIX"
    mount --bind "$PLACE" "$PREFIX"
fi
exec setpriv --reuid "$USER_ID" --regid "$USER_ID" $IN_GROUPS -- "$@"
"""
"""Makes the interpreter readable in a private mount namespace if its directory is closed to others
(as a home directory is), and then becomes the ordinary user."""


def pytest_as_ordinary_user(*arguments: str, group: int | None = None) -> str:
    """Run pytest as a user without privileges, and return what it prints.

    Args:
        arguments: Paths below the repository, and options.
        group: The only further group of the user; None: no group.

    Raises:
        AssertionError: A test failed, or none ran.
    """
    home = Path(f"/tmp/ae-user-{os.getpid()}")
    (home / "shown").mkdir(parents=True)
    home.chmod(0o700)
    os.chown(home, USER_ID, USER_ID)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home),
        "PYTHONDONTWRITEBYTECODE": "1", "AENV_REQUIRE": os.environ.get("AENV_REQUIRE", ""),
        "IN_GROUPS": "--clear-groups" if group is None else f"--groups={group}",
        "USER_ID": str(USER_ID), "PREFIX": sys.base_prefix, "PLACE": str(home / "shown"),
        "BLOCKED": str(_closed_directory(Path(sys.base_prefix)) or ""),
    }  # fmt: skip
    pytest = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "--basetemp", str(home / "t"), *arguments,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", _BECOME, "sh", *pytest],
            cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True,
            check=False, timeout=RUN_S,
        )  # fmt: skip
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    return done.stdout


def _closed_directory(path: Path) -> Path | None:
    """Return the first parent of `path` that other users cannot enter."""
    for directory in reversed(path.parents):
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None
