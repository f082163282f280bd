"""Storage that outlives sandboxes: on the process engine, with real mounts and real locks."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.node.local_storage import LocalStorage
from aenv_ray.errors import ConfigError, FabricUnavailable, SandboxStartFailed
from aenv_ray.project.storage import StorageMount, storage_name
from aenv_ray.runtime.system import storage_lock
from aenv_ray.testing.contract_bench import Bench, evaluate, eventually, execute
from tests.contract.process.node import Node

SOURCE = """
import os
from pathlib import Path
from aenv_ray.runtime import register_tool

KEPT = Path(os.environ.get("KEPT", "/home/admin/data"))
with open(KEPT / "log", "a") as log:
    log.write("start\\n")
AT_START = (KEPT / "log").read_text()


@register_tool
def note(text: str) -> str:
    with open(KEPT / "log", "a") as log:
        log.write(text + "\\n")
    return (KEPT / "log").read_text()


@register_tool
def at_start() -> str:
    return AT_START
"""


def a_storage(**fields: Any) -> StorageMount:
    given = {
        "name": storage_name("ann", secrets.token_hex(4)), "uid": secrets.token_hex(8),
        "mount_path": "/home/admin/data", "size_bytes": 1 << 30,
    }  # fmt: skip
    return StorageMount.model_validate(given | fields)


def keeper(bench: Bench) -> Path:
    return bench.project({"tools.py": SOURCE}, {"deployConfig": {"network": "none"}})


async def said(sandbox: Any, name: str, **arguments: Any) -> str:
    result = await sandbox.request(
        "tools/call", {"name": name, "arguments": arguments}, deadline_s=60.0
    )
    assert not result.get("isError"), result
    return str(result["structuredContent"]["result"])


@pytest.mark.namespaces
async def test_what_a_sandbox_keeps_outlives_it(walled: Bench) -> None:
    """Its code sees what an earlier one left, also when it is imported."""
    storage, project = a_storage(), keeper(walled)
    first = await walled.start(project, storage=storage)
    assert first.start_mode == "bare: it has storage"
    assert await said(first, "note", text="one") == "start\none\n"
    await walled.engine.stop([first.instance_id])
    again = storage.model_copy(update={"is_made": True})
    second = await walled.start(project, storage=again)
    assert await said(second, "at_start") == "start\none\nstart\n"
    (missing,) = [m for m in second.isolation.missing if m.startswith("storage: ")]
    assert "/home/admin/data" in missing
    assert "1Gi" in missing


@pytest.mark.namespaces
async def test_only_one_sandbox_at_a_time_uses_a_storage(walled: Bench) -> None:
    storage, project = a_storage(), keeper(walled)
    first = await walled.start(project, storage=storage)
    later = asyncio.create_task(walled.start(project, storage=storage))
    for text in ("one", "two", "three"):
        await said(first, "note", text=text)
    assert not later.done()
    await walled.engine.stop([first.instance_id])
    assert await said(await later, "at_start") == "start\none\ntwo\nthree\nstart\n"


@pytest.mark.namespaces
async def test_a_killed_sandbox_releases_its_storage(own_node: Node, tmp_path: Path) -> None:
    from aenv_ray.ids import HostId

    bench = Bench(own_node.engine(HostId("h")), tmp_path)
    try:
        storage, project = a_storage(), keeper(bench)
        first = await bench.start(project, storage=storage)
        os.kill(own_node.sandbox_pids()[0], 9)
        await eventually(lambda: first.end_cause, "its end is told", 60.0)
        second = await bench.start(project, storage=storage)
        assert await said(second, "at_start") == "start\nstart\n"
        await bench.engine.stop([second.instance_id])
    finally:
        await bench.engine.close()


@pytest.mark.namespaces
async def test_many_sandboxes_use_a_shared_storage(walled: Bench) -> None:
    storage, project = a_storage(is_shared=True), keeper(walled)
    one, two = [await walled.start(project, storage=storage) for _ in range(2)]
    await said(one, "note", text="one")
    assert await said(two, "note", text="two") == "start\nstart\none\ntwo\n"


@pytest.mark.namespaces
@pytest.mark.parametrize("path", ["/data", "/home/agent/kept/deep", "/tmp/kept", "/var/lib/kept"])
async def test_a_storage_is_mounted_at_the_requested_path(walled: Bench, path: str) -> None:
    storage, project = a_storage(mount_path=path), keeper(walled)
    variables = {"KEPT": path}
    for count in (1, 2):
        sandbox = await walled.start(project, storage=storage, environment_variables=variables)
        assert await said(sandbox, "at_start") == "start\n" * count
        await walled.engine.stop([sandbox.instance_id])


@pytest.mark.namespaces
async def test_a_storage_shows_nothing_of_the_node(walled: Bench, walled_node: Node) -> None:
    """A link that a sandbox creates there is not followed outside of it."""
    storage = a_storage()
    sandbox = await walled.start(storage=storage)
    hostile = "ln -s /etc /home/admin/data/link && ln -s / /home/admin/data/root && "
    hostile += "mkdir -p /home/admin/data/shut/in && chmod 0 /home/admin/data/shut"
    assert (await execute(sandbox, hostile)).exit_code == 0
    done = await execute(sandbox, "touch /home/admin/x; mknod /home/admin/data/null c 1 3; ls /.s*")
    assert done.stderr.count(b"Read-only") == 1
    assert done.stderr.count(b"not permitted") == 1
    root = walled_node.data_dir / "storage"
    assert str(root) not in await evaluate(
        sandbox, "import os; result = [os.path.realpath('/home/admin/data/root')]"
    )
    await walled.engine.stop([sandbox.instance_id])
    await walled.engine.delete_storage(storage)
    assert list((root / storage.name).glob("data-*")) == []
    assert Path("/etc/passwd").exists()
    await walled.engine.delete_storage(storage)  # gone already


@pytest.mark.namespaces
@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_storage_in_use_is_not_deleted(
    walled: Bench, walled_node: Node, is_shared: bool
) -> None:
    storage, project = a_storage(is_shared=is_shared), keeper(walled)
    sandbox = await walled.start(project, storage=storage)
    with pytest.raises(FabricUnavailable, match="still uses it"):
        LocalStorage(walled_node.data_dir / "storage").delete(storage, within_s=0.0)
    assert await said(sandbox, "note", text="alive") == "start\nalive\n"


@pytest.mark.namespaces
async def test_a_deleted_storage_comes_back_empty(walled: Bench) -> None:
    """Also while the template of the one before lives, which has that in view."""
    storage, project = a_storage(), keeper(walled)
    first = await walled.start(project, storage=storage)
    await walled.engine.stop([first.instance_id])
    await walled.engine.delete_storage(storage)
    again = storage.model_copy(update={"uid": secrets.token_hex(8)})
    second = await walled.start(project, storage=again)
    assert await said(second, "at_start") == "start\n"
    await walled.engine.stop([second.instance_id])
    third = await walled.start(project, storage=again)
    assert await said(third, "at_start") == "start\nstart\n"


@pytest.mark.namespaces
async def test_a_missing_storage_is_not_created_again(walled: Bench) -> None:
    with pytest.raises(FabricUnavailable, match="is not in"):
        await walled.start(storage=a_storage(is_made=True))


@pytest.mark.namespaces
async def test_a_mount_path_over_python_is_refused(walled: Bench) -> None:
    import sys

    for path in (sys.prefix, str(Path(sys.prefix).parent), f"{sys.prefix}/data"):
        with pytest.raises(ConfigError, match="overlaps"):
            await walled.start(storage=a_storage(mount_path=path))


async def test_without_namespaces_there_is_no_storage(open_node: Node, tmp_path: Path) -> None:
    from aenv_ray.ids import HostId

    bench = Bench(open_node.engine(HostId("h")), tmp_path)
    try:
        with pytest.raises(SandboxStartFailed, match="needs namespaces"):
            await bench.start(storage=a_storage())
    finally:
        await bench.engine.close()


def test_waiting_for_a_lock_of_another_times_out(tmp_path: Path) -> None:
    from aenv_ray.runtime.faults import ProjectLoadError

    (tmp_path / "lock").touch()
    lock = str(tmp_path / "lock")
    for _ in range(2):
        storage_lock.lock_storage(lock, is_shared=True)
    with pytest.raises(ProjectLoadError, match="another sandbox still uses the storage"):
        storage_lock.lock_storage(lock, is_shared=False, wait_s=0.0)


def test_a_storages_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    storage, elsewhere = a_storage(), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / storage.name).symlink_to(elsewhere)
    with pytest.raises(FabricUnavailable, match="cannot be created"):
        LocalStorage(tmp_path).open(storage)
    LocalStorage(tmp_path).delete(storage)
    assert list(elsewhere.iterdir()) == []
