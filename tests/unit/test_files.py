"""Atomic writes and file locks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aenv_ray.files import FileLock, is_locked, write_atomically


def test_a_write_replaces_the_file_and_sets_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")
    write_atomically(path, "new", mode=0o640, durable=True)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_what_the_umask_leaves_and_a_replaced_one_its_mode(
    umask: int, mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    before = os.umask(umask)
    try:
        write_atomically(path, "new", mode=None)
        assert path.stat().st_mode & 0o777 == mode
        path.chmod(0o640)
        write_atomically(path, "newer", mode=None)
    finally:
        os.umask(before)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("newer", 0o640)


def test_a_failed_write_leaves_the_old_content_and_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(path, "new")
    assert list(tmp_path.iterdir()) == [path]


def test_an_exclusive_lock_excludes_others_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock.acquire(path, 1.0):
        assert is_locked(path)
        assert FileLock.try_acquire(path) is None
        assert FileLock.try_acquire(path, shared=True) is None
    assert not is_locked(path)


def test_shared_locks_are_compatible(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock.acquire(path, 1.0, shared=True), FileLock.acquire(path, 1.0, shared=True):
        assert FileLock.try_acquire(path) is None


def test_the_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    program = (
        "import sys; from pathlib import Path; from aenv_ray.files import FileLock; "
        "lock = FileLock.acquire(Path(sys.argv[1]), 1.0); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(path)
        holder.kill()
    with FileLock.acquire(path, 10.0):
        pass


def test_a_lock_on_a_removed_file_is_not_believed(tmp_path: Path) -> None:
    """Two processes would each hold "the" lock, one of them on a file that nobody finds."""
    path = tmp_path / "lock"
    first = FileLock.acquire(path, 1.0)
    path.unlink()
    with FileLock.acquire(path, 1.0):
        assert FileLock.try_acquire(path) is None
    first.close()


def test_a_wait_that_is_too_long_names_the_file(tmp_path: Path) -> None:
    """Invariant 9."""
    path = tmp_path / "lock"
    with FileLock.acquire(path, 1.0), pytest.raises(TimeoutError, match=str(path)):
        FileLock.acquire(path, 0.05)


async def test_a_cancelled_wait_leaves_nothing_locked(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock.acquire(path, 1.0):
        waiting = asyncio.create_task(FileLock.acquire_async(path, 60.0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert not is_locked(path)
