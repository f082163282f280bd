"""Where the fake engine's sandboxes work: whose process is gone, its directory goes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from aenv_ray.engines.fake import directory as fake_directory


def test_what_a_killed_process_left_goes_with_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / f"{fake_directory.PREFIX}killed"
    (left / "work").mkdir(parents=True)
    (left / "work" / "file").write_text("its sandbox wrote it")
    claimed = fake_directory.claim(tmp_path)
    assert not left.exists()
    assert claimed.is_dir()


def test_what_is_held_or_not_ours_stays(tmp_path: Path) -> None:
    first = fake_directory.claim(tmp_path)
    another = tmp_path / f"{fake_directory.PREFIX}another"
    another.mkdir()
    descriptor = os.open(another, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / f"{fake_directory.PREFIX}link").symlink_to(outside)
    second = fake_directory.claim(tmp_path)
    os.close(descriptor)
    assert first != second
    assert all(path.is_dir() for path in (first, second, another, outside))
    assert fake_directory.claim(tmp_path).is_dir()
    assert not another.exists()  # nobody holds it any more
