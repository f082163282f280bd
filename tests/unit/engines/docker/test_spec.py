"""The JSON that creates containers, and the facts about their isolation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.host import DockerHost
from aenv_ray.engines.docker.isolation import isolation
from aenv_ray.engines.docker.networks import ContainerNetwork
from aenv_ray.engines.docker.plan import (
    ContainerPlan,
    DaemonFeatures,
    OciRuntime,
    Program,
    SidecarPlan,
)
from aenv_ray.engines.docker.spec import container_body, etc_files, sidecar_body
from aenv_ray.engines.images import runtime_bundle
from aenv_ray.engines.images.node_images import NodeImage, reference_of
from aenv_ray.engines.images.reference import split_tag
from aenv_ray.engines.images.runtime_bundle import ImagePython
from aenv_ray.engines.images.serving import ImageContent
from aenv_ray.engines.node.docker_client import DockerClient, socket_path
from aenv_ray.engines.node.local_storage import LocalDirectory
from aenv_ray.errors import ConfigError
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.project.config import EnvironmentConfig, NetworkMode
from aenv_ray.project.storage import StorageMount

ETC = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"]


def image(**fields: Any) -> NodeImage:
    content = ImageContent("x:1", (3, 12), True, True, False, False, (), frozenset())
    usual: dict[str, Any] = {
        "id": "sha256:1", "user": "", "path": "/opt/bin:/bin", "directory": "", "python": None,
        "content": content,
    }  # fmt: skip
    return NodeImage(**{**usual, **fields})


def plan(**fields: Any) -> ContainerPlan:
    usual: dict[str, Any] = {
        "host": DockerHost(HostId("h"), "s", DockerClient("unix:///d"), DockerFiles(Path("/d"))),
        "name": "aenv-x",
        "image": image(), "program": Program(bundle=Path("/bundle")),
        "network": ContainerNetwork(NetworkMode.NONE, "none"), "project_dir": Path("/p"),
    }  # fmt: skip
    return ContainerPlan(**{**usual, **fields})


def spec(deploy: dict[str, Any], **fields: Any) -> SandboxSpec:
    config = EnvironmentConfig.model_validate({"name": "x", "deployConfig": deploy})
    return SandboxSpec(
        instance_id=InstanceId("x-00000001"), project_dir=Path("/p"), config=config, deadline=1.5,
        **fields,
    )  # fmt: skip


def body_of(deploy: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return container_body(spec({"network": "none", **deploy}), plan(**fields))


def variables(body: dict[str, Any]) -> dict[str, str]:
    return dict(item.partition("=")[::2] for item in body["Env"])


def test_a_container_has_no_right_that_was_not_requested() -> None:
    body = body_of({})
    host = body["HostConfig"]
    assert body["NetworkDisabled"] is True
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], [])
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["NetworkMode"] == "none"
    assert host["PidsLimit"] == 1024
    assert not {"PortBindings", "Privileged", "Devices", "PidMode"} & set(host)
    writable = [mount["Target"] for mount in host["Mounts"] if not mount["ReadOnly"]]
    assert writable == []
    sources = [mount.get("Source", "") for mount in host["Mounts"]]
    below = [one for one in sources if Path("/d/i/aenv-x") in Path(one).parents]
    assert below == [], "a process inside could put a symbolic link to anything there"
    assert not any("docker.sock" in one for one in sources)


def test_everything_that_a_container_takes_from_its_node_is_bounded() -> None:
    """Invariant 7: descriptors, logs, memory file systems; and no program of the image runs."""
    body = body_of({"ephemeralStorage": "10M", "container": {"readOnlyRoot": True}})
    host = body["HostConfig"]
    assert {"Name": "nofile", "Soft": 4096, "Hard": 4096} in host["Ulimits"]
    log = {"max-size": "5m", "max-file": "2", "compress": "false"}
    assert host["LogConfig"] == {"Type": "local", "Config": log}
    for path, mib in (("/home/agent", 10), ("/tmp", 10), ("/dev/shm", 64)):
        options = set(host["Tmpfs"][path].split(","))
        inodes = f"nr_inodes={max(1024, mib * 64)}"
        assert {"nosuid", "nodev", f"size={mib << 20}", inodes} <= options, path
    assert "noexec" in host["Tmpfs"]["/dev/shm"]
    assert host["IpcMode"] == "private"
    assert host["OomScoreAdj"] == 1000, "the kernel ends sandboxes before Ray"
    assert host["RestartPolicy"] == {"Name": "no"}
    assert body["Healthcheck"] == {"Test": ["NONE"]}


@pytest.mark.parametrize("mode", list(NetworkMode))
def test_etc_files_are_read_only_and_not_those_of_the_daemon(mode: NetworkMode) -> None:
    """Invariant 7: the daemon's are writable files of the node, of any size."""
    asked, planned = spec({}), plan(network=ContainerNetwork(mode, "x", "nameserver 1.1.1.1\n"))
    mounts = {m["Target"]: m for m in container_body(asked, planned)["HostConfig"]["Mounts"]}
    sources = {path: mounts[path]["Source"] for path in ETC}
    assert all(mounts[path]["ReadOnly"] for path in ETC)
    own = "/d/etc/aenv-x"
    if mode is NetworkMode.HOST:
        assert sources == {path: path for path in ETC} | {ETC[0]: f"{own}/hostname"}
        assert etc_files(asked, planned) == {"hostname": "x-00000001\n"}
    else:
        assert sources == {path: f"{own}/{Path(path).name}" for path in ETC}
        assert etc_files(asked, planned)["resolv.conf"] == "nameserver 1.1.1.1\n"


