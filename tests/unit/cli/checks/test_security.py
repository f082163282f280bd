"""What ``aenv doctor --security`` concludes from files, sockets, cgroups and settings."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.cli.checks import security
from aenv_ray.config import Settings
from aenv_ray.findings import Verdict
from aenv_ray.local_fabric import LocalFabric, Phase
from aenv_ray.policy import STRICT, Policy, policy_of

RUNC = {"Runtimes": {"runc": {"path": "runc"}}, "SecurityOptions": ["name=seccomp,profile=default"]}


def fabric_at(url: str) -> LocalFabric:
    return LocalFabric(
        id="a", phase=Phase.UP, url=url, mcp_url=url, owns_ray=False, started_at=0.0, user="me"
    )


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a directory that every user can enter."""
    with tempfile.TemporaryDirectory(prefix="ae-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_file_that_others_can_read_is_named(shared: Path) -> None:
    secret = shared / "up.json"
    secret.write_text("token")
    secret.chmod(0o644)
    found = security.files([secret, shared / "missing"])
    assert found.verdict is Verdict.FAILED
    assert str(secret) in found.found
    assert found.mend == f"chmod -R go= {secret}"
    secret.chmod(0o600)
    assert security.files([secret]).verdict is Verdict.OK


def test_a_closed_directory_protects_what_is_in_it(shared: Path) -> None:
    closed = shared / "closed"
    closed.mkdir(mode=0o700)
    inside = closed / "file"
    inside.write_text("")
    inside.chmod(0o666)
    assert security.files([inside]).verdict is Verdict.OK


def test_a_daemon_that_every_user_reaches_fails(shared: Path) -> None:
    path = shared / "docker.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0o666)
        assert security.docker_socket(f"unix://{path}").verdict is Verdict.FAILED
        path.chmod(0o660)
        assert security.docker_socket(f"unix://{path}").verdict is Verdict.OK
    assert security.docker_socket("tcp://10.0.0.1:2375").verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("info", "runtime", "verdict"),
    [
        (RUNC, None, Verdict.WARNING),
        (RUNC | {"SecurityOptions": ["name=seccomp", "name=userns"]}, None, Verdict.OK),
        (RUNC | {"SecurityOptions": []}, None, Verdict.FAILED),
        (RUNC | {"Runtimes": {"runsc": {"path": "/usr/bin/runsc"}}}, "runsc", Verdict.OK),
    ],
)
def test_a_daemon_is_judged_by_kernel_users_and_seccomp(
    info: dict[str, Any], runtime: str | None, verdict: Verdict
) -> None:
    assert security.daemon(info, runtime).verdict is verdict


@pytest.mark.parametrize(
    ("controllers", "found"),
    [
        ("memory pids", "delegated: "),
        ("", "no controllers"),
        (None, "not mounted"),
        ("hugetlb", "without the memory controller AENV_CGROUP cannot be used"),
    ],
)
def test_cgroups_are_reported(controllers: str | None, found: str, tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "a.service"
    group.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/a.service\n")
    if controllers is not None:
        for path in (group, group.parent):
            (path / "cgroup.controllers").write_text(f"{controllers}\n")
    assert found in security.cgroups(tmp_path / "cgroup", own).found


def test_kernel_memory_that_no_limit_counts_is_reported(tmp_path: Path) -> None:
    queue = tmp_path / "wmem_default"
    queue.write_text("212992\n")
    measured = security.kernel_memory({"memory": "64 MiB in total (the launcher looks)"}, queue)
    assert (measured.verdict, "1664 MiB" in measured.found) == (Verdict.WARNING, True)
    assert security.kernel_memory({}, tmp_path / "hidden").found == measured.found
    counted = security.kernel_memory({"memory": "64 MiB in total (cgroup)"}, queue)
    assert counted.verdict is Verdict.OK


def test_the_policy_is_compared_with_the_strict_default() -> None:
    verdicts = [
        security.policy_findings(policy)[0].verdict
        for policy in (STRICT, STRICT.model_copy(update={"networks": ("host",)}), Policy())
    ]
    assert verdicts == [Verdict.OK, Verdict.WARNING, Verdict.FAILED]
    opened = policy_of(Settings(policy="open"), behind_gateway=True)
    assert security.policy_findings(opened)[0].verdict is Verdict.FAILED
    given = policy_of(Settings(allow_networks="host,none", allow_images="*"), behind_gateway=True)
    policy, registries, _ = security.policy_findings(given)
    assert "networks: host" in policy.found
    assert registries.verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"allow_chat_models": "*"}, "chat_models: *"),
        ({"max_ttl": "30d"}, "2,592,000 seconds of TTL (strict: 604,800)"),
        ({"max_memory": "512g"}, "549,755,813,888 bytes of memory (strict: 274,877,906,944)"),
        ({"max_cpu": "64.5"}, "64.5 cores (strict: 64)"),
        ({"max_cpu": "4096"}, "4,096 cores (strict: 64)"),
        ({"max_pids": "1000000"}, "1,000,000 processes (strict: 4,096)"),
    ],
)
def test_a_setting_beyond_the_strict_default_is_named(given: dict[str, str], words: str) -> None:
    found = security.policy_findings(policy_of(Settings(**given), behind_gateway=True))[0]
    assert (found.verdict, words in found.found) == (Verdict.WARNING, True), found


