"""Runtime bundles are created once per node, under a lock."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import pytest

from aenv_ray.engines.images import runtime_bundle
from aenv_ray.engines.images.runtime_bundle import ImagePython
from aenv_ray.errors import SandboxStartFailed
from aenv_ray.files import FileLock

PYTHON = ImagePython((3, 99), "tests", "glibc")


async def ensure(directory: Path) -> Path:
    async def compile_in(bundle: Path) -> None:
        raise AssertionError("the bundle was not to be created")

    return await runtime_bundle.ensure(PYTHON, directory, compile_in)


def lock_path(directory: Path) -> Path:
    return directory / f"{PYTHON}-{runtime_bundle.fingerprint()}-.lock"  # of no particular image


async def test_cancelling_the_wait_for_the_lock_leaves_it_free(tmp_path: Path) -> None:
    """Invariant 11."""
    with FileLock.acquire(lock_path(tmp_path), 1.0):
        waiting = asyncio.create_task(ensure(tmp_path))
        await asyncio.wait([waiting], timeout=0.1)
        assert waiting.cancel()
        await asyncio.wait([waiting])
    FileLock.acquire(lock_path(tmp_path), 0.0).close()


async def test_a_lock_that_is_never_released_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9."""
    monkeypatch.setattr(runtime_bundle, "_LOCK_DEADLINE_S", 0.05)
    with (
        FileLock.acquire(lock_path(tmp_path), 1.0),
        pytest.raises(SandboxStartFailed, match="runtime for containers is not ready"),
    ):
        await ensure(tmp_path)


def test_of_what_an_image_compiled_only_modules_of_its_kit_are_taken(tmp_path: Path) -> None:
    """Invariant 13: the archive may hold anything."""
    bundle = tmp_path / "kit"
    (bundle / "lib" / "package").mkdir(parents=True)
    (bundle / "lib" / "package" / "module.py").write_text("x = 1\n")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:

        def add(name: str, kind: bytes = tarfile.REGTYPE) -> None:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, "/etc/passwd", 4 * (kind == b"0")
            archive.addfile(member, io.BytesIO(b"code") if kind == b"0" else None)

        for name in (
            "out/bundle/lib/package/module.cpython-312.pyc",
            "out/bundle/lib/package/other.cpython-312.pyc",
            "out/bundle/lib/package/module.py", "out/../../escaped.cpython-312.pyc",
            "out/bundle/lib/package/../module.cpython-312.pyc", "/bundle/lib/package/module.pyc",
            "out/bundle/lib/package/module.cpython-312.pyc/x",
        ):  # fmt: skip
            add(name)
        add("out/bundle/lib/package/module.cpython-313.pyc", tarfile.SYMTYPE)
        add("out/bundle/lib/package/module.cpython-314.pyc", tarfile.LNKTYPE)
    runtime_bundle.add_compiled(bundle, buffer.getvalue())
    compiled = bundle / "lib" / "package" / "__pycache__" / "module.cpython-312.pyc"
    found = {path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()}
    assert found == {compiled, bundle / "lib" / "package" / "module.py"}
    assert compiled.read_bytes() == b"code"
