"""Sections of ``benchmarks/README.md`` that are written by commands."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Final

README: Final = Path(__file__).parent / "README.md"


def replace_section(name: str, text: str) -> None:
    """Replace what is between the comments ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        ValueError: There are no such comments.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = README.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{README} has no section {begin} … {end}")
    README.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def machine() -> str:
    """Return a sentence about this machine and the versions that matter."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores ({_processor()}), {memory_gib:.0f} GiB of memory, Linux "
        f"{platform.release()}, Python {platform.python_version()}, Ray {version('ray')}."
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