@pytest.mark.parametrize("mode", [NetworkMode.INTERNET, NetworkMode.ALLOWLIST])
def test_a_bridge_is_not_told_the_id_of_an_instance(mode: NetworkMode) -> None:
    """Invariant 7: the daemon resolves host names for every container of the bridge."""
    asked, planned = spec({}), plan(network=ContainerNetwork(mode, "x"))
    assert container_body(asked, planned)["Hostname"] == "sandbox"
    assert "x-00000001" not in str(etc_files(asked, planned))


def test_the_projects_settings_are_applied() -> None:
    container = {"capAdd": ["NET_RAW"], "pids": 64, "readOnlyRoot": True}
    deploy = {"cpu": "1500m", "memory": "1G", "ephemeralStorage": "10M", "container": container}
    body = body_of(deploy, runtime=OciRuntime("runsc"))
    host = body["HostConfig"]
    assert host["NanoCpus"] == 1_500_000_000
    assert host["Memory"] == host["MemorySwap"] == 1 << 30
    assert (host["CapAdd"], host["PidsLimit"], host["ReadonlyRootfs"]) == (["NET_RAW"], 64, True)
    assert host["Runtime"] == "runsc"
    assert set(host["Tmpfs"]) == {"/dev/shm", "/home/agent", "/tmp"}
    assert [m["Target"] for m in host["Mounts"] if not m["ReadOnly"]] == []
    assert f"size={10 << 20}" in host["Tmpfs"]["/home/agent"]
    facts = isolation(spec({"network": "none", **deploy}), plan())
    assert facts.limits["memory"].startswith("1024 MiB")
    assert any("NET_RAW" in item for item in facts.missing)


