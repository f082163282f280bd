"""Copies of a project's modules share what they cannot change, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

from aenv_ray.engines.fake.modules import ModuleSpace

CODE = '''
from dataclasses import dataclass

import numbers_of_mine
from aenv_ray.runtime import register_tool

@dataclass
class Point:
    x: int

@register_tool
def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b + len(numbers_of_mine.SEEN)

@register_tool
def move(point: Point) -> int:
    """Move."""
    assert type(point) is Point
    numbers_of_mine.SEEN.append(point.x)
    return point.x
'''


def _project(tmp_path: Path) -> Path:
    source = tmp_path / "src"
    source.mkdir()
    (source / "tools.py").write_text(CODE)
    (source / "numbers_of_mine.py").write_text("SEEN = []\n")
    return tmp_path


def test_copies_have_their_own_modules_and_types(tmp_path: Path) -> None:
    project = _project(tmp_path)
    before = set(sys.modules)
    first, second = ModuleSpace(project).load(), ModuleSpace(project).load()
    assert not {"tools", "numbers_of_mine"} & (set(sys.modules) - before)
    for registry in (first, second):
        move = registry.tools["move"]
        assert move.function(**move.signature.bind("move", {"point": {"x": 3}})) == 3
    assert first.tools["add"].function(a=1) == 3
    third = ModuleSpace(project).load()
    assert third.tools["add"].function(a=1) == 2


def test_signatures_of_simple_types_are_made_once(tmp_path: Path) -> None:
    """Making one takes longer than all the rest of a sandbox of this engine."""
    project = _project(tmp_path)
    first, second = ModuleSpace(project).load(), ModuleSpace(project).load()
    assert first.tools["add"].signature is second.tools["add"].signature
    assert first.tools["move"].signature is not second.tools["move"].signature
