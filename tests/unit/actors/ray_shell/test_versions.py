"""Processes of incompatible versions of aenv-ray refuse each other, and name both versions."""

from __future__ import annotations

import pytest

import aenv_ray
from aenv_ray.actors.ray_shell.versions import check_version
from aenv_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("ours", "theirs"), [("0.1.0", "0.1.7"), ("1.2.0", "1.9.1"), ("2.0.0rc1", "2.3.0")]
)
def test_versions_of_a_series_are_compatible(
    monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str
) -> None:
    monkeypatch.setattr(aenv_ray, "__version__", ours)
    check_version(theirs, "the head", "upgrade it")


@pytest.mark.parametrize(
    ("ours", "theirs"), [("0.2.0", "0.1.7"), ("1.2.0", "2.0.0"), ("1.0.0", "0.1.0")]
)
def test_others_are_refused_with_both_versions_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str
) -> None:
    monkeypatch.setattr(aenv_ray, "__version__", ours)
    with pytest.raises(ConfigError) as raised:
        check_version(theirs, "the head", "upgrade it")
    for words in (ours, theirs, "the head", "upgrade it"):
        assert words in raised.value.message


def test_what_names_no_version_is_an_older_one() -> None:
    with pytest.raises(ConfigError, match="an older version"):
        check_version("aenv-controller", "the head", "upgrade it")
