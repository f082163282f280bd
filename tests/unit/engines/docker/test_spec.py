"""What a container is made from, by the project's config and the caller's wishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.docker.spec import container_body, isolation, second_body
from aenv_ray.engines.docker.surroundings import SecondSurroundings, Surroundings
from aenv_ray.engines.images import node_images as docker_images
from aenv_ray.engines.images import runtime_kit as docker_kit
from aenv_ray.engines.images.build import split_tag
from aenv_ray.engines.images.runtime_kit import ImagePython
from aenv_ray.engines.node.docker_client import socket_path
from aenv_ray.errors import ConfigError
from aenv_ray.ids import InstanceId
from aenv_ray.project.config import EnvironmentConfig, NetworkMode

ETC = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"]


def surroundings(**fields: Any) -> Surroundings:
    usual: dict[str, Any] = {
        "scope": "s", "host_id": "h", "directory": Path("/d"), "name": "aenv-x",
        "image_id": "sha256:1", "image_user": "", "image_path": "/opt/bin:/bin",
        "kit": Path("/kit"), "run_directory": Path("/d/i/aenv-x"), "project_dir": Path("/p"),
        "etc_directory": Path("/d/etc/aenv-x"), "network": "none",
    }  # fmt: skip
    return Surroundings(**{**usual, **fields})


def spec(deploy: dict[str, Any], **fields: Any) -> SandboxSpec:
    config = EnvironmentConfig.model_validate({"name": "x", "deployConfig": deploy})
    return SandboxSpec(
        instance_id=InstanceId("x-00000001"), project_dir=Path("/p"), config=config, deadline=1.5,
        **fields,
    )  # fmt: skip


def body_of(deploy: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return container_body(spec({"network": "none", **deploy}), surroundings(**fields))


def variables(body: dict[str, Any]) -> dict[str, str]:
    return dict(item.partition("=")[::2] for item in body["Env"])


def test_a_container_has_no_right_that_nobody_asked_for() -> None:
    body = body_of({})
    host = body["HostConfig"]
    assert body["NetworkDisabled"] is True
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], [])
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["NetworkMode"] == "none"
    assert host["PidsLimit"] == 1024
    assert not {"PortBindings", "Privileged", "Devices", "PidMode"} & set(host)
    writable = [mount["Target"] for mount in host["Mounts"] if not mount["ReadOnly"]]
    assert writable == ["/.aenv/run", *ETC], "as the daemon's own"
    below = [m for m in host["Mounts"] if Path("/d/i/aenv-x") in Path(m["Source"]).parents]
    assert below == [], "whoever runs inside could put a link to anything there"
    assert not any("docker.sock" in mount["Source"] for mount in host["Mounts"])


@pytest.mark.parametrize("mode", [mode for mode in NetworkMode if mode is not NetworkMode.NONE])
def test_a_container_with_a_network_has_its_files_from_the_daemon(mode: NetworkMode) -> None:
    body = body_of({}, network_mode=mode, network="x")
    assert "NetworkDisabled" not in body
    assert not {mount["Target"] for mount in body["HostConfig"]["Mounts"]} & set(ETC)


def test_what_the_project_asks_for_is_given() -> None:
    container = {"capAdd": ["NET_RAW"], "pids": 64, "readOnlyRoot": True}
    deploy = {"cpu": "1500m", "memory": "1G", "ephemeralStorage": "10M", "container": container}
    body = body_of(deploy, runtime="runsc")
    host = body["HostConfig"]
    assert host["NanoCpus"] == 1_500_000_000
    assert host["Memory"] == host["MemorySwap"] == 1 << 30
    assert (host["CapAdd"], host["PidsLimit"], host["ReadonlyRootfs"]) == (["NET_RAW"], 64, True)
    assert host["Runtime"] == "runsc"
    assert set(host["Tmpfs"]) == {"/home/agent", "/tmp"}
    assert [m["Target"] for m in host["Mounts"] if not m["ReadOnly"]] == ["/.aenv/run"]
    assert f"size={10 << 20}" in host["Tmpfs"]["/home/agent"]
    facts = isolation(spec({"network": "none", **deploy}), surroundings())
    assert facts.limits["memory"].startswith("1024 MiB")
    assert any("NET_RAW" in item for item in facts.missing)


@pytest.mark.parametrize(
    ("own", "image", "user"),
    [(None, "", "65534:65534"), (None, "app", "app"), ("root", "app", "root")],
)
def test_who_it_runs_as(own: str | None, image: str, user: str) -> None:
    container = {} if own is None else {"user": own}
    assert body_of({"container": container}, image_user=image)["User"] == user


def test_the_images_path_is_kept_unless_somebody_sets_one() -> None:
    assert variables(body_of({}))["PATH"] == "/opt/bin:/bin"
    own = body_of({"environmentVariables": {"PATH": "/mine"}})
    assert variables(own)["PATH"] == "/mine"


def test_a_callers_label_cannot_pose_as_one_of_ours() -> None:
    asked = spec({"network": "none"}, labels={"aenv.host": "mine", "run": "seven"})
    labels = container_body(asked, surroundings())["Labels"]
    assert labels["aenv.host"] == "h"
    assert labels["aenv.label.run"] == "seven"
    assert labels["aenv.deadline"] == "1.5"


def test_the_facts_say_what_is_missing() -> None:
    around = surroundings(has_seccomp=False, network_mode=NetworkMode.HOST)
    facts = isolation(spec({"network": "host"}), around)
    assert "net" not in facts.namespaces
    assert any(item.startswith("network: host") for item in facts.missing)
    assert any(item.startswith("seccomp") for item in facts.missing)


def test_an_allow_list_comes_with_its_names_and_no_resolver() -> None:
    around = surroundings(
        network="aenv-allow-x", network_mode=NetworkMode.ALLOWLIST, dns=("127.0.0.1",),
        hosts=("a.org:1.2.3.4",), allowed=("a.org (1.2.3.4)", "10.0.0.0/8"),
        second=second_surroundings(),
    )  # fmt: skip
    asked = spec({"allow": ["a.org", "10.0.0.0/8"]})
    host = container_body(asked, around)["HostConfig"]
    assert (host["Dns"], host["ExtraHosts"]) == (["127.0.0.1"], ["a.org:1.2.3.4"])
    assert around.second is not None
    second = second_body(asked, around, around.second)["HostConfig"]
    assert not {"Dns", "DnsOptions", "ExtraHosts"} & set(second), "it has them by the network"
    facts = isolation(asked, around)
    assert (facts.network, facts.allowed) == ("allowlist", around.allowed)
    assert any("allowed by address" in item for item in facts.missing)
    assert any(item.endswith("private networks: 10.0.0.0/8") for item in facts.missing)
    plain = isolation(spec({"allow": ["1.2.3.4"]}), surroundings(network_mode="allowlist"))
    assert not any(item.startswith("network") for item in plain.missing)


def test_the_images_directories_are_limited_by_quota_or_watched() -> None:
    deploy = {"ephemeralStorage": "10M"}
    watched, limited = body_of(deploy), body_of(deploy, has_quota=True)
    unlimited = body_of({}, has_quota=True)
    closed = body_of({**deploy, "container": {"readOnlyRoot": True}}, has_quota=True)
    size = 10 << 20
    most = size + 4096
    assert {"Name": "fsize", "Soft": most, "Hard": most} in watched["HostConfig"]["Ulimits"]
    assert watched["Labels"]["aenv.storage-bytes"] == str(size)
    assert limited["HostConfig"]["StorageOpt"] == {"size": str(size)}
    for body in (limited, unlimited, closed):
        assert "aenv.storage-bytes" not in body["Labels"]
        assert [limit["Name"] for limit in body["HostConfig"]["Ulimits"]] == ["nofile"]
    for body in (watched, unlimited, closed):
        assert "StorageOpt" not in body["HostConfig"]

    def missing(deploy: dict[str, Any], **fields: Any) -> list[str]:
        facts = isolation(spec({"network": "none", **deploy}), surroundings(**fields))
        return [item for item in facts.missing if item.startswith("storage")]

    assert "is not limited" in missing({})[0]
    assert "until it is looked at" in missing(deploy)[0]
    assert missing(deploy, has_quota=True) == []
    assert missing({**deploy, "container": {"readOnlyRoot": True}}) == []


def test_which_image_a_project_runs_in() -> None:
    def reference(default: str | None = None, **fields: Any) -> str:
        config = EnvironmentConfig.model_validate({"name": "x", **fields})
        return docker_images.reference_of(config, default)

    built = [{"type": "image", "content": "x:1", "digest": "sha256:2"}]
    named = {"container": {"image": "y:1"}}
    assert reference("z", artifacts=built, deployConfig=named) == "y:1"
    assert reference("z", artifacts=built) == "sha256:2"
    assert reference("z", artifacts=[{"type": "image", "content": "x:1"}]) == "x:1"
    assert reference("z") == "z"
    with pytest.raises(ConfigError, match=r"x@1\.0\.0 has no image"):
        reference()


def test_a_kit_is_named_by_what_it_is_for() -> None:
    assert str(ImagePython((3, 12), "aarch64", "musl")) == "3.12-aarch64-musl"
    assert not ImagePython((3, 12), "aarch64", "musl").is_ours
    assert docker_kit.fingerprint() == docker_kit.fingerprint()


def test_the_runtime_for_containers_is_the_island_alone(tmp_path: Path) -> None:
    docker_kit.copy_runtime(tmp_path)
    (package,) = tmp_path.iterdir()
    assert {path.name for path in package.iterdir()} == {"__init__.py", "runtime"}
    assert (package / "runtime" / "shim" / "aenv" / "__init__.py").is_file()


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:2375", "ssh://x", "/var/run/docker.sock"])
def test_a_daemon_of_another_machine_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="no Unix socket"):
        socket_path(address)


def test_references_are_split_at_their_tag() -> None:
    assert split_tag("localhost:5000/a/b:1") == ("localhost:5000/a/b", "1")
    assert split_tag("localhost:5000/a/b") == ("localhost:5000/a/b", "latest")


def second_surroundings(**fields: Any) -> SecondSurroundings:
    usual: dict[str, Any] = {
        "name": "aenv-x-second", "image_id": "sha256:2", "image_user": "", "image_path": "/bin",
        "image_directory": "/testbed", "kit": Path("/carried"),
        "run_directory": Path("/d/i/aenv-x-second"),
    }  # fmt: skip
    return SecondSurroundings(**{**usual, **fields})


def test_a_second_container_has_the_walls_of_the_first_and_less_inside() -> None:
    second = second_surroundings()
    around = surroundings(second=second)
    container = {"capAdd": ["NET_RAW"], "pids": 64}
    asked = spec(
        {"network": "none", "memory": "1G", "container": container},
        environment_variables={"KEY": "secret"},
    )
    body = second_body(asked, around, second)
    host = body["HostConfig"]
    assert (host["CapDrop"], "CapAdd" in host) == (["ALL"], False)
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert (host["Memory"], host["PidsLimit"]) == (1 << 30, 64)
    assert host["NetworkMode"] == "container:aenv-x"
    targets = {mount["Target"]: mount.get("ReadOnly") for mount in host["Mounts"]}
    kit = {f"/.aenv/{part}": True for part in ("runtime", "lib", "python")}
    assert targets == {"/.aenv/run": False, "/shared": None, **kit}
    assert variables(body).keys() == {"AENV_INSTANCE_ID", "WORK_SHARE", "PATH"}
    assert body["WorkingDir"] == "/testbed"
    assert "Hostname" not in body, "the daemon refuses one beside another's network"
    assert "NetworkDisabled" not in body, "it would not join it"


def test_two_containers_are_told_apart_by_their_labels() -> None:
    second = second_surroundings()
    around = surroundings(second=second)
    asked = spec({"network": "none"})
    first_labels = container_body(asked, around)["Labels"]
    second_labels = second_body(asked, around, second)["Labels"]
    assert (first_labels["aenv.instance"], "aenv.second-of" in first_labels) == (
        "x-00000001", False,
    )  # fmt: skip
    assert "aenv.instance" not in second_labels
    assert second_labels["aenv.second-of"] == "x-00000001"
    assert first_labels["aenv.volume"] == second_labels["aenv.volume"] == "aenv-x-shared"
    assert "aenv.volume" not in body_of({})["Labels"]


def test_a_container_with_its_own_kernel_gets_a_key_by_input_and_no_socket() -> None:
    body = body_of({}, runtime="runsc", has_own_kernel=True)
    assert "NetworkDisabled" not in body, "it has the daemon bring up the loopback"
    assert body["OpenStdin"]
    assert body["StdinOnce"]
    assert "/.aenv/run" not in [mount["Target"] for mount in body["HostConfig"]["Mounts"]]
    assert body["Entrypoint"][-1].endswith("main(keyed=True)")
    assert "aenv.link" in body["Labels"]
    usual = body_of({})
    assert "OpenStdin" not in usual
    assert "aenv.link" not in usual["Labels"]
    second = second_surroundings()
    around = surroundings(second=second, has_own_kernel=True, runtime="runsc")
    beside = second_body(spec({"network": "none"}), around, second)
    assert beside["OpenStdin"]
    assert beside["Entrypoint"][-1].endswith(", keyed=True)")


def test_facts_of_a_container_with_its_own_kernel_claim_no_more_than_is() -> None:
    around = surroundings(has_own_kernel=True)
    facts = isolation(spec({"network": "none"}), around)
    assert not facts.seccomp
    assert "open files" not in facts.limits
    assert any(item.startswith("open files") for item in facts.missing)
    assert "with more it ends" in facts.limits["processes"]
