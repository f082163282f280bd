"""What the process engine does not have is refused when an instance is created, never ignored."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.testing.contract_bench import Bench, value_of


@pytest.mark.parametrize(
    ("deploy", "says", "way_out"),
    [
        ({"podTemplate": "DualContainer"}, r"no second container .*'DualContainer'", "docker"),
        ({"network": "internet"}, "no network 'internet'", "docker engine"),
        (
            {"network": "allowlist", "allow": ["pypi.org:443"]},
            "no network 'allowlist'",
            "docker engine",
        ),
        ({"os": "plan9"}, rf"is for plan9 .*this node runs {sys.platform}", "deployConfig.os"),
    ],
)
async def test_unsupported_options_are_refused(
    either: Bench, deploy: dict[str, Any], says: str, way_out: str
) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        await either.start(either.contract_project(deploy))
    assert raised.value.message.startswith("contract@")
    assert raised.value.hint is not None
    assert way_out in raised.value.hint


async def test_a_refusal_comes_before_a_long_preparation(either: Bench) -> None:
    project = either.contract_project({"podTemplate": "DualContainer"})
    (project / "requirements.txt").write_text("no-such-package-anywhere==0\n")
    with pytest.raises(ConfigError, match="no second container"):
        await either.start(project)


@pytest.mark.parametrize(
    "deploy", [{"podTemplate": "singleContainer"}, {"podTemplate": ""}, {"os": sys.platform}]
)
async def test_projects_that_ask_for_nothing_special_run(
    either: Bench, deploy: dict[str, Any]
) -> None:
    """As AEnvironment's own templates write them."""
    sandbox = await either.start(either.contract_project(deploy))
    assert await value_of(sandbox, "echo", text="runs") == "runs"
