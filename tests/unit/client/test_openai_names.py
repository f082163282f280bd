"""Tool names for model servers: legal, distinct, and the own name wherever it is legal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.client import openai_name


def all_names(names: list[str]) -> dict[str, str]:
    taken: dict[str, str] = {}
    for name in names:
        taken[openai_name(name, taken)] = name
    return taken


@given(st.lists(st.text(alphabet="ab_/.é ", max_size=80), unique=True, max_size=8))
def test_names_are_legal_and_distinct(names: list[str]) -> None:
    taken = all_names(names)
    assert sorted(taken.values()) == sorted(names)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", legal) for legal in taken)


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("execute_command", "execute_command"),
        ("env@1.0.0/run", "env_1_0_0_run"),
        ("größe", "gr__e"),
        ("", "tool"),
        ("x" * 64, "x" * 64),
        ("x" * 65, "x" * 64),
    ],
)
def test_what_is_legal_stays(name: str, legal: str) -> None:
    assert openai_name(name, {}) == legal


def test_long_names_with_the_same_beginning_differ() -> None:
    first, second = all_names(["x" * 70 + "1", "x" * 70 + "2"])
    assert first != second
    assert len(second) == 64


def test_a_name_is_the_same_every_time() -> None:
    """Prompts are compared across runs: a collision is resolved by content, not by chance."""
    assert all_names(["a.b", "a/b", "a b"]) == all_names(["a.b", "a/b", "a b"])
