"""AEnvironment's contract at the gateway, on a real hub and a real host, and publishing."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from pathlib import Path

import httpx
import pytest

from aenv_ray.serve.gateway.routes import environments as routes_environments
from tests.contract.gateway.gateway_bench import TOOLS, Bench, created

pytestmark = pytest.mark.redis


# --- AEnvironment's contract ---------------------------------------------------------------------


async def test_aenvironments_client_creates_an_instance(ann: httpx.AsyncClient) -> None:
    """Its client reads these fields, all of them text, and polls until ``Running``."""
    made = await created(
        ann, ttl="10m", arguments=[], datasource="", labels={"a": "b"},
        environment_variables={"envNAME": "probe", "SECRET": "hunter2"},
    )  # fmt: skip
    assert made["status"] == "Running"
    assert re.fullmatch(r"[a-z0-9]{1,63}(\.[a-z0-9]{1,63})*", made["ip"])  # as a host's name
    assert made["ip"] == made["ip"].lower()
    assert made["env"]["name"] == "probe"
    assert made["env"]["version"] == "1.0.0"
    assert made["labels"] == {"a": "b"}
    assert made["mcp_url"] == f"http://127.0.0.1:8081/instances/{made['id']}/mcp"
    again = await ann.get(f"/env-instance/{made['id']}")
    assert again.json()["data"]["ip"] == made["ip"]
    for reference in ("*", "probe", "probe@1.0.0"):
        listed = (await ann.get(f"/env-instance/{reference}/list")).json()["data"]
        assert [one["id"] for one in listed] == [made["id"]]
        assert listed[0]["ip"] == ""  # the capability is in no listing
        for fact in ("status", "description", "digest", "archive", "owner", "created_at"):
            assert listed[0]["env"][fact] == made["env"][fact]
    assert (await ann.get("/env-instance/probe@2.0.0/list")).json()["data"] == []
    ended = await ann.delete(f"/env-instance/{made['id']}")
    assert ended.json()["success"] is True
    assert (await ann.get(f"/env-instance/{made['id']}")).status_code == 404
    assert "hunter2" not in again.text


async def test_an_unknown_environment_is_404_and_a_path_is_refused(
    ann: httpx.AsyncClient,
) -> None:
    assert (await ann.post("/env-instance", json={"envName": "none@1"})).status_code == 404
    assert (await ann.post("/env-instance", json={"envName": "../probe"})).status_code == 400
    assert (
        await ann.post("/env-instance", json={"envName": "probe", "ttl": "x"})
    ).status_code == 400


async def test_a_built_in_environment_is_reported_as_built_in(ann: httpx.AsyncClient) -> None:
    answer = await ann.get("/env/mini-terminal/1.0.0")
    assert answer.status_code == 404
    assert "is built in" in answer.json()["message"]
    assert (await ann.get("/env/mini-terminal/1.0.0/exists")).json()["data"]["exists"] is False
    for path in ("9.9.9", "9.9.9/status", "9.9.9/functions"):
        error = (await ann.get(f"/env/mini-terminal/{path}")).json()["error"]
        assert error["message"] == "environment 'mini-terminal' has no version '9.9.9'"
        assert error["hint"] == "use mini-terminal@1.0.0"


async def test_environments_are_listed_as_envhub_lists_them(ann: httpx.AsyncClient) -> None:
    listed = await ann.get("/env/", params={"limit": 100, "offset": 0})
    assert listed.headers["x-total-count"] == "1"
    (entry,) = listed.json()["data"]
    assert (entry["id"], entry["status"], entry["status_name"]) == ("probe-1.0.0", 6, "Ready")
    assert (await ann.get("/env/probe/1.0.0")).json()["data"]["name"] == "probe"
    assert (await ann.get("/env/probe")).json()["data"]["version"] == "1.0.0"
    assert (await ann.get("/env/probe/1.0.0/status")).json()["data"] == {"status": "Ready"}
    exists = (await ann.get("/env/probe/9.9.9/exists")).json()["data"]
    assert exists["exists"] is False
    assert (await ann.get("/env/probe/9.9.9")).status_code == 404
    assert (await ann.get("/env/?text=nothing")).json()["data"] == []
    assert (await ann.get("/env/?unknown=1")).status_code == 400


async def test_an_offset_skips_rows_for_aenvironments_cli(
    ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `list -o N`; over more rows than the hub gives at once, too."""
    for n in range(5):
        await ann.post("/env/", json={"name": f"many-{n}", "version": "1.0.0"})
    every = [one["name"] for one in (await ann.get("/env/")).json()["data"]]
    monkeypatch.setattr(routes_environments, "_SKIP_AT_ONCE", 2)
    for offset in range(len(every) + 2):
        page = await ann.get(f"/env/?limit=2&offset={offset}")
        assert [one["name"] for one in page.json()["data"]] == every[offset : offset + 2]
        assert page.headers["x-total-count"] == str(len(every))
        assert ("x-next-cursor" in page.headers) == (offset + 2 < len(every))


async def test_a_released_version_stays(ann: httpx.AsyncClient, bob: httpx.AsyncClient) -> None:
    assert (await bob.post("/env/probe/1.0.0/release")).status_code == 403
    assert (await ann.post("/env/probe/1.0.0/release")).json()["data"] is True
    assert (await ann.get("/env/probe/1.0.0/status")).json()["data"] == {"status": "Released"}


