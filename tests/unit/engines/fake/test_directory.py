"""The fake engine's directories: one that no process has locked is removed."""

from __future__ import annotations

from pathlib import Path

from aenv_ray.engines.fake.engine import PREFIX, claim_directory
from aenv_ray.files import FileLock


def test_the_directory_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}killed"
    (left / "work").mkdir(parents=True)
    (left / "work" / "file").write_text("its sandbox wrote it")
    claimed = claim_directory(tmp_path)
    assert not left.exists()
    assert claimed.is_dir()


def test_locked_directories_and_links_stay(tmp_path: Path) -> None:
    first = claim_directory(tmp_path)
    another = tmp_path / f"{PREFIX}another"
    another.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(outside)
    with FileLock.acquire(another / "lock", 1.0):
        second = claim_directory(tmp_path)
        assert first != second
        assert all(path.is_dir() for path in (first, second, another, outside))
    assert claim_directory(tmp_path).is_dir()
    assert not another.exists()  # nothing holds its lock any more
    assert list(outside.iterdir()) == []
