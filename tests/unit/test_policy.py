"""The operator's policy: what environments may request, and which setting a refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray import policy
from aenv_ray.config import Settings
from aenv_ray.errors import ConfigError, PolicyRefused
from aenv_ray.policy import STRICT, Policy, policy_of, repository_of
from aenv_ray.project.config import EnvironmentConfig, NetworkMode


def config(**deploy: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"name": "probe", "deployConfig": deploy})


@pytest.mark.parametrize(
    ("deploy", "setting"),
    [
        ({"network": "host"}, "AENV_ALLOW_NETWORKS"),
        ({"allow": ["pypi.org", "10.0.0.7:6379"]}, "AENV_ALLOW_DESTINATIONS"),
        ({"allow": ["8.0.0.0/5"]}, "AENV_ALLOW_DESTINATIONS"),
        ({"engine": "fake"}, "AENV_ALLOW_ENGINES"),
        ({"cpu": 65}, "AENV_MAX_CPU"),
        ({"memory": "257Gi"}, "AENV_MAX_MEMORY"),
        ({"ephemeralStorage": "2Ti"}, "AENV_MAX_DISK"),
        ({"ttl": "8d"}, "AENV_MAX_TTL"),
        ({"container": {"pids": 4097}}, "AENV_MAX_PIDS"),
        ({"container": {"capAdd": ["SYS_ADMIN"]}}, "AENV_ALLOW_CAPABILITIES"),
        ({"container": {"capAdd": ["cap_net_raw"]}}, "AENV_ALLOW_CAPABILITIES"),
        ({"container": {"sidecarCapAdd": ["SYS_ADMIN"]}}, "AENV_ALLOW_CAPABILITIES"),
        ({"container": {"user": "root"}}, "AENV_ALLOW_USERS"),
        ({"container": {"user": "0:0"}}, "AENV_ALLOW_USERS"),
        ({"container": {"user": "00"}}, "AENV_ALLOW_USERS"),
        ({"container": {"user": "toor"}}, "AENV_ALLOW_USERS"),
        ({"container": {"user": "nonroot"}}, "AENV_ALLOW_USERS"),  # an image can make it root
        ({"container": {"runtime": "unconfined"}}, "AENV_ALLOW_RUNTIMES"),
        ({"container": {"image": "10.0.0.7:5000/a"}}, "AENV_ALLOW_IMAGES"),
        ({"container": {"image": "localhost/a"}}, "AENV_ALLOW_IMAGES"),
        ({"container": {"image": "metadata.internal/a@sha256:00"}}, "AENV_ALLOW_IMAGES"),
    ],
)
def test_where_a_gateway_runs_refusals_name_the_setting(
    deploy: dict[str, Any], setting: str
) -> None:
    """Defends the node: a publisher cannot widen its own sandbox."""
    Policy().check(config(**deploy))
    with pytest.raises(PolicyRefused) as caught:
        policy_of(Settings(), behind_gateway=True).check(config(**deploy))
    assert setting in str(caught.value.hint)


def test_an_image_that_was_built_is_checked_as_one_that_is_named() -> None:
    """Invariant 15: a project's list of artifacts is its publisher's word, too."""
    built = [{"type": "image", "content": "10.0.0.7:5000/a"}, {"type": "other", "content": "x"}]
    asked = EnvironmentConfig.model_validate({"name": "probe", "artifacts": built})
    Policy().check(asked)
    with pytest.raises(PolicyRefused, match=r"10\.0\.0\.7"):
        STRICT.check(asked)


@pytest.mark.parametrize(
    "deploy",
    [
        {},
        {"network": "none", "engine": "process", "cpu": "2C", "memory": "4Gi", "ttl": "1h"},
        {"network": "internet", "engine": "docker", "container": {"user": "1000:1000"}},
        {"allow": ["pypi.org:443", "8.8.8.0/24"], "warm": 64},
        {"container": {"image": "python:3.12", "runtime": "runsc"}},
        {"container": {"image": "ghcr.io/acme/tools@sha256:00"}},
    ],
)
def test_what_ordinary_projects_request_is_allowed_behind_a_gateway(deploy: dict[str, Any]) -> None:
    STRICT.check(config(**deploy))


def test_settings_replace_single_parts() -> None:
    given = Settings(
        allow_networks="none, host", allow_capabilities="NET_RAW,cap_sys_ptrace", allow_users="*",
        allow_images="registry.local:5000/team/*", max_memory="1Gi", max_cpu="2", max_pids=8192,
        max_replicas=40,
        max_warm=64,
    )  # fmt: skip
    found = policy_of(given, behind_gateway=True)
    found.check(config(network="host", container={"capAdd": ["CAP_NET_RAW", "SYS_PTRACE"]}))
    found.check(config(container={"user": "root", "image": "registry.local:5000/team/a:1"}))
    found.check(config(container={"pids": 8192}))
    assert found.max_warm == 64
    for refused in (
        config(network="internet"),
        config(container={"image": "python:3"}),
        config(container={"image": "registry.local:5000/other/a"}),
        config(memory="2Gi"),
        config(container={"pids": 8193}),
    ):
        with pytest.raises(PolicyRefused):
            found.check(refused)
    found.check_replicas(40, "ann")
    for strict, number in ((found, 41), (STRICT, 17)):
        with pytest.raises(PolicyRefused, match="replicas") as raised:
            strict.check_replicas(number, "ann")
        assert "AENV_MAX_REPLICAS" in str(raised.value.hint)
    filled = found.applied(config(), "docker").deploy
    assert (filled.cpu, filled.memory, filled.ephemeral_storage) == (2.0, 1 << 30, None)
    assert found.applied(config(memory="5Mi", cpu=1), "docker").deploy.memory == "5Mi"


@pytest.mark.parametrize("user", ["0:0", "root", "nonroot", "app", "1000"])
def test_the_user_of_a_sidecar_is_its_images(user: str) -> None:
    """Its image is data of an episode, so the policy names the images that may be root."""
    is_plain = user == "1000"
    task = "docker.io/swebench/sweb.eval.x86_64.a_1776_b-1:latest"
    for given, image, is_allowed in (
        (Settings(), "ghcr.io/eve/x:1", is_plain),
        (Settings(), "swebench.evil.example/x", is_plain),
        (Settings(), task, True),
        (Settings(allow_root_sidecars="none"), task, is_plain),
        (Settings(allow_root_sidecars="ghcr.io/acme/*"), "ghcr.io/acme/x@sha256:00", True),
        (Settings(allow_users="*"), "ghcr.io/eve/x:1", True),
        (Settings(policy="open"), "ghcr.io/eve/x:1", True),
    ):
        found = policy_of(given, behind_gateway=True)
        if is_allowed:
            found.check_sidecar_user(user, ["local", image], "probe")
            continue
        with pytest.raises(PolicyRefused, match="probe requests a sidecar") as caught:
            found.check_sidecar_user(user, ["local", image], "probe")
        assert "AENV_ALLOW_ROOT_SIDECARS" in str(caught.value.hint)


def test_a_mode_can_be_chosen_without_regard_to_the_gateway() -> None:
    assert policy_of(Settings(), behind_gateway=False) == Policy()
    assert policy_of(Settings(policy="open"), behind_gateway=True) == Policy(isolation="required")
    assert policy_of(Settings(isolation="auto"), behind_gateway=True).isolation == "auto"
    assert policy_of(Settings(policy="strict"), behind_gateway=False) == STRICT
    with pytest.raises(ConfigError):
        policy_of(Settings(max_ttl="soon"), behind_gateway=True)


@pytest.mark.parametrize(
    ("engine", "network"),
    [("process", NetworkMode.NONE), ("docker", NetworkMode.INTERNET),
     ("kubernetes", NetworkMode.INTERNET)],
)  # fmt: skip
def test_a_project_that_names_no_network_does_not_get_the_nodes_network(
    engine: str, network: NetworkMode
) -> None:
    """Defends invariant 7 for projects from before networks could be named."""
    unnamed = config()
    assert STRICT.applied(unnamed, engine).deploy.network is network
    assert Policy().applied(unnamed, engine) is unnamed
    assert Policy(networks=("none",)).applied(unnamed, engine).deploy.network is NetworkMode.NONE


@pytest.mark.parametrize(
    ("reference", "repository"),
    [
        ("python", "docker.io/library/python"),
        ("python:3.12-slim", "docker.io/library/python"),
        ("acme/tools@sha256:00", "docker.io/acme/tools"),
        ("index.docker.io/python", "docker.io/library/python"),
        ("ghcr.io/acme/tools:1", "ghcr.io/acme/tools"),
        ("GHCR.IO/acme/tools", "ghcr.io/acme/tools"),
        ("10.0.0.7:5000/a/b:1", "10.0.0.7:5000/a/b"),
        ("localhost/a", "localhost/a"),
        ("ghcr.io.evil.example/acme", "ghcr.io.evil.example/acme"),
        ("docker.io@evil.example/a", "docker.io/library/docker.io"),
    ],
)
def test_an_image_is_known_by_registry_and_repository(reference: str, repository: str) -> None:
    assert repository_of(reference) == repository


def test_the_operator_opens_ranges_that_are_not_public() -> None:
    given = policy_of(Settings(allow_destinations="10.1.0.0/16, 192.168.1.7"), behind_gateway=True)
    given.check(config(allow=["10.1.2.0/24", "192.168.1.7:80"]))
    with pytest.raises(PolicyRefused, match=r"10\.0\.0\.0/15"):
        given.check(config(allow=["10.0.0.0/15"]))
    with pytest.raises(ConfigError, match="AENV_ALLOW_DESTINATIONS"):
        policy_of(Settings(allow_destinations="internal"), behind_gateway=True)


def test_a_ttl_is_limited_at_each_renewal() -> None:
    policy.STRICT.check_ttl(7 * 86_400)
    with pytest.raises(PolicyRefused, match="TTL"):
        policy.STRICT.check_ttl(7 * 86_400 + 1)
    longer = policy.STRICT.model_copy(update={"max_ttl_s": 14 * 86_400.0})
    with pytest.raises(PolicyRefused, match=r"1209601 s.* 1209600 s"):
        longer.check_ttl(14 * 86_400 + 1)
