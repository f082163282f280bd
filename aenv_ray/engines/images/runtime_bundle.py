"""The runtime for containers: `aenv_ray.runtime` and its libraries, for an image's Python.

A *bundle* is a directory on the node, mounted read-only into the containers of matching images:
``runtime`` holds ``aenv_ray.runtime`` and nothing else of ours, ``lib`` holds pydantic. There is
one for each version of the runtime and each kind of Python, named by both. Another bundle, for
images without a suitable Python, holds the node's own in ``python``.

``python -m aenv_ray.engines.images.runtime_bundle DIRECTORY`` leaves the latter's Python in a
volume, as ``DIRECTORY/python``: an init container of this package's image does so for other images.
"""

from __future__ import annotations

import asyncio
import compileall
import hashlib
import importlib.metadata
import io
import platform
import py_compile
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.images import node_python
from aenv_ray.engines.node import caches
from aenv_ray.engines.node.installer import failure_of, uv_options
from aenv_ray.errors import SandboxStartFailed
from aenv_ray.files import FileLock

LIBRARIES: Final = (
    "pydantic", "pydantic_core", "typing_extensions", "annotated_types", "typing_inspection",
)  # fmt: skip
"""pydantic and its dependencies."""
OLDEST: Final = (3, 11)
"""The oldest Python that the runtime runs on."""
_INSTALL_DEADLINE_S: Final = 600.0
_LOCK_DEADLINE_S: Final = _INSTALL_DEADLINE_S + 120.0
_COMPILED: Final = re.compile(r"(.*/[^/]+\.)cpython-\d+\.pyc")
_MACHINE: Final = re.compile(r"[A-Za-z0-9_]{1,32}", re.ASCII)
_MAX_VERSION: Final = 99
_PLATFORMS: Final = {"glibc": "unknown-linux-gnu", "musl": "unknown-linux-musl"}


@dataclass(frozen=True)
class ImagePython:
    """The Python of an image."""

    version: tuple[int, int]
    machine: str
    """``x86_64``, ``aarch64`` …"""
    libc: str
    """``glibc`` or ``musl``."""

    @classmethod
    def reported(cls, facts: Mapping[str, Any]) -> ImagePython:
        """Return the Python that a program of an image describes, which may be any program.

        Args:
            facts: ``version`` (major and minor), ``machine``, ``libc``.

        Raises:
            ValueError: It describes none. These facts become a path, and arguments of a program.
        """
        match facts:
            case {"version": [int(major), int(minor)], "machine": str(machine), "libc": str(libc)}:
                numbers = range(_MAX_VERSION + 1)
                is_known = libc in _PLATFORMS and _MACHINE.fullmatch(machine)
                if major in numbers and minor in numbers and is_known:
                    return cls((int(major), int(minor)), machine, libc)
        raise ValueError(f"not a description of a Python: {str(dict(facts))[:200]}")

    @property
    def is_ours(self) -> bool:
        """Whether libraries installed for this process's Python run on it."""
        return (
            self.version == sys.version_info[:2]
            and self.machine == platform.machine()
            and self.libc == _own_libc()
        )

    def __str__(self) -> str:
        return f"{self.version[0]}.{self.version[1]}-{self.machine}-{self.libc}"


async def ensure(
    python: ImagePython,
    cache_dir: Path,
    compile_in: Callable[[Path], Awaitable[None]] | None = None,
    image_id: str = "",
) -> Path:
    """Return the bundle for a Python; creates it if it does not exist.

    Containers cannot write to a bundle, so they would compile its modules at every start. A Python
    of this process's version compiles for them. Any other bundle is compiled by the image itself,
    which is not to be trusted, so that it serves this image alone.

    Args:
        python: The interpreter of the image.
        cache_dir: Directory of all bundles.
        compile_in: Has the image compile a finished bundle (`add_compiled`). None: nothing does.
        image_id: The id of the image that compiles.

    Raises:
        SandboxStartFailed: The libraries cannot be installed for this Python.
    """
    own = "" if python.is_ours or compile_in is None else f"-{image_id.removeprefix('sha256:')}"
    target = cache_dir / f"{python}-{fingerprint()}{own}"
    if await asyncio.to_thread(_has, target):
        return target

    async def fill(bundle: Path) -> None:
        await _fill(python, bundle)
        if python.is_ours:
            await asyncio.to_thread(_compile, bundle)
        elif compile_in is not None:
            await compile_in(bundle)

    return await _create_once(target, fill)


async def carried(cache_dir: Path) -> Path:
    """Return the bundle with the node's own Python; creates it if it does not exist.

    Raises:
        SandboxStartFailed: This node's Python cannot be used in an image.
    """
    target = cache_dir / f"{node_python.name()}-{fingerprint()}"
    if await asyncio.to_thread(_has, target):
        return target

    async def fill(bundle: Path) -> None:
        await asyncio.to_thread(_fill_carried, bundle)

    return await _create_once(target, fill)


def _has(bundle: Path) -> bool:
    """Return whether a bundle exists, and note that it is used."""
    if not bundle.is_dir():
        return False
    caches.note_use(bundle)
    return True