async def test_a_version_in_use_cannot_be_deleted(ann: httpx.AsyncClient) -> None:
    made = await created(ann)
    assert (await ann.delete("/env/probe/1.0.0")).status_code == 409
    await ann.delete(f"/instances/{made['id']}")
    assert (await ann.delete("/env/probe/1.0.0")).status_code == 200


# --- publishing ----------------------------------------------------------------------------------


def an_archive(
    root: Path, name: str = "mine", version: str = "1.0.0", mode: str = "w:gz", **more: str
) -> bytes:
    """Return an archive as AEnvironment's CLI makes it."""
    config = {"name": name, "version": version, "deployConfig": {"network": "none"}}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        files = {"config.json": json.dumps(config), "src/a.py": TOOLS, **more}
        for path, text in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def test_an_archive_is_uploaded_published_and_downloaded(
    ann: httpx.AsyncClient, root: Path
) -> None:
    archive = an_archive(root)
    digest = hashlib.sha256(archive).hexdigest()
    assert (await ann.head(f"/artifacts/{digest}")).status_code == 404
    assert (await ann.put(f"/artifacts/{'0' * 64}", content=archive)).status_code == 422
    kept = await ann.put(f"/artifacts/{digest}", content=archive)
    assert kept.json()["data"] == {"digest": digest, "size_bytes": len(archive)}
    head = await ann.head(f"/artifacts/{digest}")
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(archive)))
    assert (await ann.get(f"/artifacts/{digest}")).content == archive
    entry = (await ann.post("/publish", json={"archive": digest})).json()["data"]
    assert (entry["name"], entry["owner"]) == ("mine", "ann")
    again = (await ann.post("/publish", json={"archive": digest})).json()["data"]
    assert again["created_at"] == entry["created_at"]
    assert (await ann.post("/publish", json={"archive": "1" * 64})).status_code == 404


async def test_an_archive_with_a_secret_is_refused_and_not_kept(
    ann: httpx.AsyncClient, bob: httpx.AsyncClient, root: Path
) -> None:
    """Invariant 10. With consent it is published, and later refusals do not remove it."""
    sent = an_archive(root, **{".env": "TOKEN=hunter2"})
    digest = hashlib.sha256(sent).hexdigest()
    await ann.put(f"/artifacts/{digest}", content=sent)
    refused = await ann.post("/publish", json={"archive": digest})
    assert (refused.status_code, "hunter2" in refused.text) == (400, False)
    assert (await ann.head(f"/artifacts/{digest}")).status_code == 404
    await ann.put(f"/artifacts/{digest}", content=sent)
    wish = {"archive": digest, "allow_secrets": [".env"]}
    entry = (await ann.post("/publish", json=wish)).json()["data"]
    kept = entry["archive"]
    content = (await ann.get(f"/artifacts/{kept}")).content
    assert (await bob.post("/publish", json={"archive": kept})).status_code == 404
    await bob.put(f"/artifacts/{kept}", content=content)
    assert (await bob.post("/publish", json={"archive": kept})).status_code == 400
    assert (await ann.head(f"/artifacts/{kept}")).status_code == 200


async def test_aenvironments_push_with_the_hubs_storage(
    bench: Bench, ann: httpx.AsyncClient, bob: httpx.AsyncClient, root: Path
) -> None:
    """It signs, uploads without a token, and sends its config.json."""
    config = {"name": "mine", "version": "1.0.0", "deployConfig": {"network": "none"}, "x": 1}
    url = (await ann.post("/env/mine/1.0.0/sign?style=write")).json()["data"]
    async with bench.client(None) as nobody:
        sent = await nobody.put(url, content=an_archive(root))
        assert sent.status_code == 200
        other = url.replace("/mine/", "/other/")
        assert (await nobody.put(other, content=b"")).status_code == 403
        # What another owner uploads for the same version does not come between.
        foreign = (await bob.post("/env/mine/1.0.0/sign?style=write")).json()["data"]
        assert (await nobody.put(foreign, content=b"none")).status_code == 200
    assert (await ann.post("/env/", json=config)).json()["data"] is True
    entry = (await ann.get("/env/mine/1.0.0")).json()["data"]
    assert entry["archive_bytes"] > 0
    assert (await bob.post("/env/mine/1.0.0/sign?style=read")).status_code == 404
    await ann.put("/names/mine/grants/bob", json={"right": "use"})
    read = (await bob.post("/env/mine/1.0.0/sign?style=read")).json()["data"]
    async with bench.client(None) as nobody:
        assert len((await nobody.get(read)).content) == entry["archive_bytes"]


async def test_aenvironments_push_without_an_archive(ann: httpx.AsyncClient) -> None:
    config = {"name": "bare", "version": "1.0.0", "codeUrl": "/home/ann/bare.zip", "x": 1}
    assert (await ann.post("/env", json=config)).json()["data"] is True
    assert (await ann.put("/env/bare/1.0.0", json=config)).status_code == 200
    changed = config | {"codeUrl": "/elsewhere"}
    assert (await ann.put("/env/bare/1.0.0", json=changed)).status_code == 409
    assert (await ann.put("/env/bare/2.0.0", json=config)).status_code == 400
    assert (await ann.post("/env/", json={"name": "No Name"})).status_code == 400
    assert (await ann.get("/env/bare")).json()["data"]["code_url"] == "/home/ann/bare.zip"
