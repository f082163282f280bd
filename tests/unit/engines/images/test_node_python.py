"""The carried Python: what its copies say about where libraries are."""

from __future__ import annotations

import struct

from aenv_ray.engines.images.node_python import _without_own_directories

RPATH, RUNPATH, NEEDED, STRTAB = 15, 29, 1, 5


def elf(*entries: tuple[int, int], start: bytes = b"\x7fELF\x02\x01") -> bytes:
    """Return a program whose dynamic section has these entries."""
    section = b"".join(struct.pack("<qQ", *entry) for entry in (*entries, (0, 0)))
    header = bytearray(64)
    header[: len(start)] = start
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 2)
    code = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 64, 64, 4096)
    dynamic = struct.pack("<IIQQQQQQ", 2, 6, 176, 0, 0, len(section), len(section), 8)
    return bytes(header) + code + dynamic + section


def tags(content: bytes) -> list[int]:
    return [tag for tag, _ in struct.iter_unpack("<qQ", content[176:])]


def test_a_copy_names_no_directories_of_its_own() -> None:
    """The linker would look there first, and root in a container can create files there."""
    before = elf((NEEDED, 1), (RPATH, 2), (STRTAB, 64), (RUNPATH, 3))
    after = _without_own_directories(before)
    assert tags(before) == [NEEDED, RPATH, STRTAB, RUNPATH, 0]
    assert tags(after) == [NEEDED, 0x6000000D, STRTAB, 0x6000000D, 0]
    assert len(after) == len(before)


def test_other_files_are_left_alone() -> None:
    assert _without_own_directories(elf((NEEDED, 1))) == elf((NEEDED, 1))
    short = elf((RPATH, 2), start=b"\x7fELF\x01\x01")
    assert _without_own_directories(short) == short