def test_a_container_without_a_limit_gets_half_of_the_nodes_memory() -> None:
    """Invariant 7: as process sandboxes do; one container cannot take all of a node's memory."""
    daemon = DaemonFeatures(memory_bytes=8 << 30)
    host = body_of({}, daemon=daemon)["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 4 << 30
    facts = isolation(spec({"network": "none"}), plan(daemon=daemon))
    assert facts.limits["memory"].startswith("4096 MiB")
    assert body_of({"memory": "6Gi"}, daemon=daemon)["HostConfig"]["Memory"] == 6 << 30
    untold = isolation(spec({"network": "none"}), plan())
    assert any(item.startswith("memory: no limit") for item in untold.missing)


@pytest.mark.parametrize(
    ("container", "image_user", "is_told"),
    [
        ({}, "", False),
        ({}, "root", True),
        ({"user": "app"}, "", True),
        ({"user": "1000"}, "root", False),
        ({"user": "root", "readOnlyRoot": True}, "", False),
    ],
)
def test_the_facts_say_that_root_can_change_what_rewards_load(
    container: dict[str, Any], image_user: str, is_told: bool
) -> None:
    deploy = {"network": "none", "container": container}
    facts = isolation(spec(deploy), plan(image=image(user=image_user)))
    assert any("may change the image's Python" in item for item in facts.missing) == is_told


@pytest.mark.parametrize(
    ("own", "image_user", "user"),
    [(None, "", "65534:65534"), (None, "app", "app"), ("root", "app", "root")],
)
def test_the_user_is_the_projects_or_the_images_or_nobody(
    own: str | None, image_user: str, user: str
) -> None:
    container = {} if own is None else {"user": own}
    assert body_of({"container": container}, image=image(user=image_user))["User"] == user


def test_the_images_path_is_the_default() -> None:
    assert variables(body_of({}))["PATH"] == "/opt/bin:/bin"
    own = body_of({"environmentVariables": {"PATH": "/mine"}})
    assert variables(own)["PATH"] == "/mine"


def test_a_callers_label_cannot_replace_one_of_ours() -> None:
    asked = spec({"network": "none"}, labels={"aenv.host": "mine", "run": "seven"})
    labels = container_body(asked, plan())["Labels"]
    assert labels["aenv.host"] == "h"
    assert labels["aenv.label.run"] == "seven"
    assert labels["aenv.deadline"] == "1.5"


def test_the_facts_say_what_is_missing() -> None:
    planned = plan(
        daemon=DaemonFeatures(seccomp=False), network=ContainerNetwork(NetworkMode.HOST, "host")
    )
    facts = isolation(spec({"network": "host"}), planned)
    assert "net" not in facts.namespaces
    assert any(item.startswith("network: host") for item in facts.missing)
    assert any(item.startswith("seccomp") for item in facts.missing)


def test_an_allow_list_comes_with_its_host_names_and_no_resolver() -> None:
    network = ContainerNetwork(
        NetworkMode.ALLOWLIST, "aenv-allow-x", "nameserver 127.0.0.1\n",
        (("1.2.3.4", "a.org"),), ("a.org (1.2.3.4)", "10.0.0.0/8"),
    )  # fmt: skip
    planned = plan(network=network)
    asked = spec({"allow": ["a.org", "10.0.0.0/8"]})
    files = etc_files(asked, planned)
    assert files["hosts"].endswith("1.2.3.4\ta.org\n")
    assert files["resolv.conf"] == "nameserver 127.0.0.1\n"
    facts = isolation(asked, planned)
    assert (facts.network, facts.allowed) == ("allowlist", network.allowed)
    assert any("allowed by address" in item for item in facts.missing)
    assert any(item.endswith("private networks: 10.0.0.0/8") for item in facts.missing)
    public = plan(network=ContainerNetwork(NetworkMode.ALLOWLIST, "x"))
    plain = isolation(spec({"allow": ["1.2.3.4"]}), public)
    assert not any(item.startswith("network") for item in plain.missing)


def test_writes_to_the_images_directories_are_limited_by_quota_or_checked() -> None:
    deploy = {"ephemeralStorage": "10M"}
    quota = DaemonFeatures(disk_quota=True)
    checked, limited = body_of(deploy), body_of(deploy, daemon=quota)
    usual = body_of({}, daemon=quota)
    closed = body_of({**deploy, "container": {"readOnlyRoot": True}}, daemon=quota)
    size = 10 << 20
    most = size + 4096
    assert {"Name": "fsize", "Soft": most, "Hard": most} in checked["HostConfig"]["Ulimits"]
    assert checked["Labels"]["aenv.storage-bytes"] == str(size)
    assert limited["HostConfig"]["StorageOpt"] == {"size": str(size)}
    assert usual["HostConfig"]["StorageOpt"] == {"size": str(16 << 30)}
    assert body_of({}, disk_bytes=7)["Labels"]["aenv.storage-bytes"] == "7"
    for body in (limited, usual, closed):
        assert "aenv.storage-bytes" not in body["Labels"]
        assert [limit["Name"] for limit in body["HostConfig"]["Ulimits"]] == ["nofile"]
    for body in (checked, closed):
        assert "StorageOpt" not in body["HostConfig"]

    def missing(deploy: dict[str, Any], **fields: Any) -> list[str]:
        facts = isolation(spec({"network": "none", **deploy}), plan(**fields))
        return [item for item in facts.missing if item.startswith("storage")]

    for wanted in (deploy, {}):
        assert "checked every few seconds" in missing(wanted)[0]
        assert missing(wanted, daemon=quota) == []
    assert missing({**deploy, "container": {"readOnlyRoot": True}}) == []


def test_a_file_in_a_storage_may_be_larger_than_the_limit_of_the_images_directories() -> None:
    mount = StorageMount(name="aenv-s", uid="0" * 16, mount_path="/data", size_bytes=1)
    storage = LocalDirectory(Path("/s/data"), Path("/s/lock"))
    body = container_body(spec({"network": "none"}, storage=mount), plan(storage=storage))
    assert body["Labels"]["aenv.storage-bytes"] == str(16 << 30)
    assert [limit["Name"] for limit in body["HostConfig"]["Ulimits"]] == ["nofile"]


def test_the_image_of_a_project() -> None:
    def reference(default: str | None = None, **fields: Any) -> str:
        config = EnvironmentConfig.model_validate({"name": "x", **fields})
        return reference_of(config, default)

    built = [{"type": "image", "content": "x:1", "digest": "sha256:2"}]
    named = {"container": {"image": "y:1"}}
    assert reference("z", artifacts=built, deployConfig=named) == "y:1"
    assert reference("z", artifacts=built) == "sha256:2"
    assert reference("z", artifacts=[{"type": "image", "content": "x:1"}]) == "x:1"
    assert reference("z") == "z"
    with pytest.raises(ConfigError, match=r"x@1\.0\.0 has no image"):
        reference()


def test_the_name_of_a_kit_identifies_python_and_runtime() -> None:
    assert str(ImagePython((3, 12), "aarch64", "musl")) == "3.12-aarch64-musl"
    assert not ImagePython((3, 12), "aarch64", "musl").is_ours
    assert runtime_bundle.fingerprint() == runtime_bundle.fingerprint()


def test_the_runtime_for_containers_is_only_the_runtime_package(tmp_path: Path) -> None:
    runtime_bundle.copy_runtime(tmp_path)
    (package,) = tmp_path.iterdir()
    assert {path.name for path in package.iterdir()} == {"__init__.py", "runtime"}
    assert (package / "runtime" / "shim" / "aenv" / "__init__.py").is_file()


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:2375", "ssh://x", "/var/run/docker.sock"])
def test_a_remote_daemon_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="not a Unix socket"):
        socket_path(address)