@pytest.mark.parametrize(
    ("images", "verdict", "words"),
    [
        ("docker.io/acme/*", Verdict.OK, "docker.io/acme/*"),
        ("none", Verdict.OK, "none"),
        ("*", Verdict.WARNING, "any image"),
    ],
)
def test_the_sidecars_that_may_be_root_are_named(images: str, verdict: Verdict, words: str) -> None:
    policy = policy_of(Settings(allow_root_sidecars=images), behind_gateway=True)
    (found,) = [row for row in security.policy_findings(policy) if row.name == "root sidecars"]
    assert (found.verdict, words in found.found) == (verdict, True)


@pytest.mark.parametrize(
    ("url", "verdict"),
    [
        (None, Verdict.OK),
        ("redis://:secret@127.0.0.1:6379/0", Verdict.OK),
        ("rediss://:secret@redis.example:6379/0", Verdict.OK),
        ("redis://:secret@redis.example:6379/0", Verdict.WARNING),
        ("redis://redis.example:6379/0", Verdict.FAILED),
    ],
)
def test_the_hubs_redis_needs_a_password_and_encryption(url: str | None, verdict: Verdict) -> None:
    found = security.redis(url)
    assert found.verdict is verdict
    assert "secret" not in found.found


@pytest.mark.parametrize(("host", "verdict"), [("127.0.0.1", "ok"), ("0.0.0.0", "failed")])
def test_a_gateway_for_other_machines_needs_tls(host: str, verdict: str) -> None:
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        (found,) = security.gateway_address(fabric_at(f"http://127.0.0.1:{port}"))
        assert found.verdict == verdict
        assert any(row[1:] == (host, port) for row in ray_api.listening())


@pytest.mark.parametrize(
    ("modes", "verdict"),
    [
        (["token", "token"], Verdict.WARNING),
        (["token", "disabled"], Verdict.FAILED),
        (["", ""], Verdict.FAILED),
    ],
)
def test_every_ray_needs_a_token(
    modes: list[str], verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a token does not guard another one of the same user."""
    rays = [
        (pid, ["/ray/raylet"], {"RAY_AUTH_MODE": mode} if mode else {})
        for pid, mode in enumerate(modes, 1)
    ]
    monkeypatch.setattr(ray_api, "all_processes", lambda: rays)
    ports = [(pid, "0.0.0.0", 6000 + pid) for pid, *_ in rays]
    monkeypatch.setattr(ray_api, "listening", lambda: [*ports, (1, "127.0.0.1", 7000)])
    (found,) = security.ray_addresses(None)
    assert found.verdict is verdict
    assert ("6001" in found.found) == (modes[0] != "token" or verdict is Verdict.WARNING)
    assert "7000" not in found.found


def test_without_a_gateway_nothing_fails(tmp_path: Path) -> None:
    """Whoever publishes an environment also runs it."""
    settings = Settings(
        data_dir=tmp_path, redis_url="redis://redis.example:6379/0", allow_engines="fake"
    )
    by_gateway = {
        behind: {
            row.name: row.verdict
            for row in security.findings(settings, None, behind_gateway=behind)
        }
        for behind in (False, True)
    }
    assert by_gateway[True]["hub's Redis"] is Verdict.FAILED
    assert by_gateway[False]["hub's Redis"] is Verdict.WARNING
    assert Verdict.FAILED not in by_gateway[False].values()
