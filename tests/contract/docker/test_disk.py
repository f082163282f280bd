"""Writes to an image's directories are limited: by quota, or by checks of the janitor."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.docker.engine import DockerEngine
from aenv_ray.errors import SandboxLost
from aenv_ray.testing.contract_bench import Bench, call, eventually, execute
from tests.conftest import require
from tests.contract.docker.docker_node import DockerNode, base_image, data_dir, shell_image
from tests.contract.docker.own_daemon import OwnDaemon
from tests.contract.engines import engine_on, new_host

pytestmark = pytest.mark.docker

LIMIT_MIB = 64
MOST_MIB = 512
"""What the tools write at most if nothing stops them; with much more to write back, a daemon waits
minutes for each of its own small files."""
FILL = f"""
import errno
from aenv_ray.runtime import register_tool

PIECE = bytes(1 << 20)


@register_tool
def fill_one_file() -> str:
    with open("/var/tmp/one", "wb", buffering=0) as file:
        for written in range({MOST_MIB}):
            try:
                file.write(PIECE)
            except OSError as exc:
                return f"{{errno.errorcode[exc.errno]}} after {{file.tell() >> 20}} MiB"
    return "everything was written"


@register_tool
def fill_many_files() -> str:
    for number in range({MOST_MIB} // 16):
        with open(f"/var/tmp/{{number}}", "wb", buffering=0) as file:
            for _ in range(16):
                try:
                    file.write(PIECE)
                except OSError as exc:
                    return errno.errorcode[exc.errno]
    while True:  # what ends it ends it here at the latest
        pass
"""


def filling(bench: Bench, **deploy: object) -> Path:
    fields = {"network": "none", "ephemeralStorage": f"{LIMIT_MIB}M", **deploy}
    return bench.project({"tools.py": FILL}, {"deployConfig": fields})


@pytest.fixture
async def bench(docker_node: DockerNode, tmp_path: Path) -> AsyncIterator[Bench]:
    async with engine_on(docker_node) as engine:
        yield Bench(engine, tmp_path)
    await eventually(lambda: not docker_node.left_over(), "nothing is left")


async def test_a_single_file_cannot_exceed_the_limit(bench: Bench) -> None:
    sandbox = await bench.start(filling(bench))
    stopped = (await call(sandbox, "fill_one_file")).data
    assert stopped in {f"EFBIG after {LIMIT_MIB} MiB", f"ENOSPC after {LIMIT_MIB - 1} MiB"}
    assert f"{LIMIT_MIB} MiB" in sandbox.isolation.limits["image's directories"]


async def test_a_sandbox_that_writes_too_much_ends(bench: Bench) -> None:
    """Without a quota the janitor protects the disk of the node."""
    sandbox = await bench.start(filling(bench))
    if "quota" in sandbox.isolation.limits["image's directories"]:
        pytest.skip("the daemon has quotas")
    assert any("are checked every few seconds" in item for item in sandbox.isolation.missing)
    with pytest.raises(SandboxLost, match=rf"limit {LIMIT_MIB} MiB: deployConfig\.ephemeralSt"):
        await call(sandbox, "fill_many_files")


async def test_a_project_without_a_limit_has_that_of_the_node(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    """Invariant 7: no container fills the disk of the node."""
    async with engine_on(docker_node, disk_bytes=LIMIT_MIB << 20) as engine:
        bench = Bench(engine, tmp_path)
        sandbox = await bench.start(filling(bench, ephemeralStorage=None))
        if "quota" in sandbox.isolation.limits["image's directories"]:
            pytest.skip("the daemon has quotas")
        with pytest.raises(SandboxLost, match=rf"limit {LIMIT_MIB} MiB: .*AENV_DOCKER_DISK"):
            await call(sandbox, "fill_many_files")


async def test_a_sidecar_is_checked_as_well(bench: Bench) -> None:
    source = (
        "from aenv_ray.runtime import register_tool, sidecar\n"
        "@register_tool\ndef fill() -> str:\n"
        f"    return sidecar.exec('i=0; while [ $i -lt {MOST_MIB // 16} ]; do i=$((i+1)); "
        "head -c 16777216 /dev/zero >/srv/$i || exit 1; done; sleep 60').text()\n"
    )
    deploy = {"network": "none", "ephemeralStorage": "64M", "podTemplate": "DualContainer"}
    project = bench.project({"tools.py": source}, {"deployConfig": deploy})
    pair = await bench.start(project, datasource=shell_image())
    with pytest.raises(SandboxLost, match=r"its sidecar: it wrote .* MiB to its image's"):
        await call(pair, "fill")


async def test_a_read_only_root_needs_no_check(bench: Bench) -> None:
    sandbox = await bench.start(filling(bench, container={"readOnlyRoot": True}))
    assert not any(item.startswith("storage") for item in sandbox.isolation.missing)
    assert "image's directories" not in sandbox.isolation.limits
    full = await execute(
        sandbox, f"touch /var/tmp/x; head -c {2 * LIMIT_MIB << 20} /dev/zero >/tmp/x"
    )
    assert full.exit_code != 0
    assert b"Read-only file system" in full.stderr
    assert b"No space left on device" in full.stderr


# --- quotas --------------------------------------------------------------------------------------


@pytest.fixture
def quota_daemon() -> Iterator[OwnDaemon]:
    """Yield a daemon whose directory is on xfs with project quotas."""
    require("docker", os.geteuid() == 0, "a daemon of the test's own needs root")
    require("xfs", shutil.which("mkfs.xfs") is not None, "xfsprogs is not installed")
    root = Path(tempfile.mkdtemp(prefix="ae-", dir="/tmp"))
    disk, data = root / "disk", root / "data"
    data.mkdir()
    with disk.open("wb") as file:
        file.truncate(4 << 30)
    try:
        subprocess.run(["mkfs.xfs", "-q", str(disk)], check=True, capture_output=True)
        mounted = subprocess.run(
            ["mount", "-o", "loop,pquota", str(disk), str(data)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        require("xfs", mounted.returncode == 0, f"it cannot be mounted: {mounted.stderr}")
    except BaseException:
        shutil.rmtree(root)
        raise
    daemon = OwnDaemon(root, base_image())
    yield daemon
    daemon.end()


async def test_exceeding_a_quota_is_an_error_of_the_tool(
    quota_daemon: OwnDaemon, tmp_path: Path
) -> None:
    """With a quota, a full disk does not end the sandbox."""
    engine = DockerEngine(
        new_host(), runtime_dir=quota_daemon.root / "r", data_dir=data_dir(),
        scope=quota_daemon.root.name, owner_pid=os.getpid(), address=quota_daemon.address,
        image=base_image(),
    )  # fmt: skip
    bench = Bench(engine, tmp_path)
    sandbox = await bench.start(filling(bench))
    assert sandbox.isolation.limits["image's directories"] == f"{LIMIT_MIB} MiB (disk quota)"
    assert not any(item.startswith("storage") for item in sandbox.isolation.missing)
    assert (await call(sandbox, "fill_many_files")).data == "ENOSPC"
    used = (await execute(sandbox, "du -sm /var/tmp")).text().split()[0]
    assert LIMIT_MIB - 4 <= int(used) <= LIMIT_MIB
    await engine.stop([sandbox.instance_id])
    await engine.close()