def _compile(bundle: Path) -> None:
    # By content, since the archives of pods do not keep the times of files.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(str(bundle), quiet=2, workers=1, invalidation_mode=mode)


def add_compiled(bundle: Path, archive: bytes) -> None:
    """Add the modules that an image compiled to its bundle; blocks.

    Args:
        bundle: Unfinished.
        archive: A tar file of what the image wrote, which may hold anything: only regular files
            with the name of a compiled module of the bundle are taken from it.
    """
    wanted = {
        f"bundle/{path.parent.relative_to(bundle)}/{path.stem}.": path.parent
        for path in bundle.rglob("*.py")
    }
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members:
            inside = member.name.partition("/")[2]
            match = _COMPILED.fullmatch(inside)
            parent = wanted.get(match[1]) if match else None
            if parent is not None and member.isreg():
                content = members.extractfile(member)
                assert content is not None  # a regular file
                target = parent / "__pycache__" / Path(inside).name
                target.parent.mkdir(mode=0o755, exist_ok=True)
                target.write_bytes(content.read())
                target.chmod(0o644)


def _fill_carried(bundle: Path) -> None:
    copy_runtime(bundle / "runtime")
    _copy_libraries(bundle / "lib")
    node_python.copy(bundle / "python", [bundle / "lib"])
    _compile(bundle)
    _make_readable(bundle)
    for path in node_python.executables(bundle / "python"):
        path.chmod(0o755)


async def _create_once(target: Path, fill: Callable[[Path], Awaitable[None]]) -> Path:
    await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
    try:
        lock_path = target.with_name(f"{target.name}.lock")
        lock = await FileLock.acquire_async(lock_path, _LOCK_DEADLINE_S)
    except TimeoutError as exc:
        raise SandboxStartFailed(
            f"the runtime for containers is not ready: {exc}",
            hint="try again: another process of this node is building it, or hangs",
        ) from exc
    with lock:
        if not await asyncio.to_thread(target.is_dir):
            partial = Path(tempfile.mkdtemp(prefix=".bundle-", dir=target.parent))
            try:
                await fill(partial)
                await asyncio.to_thread(partial.rename, target)
                caches.note_use(target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return target


async def _fill(python: ImagePython, bundle: Path) -> None:
    await asyncio.to_thread(copy_runtime, bundle / "runtime")
    if python.is_ours:
        await asyncio.to_thread(_copy_libraries, bundle / "lib")
    else:
        await _install_libraries(python, bundle / "lib")
    await asyncio.to_thread(_make_readable, bundle)


def copy_runtime(target: Path) -> None:
    """Copy `aenv_ray.runtime`, as the only part of a package ``aenv_ray``."""
    for source, name in _runtime_files():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)


@cache
def fingerprint() -> str:
    """Return a hash of the runtime and the versions of its libraries."""
    digest = hashlib.sha256()
    for source, name in _runtime_files():
        digest.update(f"{name}\0".encode() + source.read_bytes())
    for name, version in _versions():
        digest.update(f"{name}={version}\0".encode())
    return digest.hexdigest()[:16]


def _runtime_files() -> Iterator[tuple[Path, str]]:
    package = Path(__file__).resolve().parents[2]
    yield package / "__init__.py", "aenv_ray/__init__.py"
    for path in sorted((package / "runtime").rglob("*.py")):
        yield path, f"aenv_ray/{path.relative_to(package)}"


def _versions() -> list[tuple[str, str]]:
    return [(name, importlib.metadata.version(name)) for name in LIBRARIES]


def _copy_libraries(target: Path) -> None:
    for name in LIBRARIES:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                path = target / str(file)
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), path)


async def _install_libraries(python: ImagePython, target: Path) -> None:
    """Install this process's versions for another Python, with uv.

    Raises:
        SandboxStartFailed: uv failed; the message ends with its output.
    """
    from uv import find_uv_bin

    command = [
        find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:",
        "--target", str(target), "--python-version", ".".join(map(str, python.version)),
        "--python-platform", f"{python.machine}-{_PLATFORMS[python.libc]}",
        *uv_options(), *(f"{name}=={version}" for name, version in _versions()),
    ]  # fmt: skip
    words = await failure_of(command, deadline_s=_INSTALL_DEADLINE_S)
    if words is not None:
        raise SandboxStartFailed(
            f"the runtime's libraries cannot be installed for Python {python}:\n{words}",
            hint="use an image with this node's own version of Python, or build with `aenv build`",
        )


def _make_readable(bundle: Path) -> None:
    for path in (bundle, *bundle.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@cache
def _own_libc() -> str:
    return "glibc" if platform.libc_ver()[0] == "glibc" else "musl"


def carry(directory: Path) -> None:
    """Copy this Python into an existing directory; blocks for seconds.

    Raises:
        SandboxStartFailed: This Python cannot be copied.
    """
    bundle = asyncio.run(carried(directory))
    (directory / "python").symlink_to(Path(bundle.name, "python"))


if __name__ == "__main__":
    carry(Path(sys.argv[1]))
