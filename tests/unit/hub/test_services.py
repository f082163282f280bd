"""Records of services."""

from __future__ import annotations

import pytest

from aenv_ray.errors import (
    ConfigError,
)
from aenv_ray.hub.services import Autoscale, ServiceRecord, check_name


def test_only_changes_that_need_new_sandboxes_change_the_revision() -> None:
    record = ServiceRecord(
        id="desk", uid="u", reference="probe@1.0.0", digest="d", owner="ann", replicas=1,
        created_at=1.0, updated_at=1.0,
    )  # fmt: skip
    same = {"replicas": 3, "updated_at": 2.0, "autoscale": Autoscale.parse("1:2")}
    assert record.model_copy(update=same).revision == record.revision
    for changed in ({"digest": "e"}, {"environment_variables": {"A": "b"}}, {"engine": "docker"}):
        assert record.model_copy(update=changed).revision != record.revision
    assert "secret" not in repr(
        record.model_copy(update={"environment_variables": {"A": "secret"}})
    )


@pytest.mark.parametrize("text", ["", "1", "0:1", "2:1", "a:b", "1:2:3", "1:5000"])
def test_autoscale_is_two_numbers(text: str) -> None:
    with pytest.raises(ConfigError):
        Autoscale.parse(text)


@pytest.mark.parametrize("name", ["", "A", "a_b", "1a", "a-", "a" * 64, "a.b", "a/b", "a#b"])
def test_a_service_name_must_be_a_dns_label(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name)
