"""Identifiers: what they look like, and what is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray import ids
from aenv_ray.errors import ConfigError

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)


@given(names)
def test_an_instance_id_fits_a_kubernetes_label_and_a_host_name(name: str) -> None:
    instance_id = ids.new_instance_id(name)
    assert len(instance_id) <= 63
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?-[a-z0-9]{8}", instance_id)
    assert name.startswith(instance_id[:-9])


def test_ids_do_not_repeat() -> None:
    """Invariant 1: a call id that came twice would be refused as a repetition."""
    assert len({ids.new_instance_id("env") for _ in range(2000)}) == 2000
    assert len({ids.new_call_id() for _ in range(2000)}) == 2000


@given(names)
def test_a_valid_name_is_returned_as_it_is(name: str) -> None:
    assert ids.check_environment_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "-a", "a-", "A", "a_b", "a b", "a.b", "../x", "a/b", "ä", "a\n", "x" * 64, "a@b"],
)
def test_a_bad_name_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(ConfigError, match="environment name") as caught:
        ids.check_environment_name(name)
    assert "my-env" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("env", ("env", None)),
        ("env@1.0.0", ("env", "1.0.0")),
        ("env@1.0.0-rc.1+build_2", ("env", "1.0.0-rc.1+build_2")),
        ("e@v", ("e", "v")),
    ],
)
def test_a_reference_is_a_name_and_maybe_a_version(
    reference: str, parts: tuple[str, str | None]
) -> None:
    assert ids.split_reference(reference) == parts


@pytest.mark.parametrize(
    "reference", ["env@", "@1.0", "env@1@2", "env@../x", "env@1/2", "env@.1", "env@1 ", "env@1\n"]
)
def test_a_bad_reference_is_a_config_error(reference: str) -> None:
    with pytest.raises(ConfigError):
        ids.split_reference(reference)