def test_references_are_split_at_their_tag() -> None:
    assert split_tag("localhost:5000/a/b:1") == ("localhost:5000/a/b", "1")
    assert split_tag("localhost:5000/a/b") == ("localhost:5000/a/b", "latest")


def sidecar_plan() -> SidecarPlan:
    return SidecarPlan(
        name="aenv-x-sidecar",
        image=image(id="sha256:2", path="/bin", directory="/testbed"),
        bundle=Path("/carried"),
    )


def test_a_sidecar_has_the_limits_of_the_main_container_and_none_of_its_secrets() -> None:
    sidecar = sidecar_plan()
    planned = plan(sidecar=sidecar)
    container = {"capAdd": ["NET_RAW"], "pids": 64}
    asked = spec(
        {"network": "none", "memory": "1G", "container": container},
        environment_variables={"KEY": "secret"},
    )
    body = sidecar_body(asked, planned, sidecar)
    host = body["HostConfig"]
    assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], [])
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert (host["Memory"], host["PidsLimit"]) == (1 << 30, 64)
    assert host["NetworkMode"] == "container:aenv-x"
    targets = {mount["Target"]: mount.get("ReadOnly") for mount in host["Mounts"]}
    bundle = {f"/.aenv/{part}": True for part in ("runtime", "lib", "python")}
    assert targets == {
        "/.aenv": True,
        "/.aenv/run": True,
        "/shared": None,
        **bundle,
        **dict.fromkeys(ETC, True),
    }
    assert variables(body).keys() == {"AENV_INSTANCE_ID", "WORK_SHARE", "PATH"}
    assert body["WorkingDir"] == "/testbed"
    assert "Hostname" not in body, "the daemon refuses it with a joined network"
    assert "NetworkDisabled" not in body, "it would have no network to join"


def test_a_sidecar_is_restricted_as_its_main_container_is() -> None:
    """Invariant 7: it differs by its user, its capabilities, its mounts and the joined network."""
    sidecar = sidecar_plan()
    container = {"capAdd": ["NET_RAW"], "sidecarCapAdd": ["CHOWN"], "readOnlyRoot": True}
    asked = spec({"network": "none", "cpu": "1", "memory": "1G", "container": container})
    planned = plan(sidecar=sidecar)
    body = sidecar_body(asked, planned, sidecar)
    own = {"NetworkMode", "Mounts", "CapAdd", "Tmpfs"}
    main = container_body(asked, planned)["HostConfig"]
    assert {k: v for k, v in body["HostConfig"].items() if k not in own} == {
        k: v for k, v in main.items() if k not in own
    }
    assert body["HostConfig"]["CapAdd"] == ["CHOWN"]
    assert body["User"] == "0:0", "not the main container's, to which its files do not belong"
    assert set(body["HostConfig"]["Tmpfs"]) == {"/dev/shm", "/tmp"}
    (shared,) = [m for m in body["HostConfig"]["Mounts"] if m["Target"] == "/shared"]
    driver = shared["VolumeOptions"]["DriverConfig"]["Options"]
    assert {"nosuid", "nodev", f"size={1 << 30}"} <= set(driver["o"].split(","))
    assert "nr_inodes=" in driver["o"]
    assert shared["VolumeOptions"]["Labels"] == {"aenv.scope": "s"}, "the janitor removes it"


