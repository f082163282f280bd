"""The networks of pods."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.engines.kubernetes import names
from aenv_ray.engines.kubernetes.plan import limits_egress, network_mode, selects
from aenv_ray.errors import (
    ConfigError,
)
from aenv_ray.project.config import NetworkMode
from tests.unit.engines.kubernetes.pods import spec_of


@pytest.mark.parametrize(
    ("selector", "holds"),
    [
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "2"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]}, True),
    ],
)
def test_selectors_are_those_of_kubernetes(selector: dict[str, Any], holds: bool) -> None:
    assert selects(selector, {"a": "1"}) is holds


def test_only_a_policy_for_what_goes_out_keeps_a_network() -> None:
    selector = {"matchLabels": {names.NETWORK: "none"}}
    inward = {"spec": {"podSelector": selector, "policyTypes": ["Ingress"]}}
    outward = {"spec": {"podSelector": selector, "policyTypes": ["Egress"]}}
    labels = names.labels("uid", "host", NetworkMode.NONE)
    assert not limits_egress([inward], labels)
    assert limits_egress([inward, outward], labels)
    assert not limits_egress([outward], names.labels("uid", "host", NetworkMode.INTERNET))


@pytest.mark.parametrize("mode", ["host", "allowlist"])
def test_a_network_that_pods_do_not_have_is_refused(mode: str) -> None:
    allow = {"allow": ["pypi.org:443"]} if mode == "allowlist" else {}
    with pytest.raises(ConfigError, match=mode):
        network_mode(spec_of(network=mode, **allow).config)
