"""The process engine needs no root: its contract, run as somebody who is nobody here."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.namespaces

SOMEBODY = 61_234
TESTS = (
    "test_a_started_sandbox or test_one_that_fails or ends_whatever or sandboxs_own or outlives "
    "or the_deadline_ends or full_directory or a_timeout_kills or variables or stop_during "
    "or fork_bomb or every_privilege or read_only or children or grandchild"
)


SHOW = """
set -e
if [ -n "$BLOCKED" ]; then
    mount --bind "$PREFIX" "$PLACE"
    mount -t tmpfs -o mode=755 tmpfs "$BLOCKED"
    mkdir -p "$PREFIX"
    mount --bind "$PLACE" "$PREFIX"
fi
exec setpriv --reuid "$SOMEBODY" --regid "$SOMEBODY" --clear-groups -- "$@"
"""
"""Shows the interpreter to everybody, in a mount namespace of our own, where it is in a private
home directory; then becomes somebody else."""


def _blocked(path: Path) -> Path | None:
    """Return the directory that keeps other users away from `path`."""
    for directory in reversed(path.parents):
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="this user is ordinary: every test here shows it")
def test_the_contract_holds_for_an_ordinary_user() -> None:
    """Design D3: no root."""
    home = Path(f"/tmp/ae-user-{os.getpid()}")
    (home / "shown").mkdir(parents=True)
    home.chmod(0o700)
    os.chown(home, SOMEBODY, SOMEBODY)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home),
        "PYTHONDONTWRITEBYTECODE": "1", "AENV_REQUIRE": os.environ.get("AENV_REQUIRE", ""),
        "SOMEBODY": str(SOMEBODY), "PREFIX": sys.base_prefix, "PLACE": str(home / "shown"),
        "BLOCKED": str(_blocked(Path(sys.base_prefix)) or ""),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "--basetemp", str(home / "t"),
        "-k", f"({TESTS}) and not Fake and not Without and not Docker",
        "tests/contract/test_engines.py", "tests/contract/process/test_isolation.py",
        "tests/contract/process/test_storage.py",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", SHOW, "sh", *command],
            cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True,
            check=False, timeout=110,
        )  # fmt: skip
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