@pytest.mark.parametrize(
    ("user", "is_reported"),
    [("", True), ("0", True), ("root", True), ("nonroot", True), ("1000:1000", False)],
)
def test_a_sidecar_that_may_be_root_is_reported(user: str, is_reported: bool) -> None:
    sidecar = SidecarPlan("aenv-x-sidecar", image(user=user), Path("/carried"))
    facts = isolation(spec({"network": "none"}), plan(sidecar=sidecar))
    own = sidecar_body(spec({}), plan(sidecar=sidecar), sidecar)["User"]
    assert any(f"its sidecar runs as {own}" in row for row in facts.missing) == is_reported


def test_main_container_and_sidecar_differ_by_their_labels() -> None:
    sidecar = sidecar_plan()
    planned = plan(sidecar=sidecar)
    asked = spec({"network": "none"})
    main_labels = container_body(asked, planned)["Labels"]
    sidecar_labels = sidecar_body(asked, planned, sidecar)["Labels"]
    assert (main_labels["aenv.instance"], "aenv.sidecar-of" in main_labels) == (
        "x-00000001", False,
    )  # fmt: skip
    assert "aenv.instance" not in sidecar_labels
    assert sidecar_labels["aenv.sidecar-of"] == "x-00000001"
    assert main_labels["aenv.volume"] == sidecar_labels["aenv.volume"] == "aenv-x-shared"
    assert "aenv.volume" not in body_of({})["Labels"]


def test_a_container_with_its_own_kernel_reads_a_key_and_has_no_socket() -> None:
    runtime = OciRuntime("runsc", has_own_kernel=True)
    body = body_of({}, runtime=runtime)
    assert "NetworkDisabled" not in body, "the daemon sets up its loopback"
    assert body["OpenStdin"]
    assert body["StdinOnce"]
    assert "/.aenv/run" not in [mount["Target"] for mount in body["HostConfig"]["Mounts"]]
    assert body["Entrypoint"][-1].endswith("main(keyed=True)")
    assert "aenv.link" in body["Labels"]
    usual = body_of({})
    assert "OpenStdin" not in usual
    assert "aenv.link" not in usual["Labels"]
    sidecar = sidecar_plan()
    planned = plan(sidecar=sidecar, runtime=runtime)
    beside = sidecar_body(spec({"network": "none"}), planned, sidecar)
    assert beside["OpenStdin"]
    assert beside["Entrypoint"][-1].endswith(", keyed=True)")


def test_the_facts_about_a_container_with_its_own_kernel_claim_no_more_than_holds() -> None:
    planned = plan(runtime=OciRuntime(has_own_kernel=True))
    facts = isolation(spec({"network": "none"}), planned)
    assert not facts.seccomp
    assert "open files" not in facts.limits
    assert any(item.startswith("open files") for item in facts.missing)
    assert "it ends above that" in facts.limits["processes"]


def test_volumes_of_an_image_are_checked_whatever_the_daemon_limits() -> None:
    """Invariant 7: no quota of the daemon counts them, and no read-only root covers them."""
    quota, kept = DaemonFeatures(disk_quota=True), image(volumes=("/data",))
    limited = {"ephemeralStorage": "10M"}
    closed = {**limited, "container": {"readOnlyRoot": True}}
    for deploy in (limited, closed):
        body = body_of(deploy, image=kept, daemon=quota)
        assert body["Labels"]["aenv.storage-bytes"] == str(10 << 20)
        assert "fsize" in {limit["Name"] for limit in body["HostConfig"]["Ulimits"]}
        assert "aenv.storage-bytes" not in body_of(deploy, daemon=quota)["Labels"]
    beside = SidecarPlan("aenv-x-sidecar", kept, Path("/carried"))
    assert "aenv.storage-bytes" in body_of(limited, sidecar=beside, daemon=quota)["Labels"]
