"""The node's own Python, to run the runtime in images that have none.

A *carried* Python is a directory with the interpreter, its standard library, every shared library
that they load, and the dynamic linker. Mounted read-only, it runs in any image of this machine's
architecture, with any C library or none. It is for our runtime alone and on no search path of the
image.

It also grades in containers in which an agent was root, so it loads nothing from there. In the
linker, the C library and OpenSSL, the paths are overwritten at which they look for libraries, and
for settings that name libraries.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from aenv_ray.errors import SandboxStartFailed

LINKER: Final = "ld.so"
_LEFT_OUT: Final = shutil.ignore_patterns(
    "__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3",
    "site-packages", "dist-packages", "config-*", "pydoc_data", "*.a", "_tkinter*", "_test*",
    "_xx*", "_ctypes_test*", "_curses*", "readline*", "_gdbm*", "_dbm*", "nis*",
)  # fmt: skip
"""Parts of the standard library that the runtime never imports."""
_LDD_DEADLINE_S: Final = 60.0
_ELF: Final = b"\x7fELF"
_LOADING: Final = re.compile(
    rb"/[!-~]*/(?:ld\.so\.(?:preload|cache)|nsswitch\.conf|gconv|gconv-modules\.cache|locale"
    rb"|locale-archive|ossl-modules|engines-[\d.]+)(?=\0)"
)
"""Files and directories by which the linker, the C library and OpenSSL load code, or locales, which
name such."""
_SEARCHED: Final = re.compile(rb"(?<=\0)/(?:[\w.+-]+/)+(?=\0)")
"""In a linker, a directory in which it looks for libraries."""
_ELF_64: Final = b"\x7fELF\x02\x01"
"""The start of an ELF file for a little-endian machine of 64 bits."""
_DYNAMIC: Final = 2
_TAG: Final = struct.Struct("<q")
_OWN_DIRECTORIES: Final = {15, 29}
"""DT_RPATH and DT_RUNPATH."""
_IGNORED: Final = 0x6000000D
"""A tag without a meaning, which the linker skips."""
_OPENSSL_SETTINGS: Final = re.compile(rb'OPENSSLDIR: "(/[^"\0]+)"')
"""In OpenSSL, the directory of ``openssl.cnf``."""
_NOWHERE: Final = b"/sys/"
"""No longer than any of these paths; nobody can create a file in it."""
_LIBRARY: Final = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)


def command(python: str) -> list[str]:
    """Return the command that starts a carried Python mounted at `python`.

    It ignores the image's ``PYTHON…`` variables and libraries.
    """
    return [
        f"{python}/{LINKER}", "--inhibit-cache", "--library-path", f"{python}/libraries",
        f"{python}/bin/python3", "-I", "-X", "utf8",
    ]  # fmt: skip


@cache
def name() -> str:
    """Return a name that changes with the Python to carry."""
    what = f"{sys.version}\0{_stdlib()}\0".encode() + Path(__file__).read_bytes()
    digest = hashlib.sha256(what).hexdigest()[:8]
    return f"carried-{platform.python_version()}-{platform.machine()}-{digest}"


def copy(target: Path, extensions: Sequence[Path]) -> None:
    """Copy this process's Python; blocks.

    Raises:
        SandboxStartFailed: This Python cannot be carried.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = target / "lib" / version
    shutil.copytree(_stdlib(), library, ignore=_LEFT_OUT)
    modules = Path(sysconfig.get_config_var("DESTSHARED"))
    if not (library / "lib-dynload").is_dir() and modules.is_dir():
        shutil.copytree(modules, library / "lib-dynload", ignore=_LEFT_OUT)
    binary = target / "bin" / "python3"
    binary.parent.mkdir()
    shutil.copyfile(_binary(), binary)
    objects = [_binary(), *sorted((library / "lib-dynload").glob("*.so"))]
    objects += [path for directory in extensions for path in sorted(directory.rglob("*.so"))]
    libraries = target / "libraries"
    libraries.mkdir()
    for path in _shared_libraries(objects):
        shutil.copyfile(path, libraries / path.name)
    linkers = sorted(libraries.glob("ld-*"))
    if not linkers:
        raise SandboxStartFailed(
            "this node's Python is statically linked and cannot be used in an image",
            hint="use an image with Python 3.11 or newer",
        )
    linkers[0].rename(target / LINKER)
    for path in target.rglob("*"):
        if path.is_file():
            _detach(path)
    for path in (binary, target / LINKER):
        path.chmod(0o755)


def executables(target: Path) -> tuple[Path, ...]:
    """Return the files of a carried Python that must be executable."""
    return target / LINKER, target / "bin" / "python3"


def _detach(path: Path) -> None:
    """Overwrite the paths in a program or library by which it would load code of an image."""
    with path.open("rb") as file:
        if file.read(len(_ELF)) != _ELF:
            return
        file.seek(0)
        content = file.read()
    detached = _without_own_directories(content)
    patterns = [_LOADING, *([_SEARCHED] if path.name == LINKER else [])]
    patterns += [
        re.compile(re.escape(directory) + rb"(?=\0)")
        for directory in set(_OPENSSL_SETTINGS.findall(content))
    ]
    for pattern in patterns:
        detached = pattern.sub(_nowhere, detached)
    if detached != content:
        path.write_bytes(detached)


def _without_own_directories(content: bytes) -> bytes:
    """Return an ELF object without the directories in which it looks for libraries itself.

    Those of DT_RPATH come before ``--library-path``, which has all libraries.
    """
    if not content.startswith(_ELF_64):
        return content
    found = bytearray(content)
    (table,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    for header in range(table, table + count * size, size):
        kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", content, header)
        if kind == _DYNAMIC:
            for entry in range(start, start + length, _TAG.size + 8):
                if _TAG.unpack_from(content, entry)[0] in _OWN_DIRECTORIES:
                    _TAG.pack_into(found, entry, _IGNORED)
    return bytes(found)


def _nowhere(found: re.Match[bytes]) -> bytes:
    """Return a path of the same length that cannot exist."""
    is_directory = found[0].endswith(b"/")
    path = _NOWHERE.ljust(len(found[0]) - is_directory, b"-") + b"/" * is_directory
    return path[: len(found[0])]


def _binary() -> Path:
    return Path(os.path.realpath(sys.executable))


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _shared_libraries(objects: Sequence[Path]) -> list[Path]:
    """Return the shared libraries that objects load, including the dynamic linker."""
    try:
        done = subprocess.run(
            ["ldd", *map(str, objects)], capture_output=True, text=True, check=False,
            timeout=_LDD_DEADLINE_S, env={**os.environ, "LC_ALL": "C"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise SandboxStartFailed(
            f"this node's Python cannot be used in an image: ldd: {exc}",
            hint="use an image with Python 3.11 or newer",
        ) from exc
    return [Path(path) for path in dict.fromkeys(_LIBRARY.findall(done.stdout))]
