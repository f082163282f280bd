"""Identifiers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.errors import ConfigError
from aenv_ray.ids import check_environment_name, new_call_id, new_instance_id, split_reference

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)


@given(NAMES)
def test_an_instance_id_is_a_dns_label_and_a_kubernetes_label(name: str) -> None:
    instance_id = new_instance_id(name)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", instance_id)
    assert len(instance_id) <= 63
    assert instance_id.rpartition("-")[0] == name[:54].rstrip("-")


def test_ids_are_not_repeated() -> None:
    """Invariant 1 rests on this."""
    assert len({new_call_id() for _ in range(10_000)}) == 10_000
    assert len({new_instance_id("x") for _ in range(10_000)}) == 10_000


@given(NAMES)
def test_good_names_pass(name: str) -> None:
    assert check_environment_name(name) == name
    assert split_reference(name) == (name, None)
    assert split_reference(f"{name}@1.0.0-rc.1+b") == (name, "1.0.0-rc.1+b")


@pytest.mark.parametrize(
    "reference",
    [
        "", "@", "@1.0.0", "A", "a_b", "-a", "a-", "a b", "a" * 64, "a@", "a@ 1", "a@1@2", "a@-1",
        "a@1/..", "../a", "a/b", "ü", "a\n", "a@1\n", "a@" + "1" * 65,
    ],
)  # fmt: skip
def test_bad_references_are_refused_with_a_way_out(reference: str) -> None:
    with pytest.raises(ConfigError) as raised:
        split_reference(reference)
    assert raised.value.hint
