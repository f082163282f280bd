"""Text that publishers and agents choose, against the expressions that everybody's processes match.

A match holds the interpreter: while it runs, no other thread of a host or a gateway does.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from aenv_ray.engines.images import reference
from aenv_ray.engines.images.buildkit import ProgressReport
from aenv_ray.engines.node.installer import without_passwords
from aenv_ray.engines.process.requirements import read_requirements
from aenv_ray.errors import ConfigError
from aenv_ray.hub.catalog import version_key, words_of
from aenv_ray.project import project
from aenv_ray.project.destinations import parse_destination
from aenv_ray.project.dockerfile import exposes_source
from aenv_ray.units import parse_cpu_cores, parse_duration_s, parse_memory_bytes

ROOT: Final = Path(__file__).resolve().parents[2]
LENGTH: Final = 65_536
"""Quadratic time is seconds, and what grows faster is hours."""
PIECES: Final = (
    " ", "\t", "\n", "-", "_", ".", "/", "a", "a.", "a-", "a_", "1", "1.", "1-", " 1/1", ": ",
    "--a ", "--a\n", "[", "(", ";", "=", ",", "://", "@", "a>=1 ", " --hash=a:0", "COPY ", "1h",
)  # fmt: skip


def _requirements(text: str, directory: Path) -> None:
    (directory / "requirements.txt").write_text(text)
    read_requirements(directory)


def _dockerfile(text: str, directory: Path) -> None:
    (directory / "config.json").write_text(
        json.dumps({"name": "p", "deployConfig": {"hideSource": True}})
    )
    (directory / "Dockerfile").write_text(text)
    exposes_source(project.load(directory))


def _build_output(text: str, _: Path) -> None:
    report = ProgressReport(lambda *_: None, lambda _: None)
    for line in (f"#1 {text}", f"#1 {text}", f"#1 ERROR: {text}"):
        report.feed(line.replace("\n", " "))
    report.failure("it", text)


PARSERS: Final[dict[str, tuple[tuple[str, ...], Callable[[str, Path], Any]]]] = {
    "requirements": (("a", "a>", "a;", "a[", "a[]", "-r", "./a", "a --hash="), _requirements),
    "dockerfile": (("FROM a\n", "COPY", "COPY --a ", "COPY ["), _dockerfile),
    "build output": (("[", "[a ", "[a 1/", "1.0 "), _build_output),
    "image": (("a", "a.b/", "a:1/", "a@a", "sha256:"), lambda text, _: reference.is_valid(text)),
    "version": (("1", "v1.0-", "1+"), lambda text, _: version_key(text)),
    "words": (("a",), lambda text, _: words_of(text)),
    "python": ((">=", "==1", "===", "~=1."), lambda text, _: SpecifierSet(text)),
    "destination": (("a", "1.1.1.1"), lambda text, _: parse_destination(text, what="it")),
    "duration": (("1",), lambda text, _: parse_duration_s(text)),
    "cpu": (("1", "1."), lambda text, _: parse_cpu_cores(text)),
    "memory": (("1", "1."), lambda text, _: parse_memory_bytes(text)),
    "installer": (("://", "https://a:"), lambda text, _: without_passwords(text)),
}


def _texts(firsts: tuple[str, ...]) -> Iterator[str]:
    for first, piece, last in itertools.product(("", *firsts), PIECES, ("", "@")):
        yield first + (piece * LENGTH)[:LENGTH] + last


def parse_all(name: str, directory: str) -> None:
    """Parse all texts; called in a separate process, which can be ended."""
    firsts, parse = PARSERS[name]
    for text in _texts(firsts):
        with suppress(ConfigError, InvalidSpecifier):
            parse(text, Path(directory))


@pytest.mark.parametrize("name", PARSERS)
def test_no_text_hangs_a_shared_process(name: str, tmp_path: Path) -> None:
    """Invariant 7."""
    code = "import sys; from tests.attacks.test_patterns import parse_all; parse_all(*sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", code, name, str(tmp_path)], check=True, timeout=60, cwd=ROOT
    )
