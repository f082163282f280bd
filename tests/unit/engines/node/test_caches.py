"""What nothing uses is deleted from the caches of a node, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

from aenv_ray.engines.node import caches
from aenv_ray.files import FileLock

DAY_S = 86_400.0
PLENTY = 1 << 40


def fill(cache: Path, *, age_s: float, kib: int = 64, name: str = "") -> Path:
    entry = cache / (name or f"entry-{age_s:g}")
    entry.mkdir(parents=True)
    (entry / "file").write_bytes(os.urandom(kib << 10))
    caches.note_use(entry)
    used_at = time.time() - age_s
    os.utime(entry.with_name(f"{entry.name}.used"), (used_at, used_at))
    return entry


def left(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def test_what_was_not_used_for_too_long_is_deleted(tmp_path: Path) -> None:
    old, new = fill(tmp_path, age_s=3 * DAY_S), fill(tmp_path, age_s=DAY_S)
    old.with_name(f"{old.name}.done").touch()
    assert caches.exceeds(tmp_path, PLENTY, 2 * DAY_S)
    assert caches.collect(tmp_path, PLENTY, 2 * DAY_S) == [old.name]
    assert left(tmp_path) == {new.name, f"{new.name}.used"}
    assert not caches.exceeds(tmp_path, PLENTY, 2 * DAY_S)


def test_a_full_cache_loses_what_was_unused_for_longest(tmp_path: Path) -> None:
    entries = [fill(tmp_path, age_s=age * 3600.0) for age in (4, 3, 2, 1)]
    caches.note_use(entries[0])  # again
    assert caches.collect(tmp_path, 140 << 10, DAY_S) == [entries[1].name, entries[2].name]
    assert {path.name for path in entries if path.exists()} == {entries[0].name, entries[3].name}


def test_what_is_in_use_is_kept(tmp_path: Path) -> None:
    """By a process that holds it, by a build, by an instance, or by a start that just began."""
    held, built, named = (fill(tmp_path, age_s=DAY_S * n) for n in (5, 4, 3))
    recent = fill(tmp_path, age_s=10.0)
    lock = caches.hold(held)
    assert lock is not None
    with lock, FileLock.acquire(built.with_name(f"{built.name}.lock"), 1.0):
        assert caches.collect(tmp_path, 0, DAY_S, lambda: {named.name}) == []
    assert all(entry.is_dir() for entry in (held, built, named, recent))
    assert caches.collect(tmp_path, 0, DAY_S) == [held.name, built.name, named.name]
    assert recent.is_dir()


def test_entries_from_before_and_rests_of_a_deletion_are_found(tmp_path: Path) -> None:
    """An entry without a mark was used when it was made; a killed collector leaves a rest."""
    entry, rest = tmp_path / "old", tmp_path / ".deleted-x"
    for path in (entry, rest):
        path.mkdir()
        (path / "file").write_text("content")
    os.utime(entry, (time.time() - 9 * DAY_S,) * 2)
    assert caches.hold(entry) is None  # not a cache's, as far as that can be known
    assert caches.collect(tmp_path, PLENTY, DAY_S) == ["old"]
    assert left(tmp_path) == set()


def test_an_entry_that_another_process_deletes_first_is_no_error(tmp_path: Path) -> None:
    fill(tmp_path, age_s=2 * DAY_S)

    def another_process() -> tuple[str, ...]:
        caches.collect(tmp_path, 0, DAY_S)
        return ()

    caches.collect(tmp_path, 0, DAY_S, another_process)
    assert left(tmp_path) == set()
