"""What the doctor reports about the Docker daemon and its OCI runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aenv_ray.cli.checks import node
from aenv_ray.cli.checks.node import check_docker_runtimes
from aenv_ray.config import Settings
from aenv_ray.findings import Finding, Verdict

INFO = {
    "DefaultRuntime": "runc",
    "Runtimes": {
        "runc": {"path": "runc"},
        "io.containerd.runc.v2": {"path": "runc"},
        "runsc": {"path": "/opt/runsc"},
    },
}


def installed(*programs: str) -> Any:
    return lambda name: name if name in programs else None


def test_it_names_the_runtimes_and_which_have_their_own_kernel() -> None:
    found = check_docker_runtimes(INFO, None, installed("runc", "/opt/runsc"))
    assert found.verdict is Verdict.OK
    assert found.found == "runc (default), runsc (its own kernel)"


def test_a_program_that_the_daemon_does_not_know_yet_is_named() -> None:
    found = check_docker_runtimes(INFO, None, installed("runc", "/opt/runsc", "runsc", "crun"))
    assert found.found.endswith("; crun is installed and not registered")


def test_a_registered_program_that_is_missing_is_a_warning() -> None:
    found = check_docker_runtimes(INFO, None, installed("runc"))
    assert found.verdict is Verdict.WARNING
    assert "/opt/runsc is not installed" in found.found
    assert "runsc" in found.mend


@pytest.mark.parametrize("path", ["kata", None])
def test_a_wanted_runtime_that_the_daemon_does_not_have_fails(path: str | None) -> None:
    found = check_docker_runtimes(
        INFO, "kata", installed(*filter(None, ("runc", "/opt/runsc", path)))
    )
    assert found.verdict is Verdict.FAILED
    assert "it has runc" in found.found
    assert f"--add-runtime kata={path or '/path/to/it'}" in found.mend


async def find_docker(tmp_path: Path, **settings: Any) -> Finding:
    """Return the finding about a daemon that does not answer."""
    chosen = {"docker_host": f"unix://{tmp_path}/no.sock", **settings}
    given = Settings(data_dir=tmp_path, runtime_dir=tmp_path, docker_config=tmp_path, **chosen)
    (found,) = await node._docker(given)
    return found


async def test_a_pod_without_docker_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = f"unix://{tmp_path}/no.sock"
    monkeypatch.setattr(node, "_DEFAULT_DAEMON", absent)
    in_a_pod = await find_docker(tmp_path, is_in_kuberay=True)
    assert in_a_pod.verdict is Verdict.OK
    assert not in_a_pod.name.startswith("engine ")  # it does not count as one that works
    assert (await find_docker(tmp_path)).verdict is Verdict.FAILED
    monkeypatch.undo()
    assert (await find_docker(tmp_path, is_in_kuberay=True)).verdict is Verdict.FAILED
