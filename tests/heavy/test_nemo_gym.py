"""NeMo Gym: a resources server of ours, played by its own agent, and instances as its sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import runpy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec, SandboxStatus
from nemo_gym.sandbox.providers.base import SandboxCreateError
from nemo_gym.sandbox.providers.registry import get_provider_class, register_provider
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

import aenv_ray
from aenv_ray import trajectories
from aenv_ray.errors import ConfigError
from aenv_ray.integrations.nemo_gym import (
    AenvResourcesServer,
    AenvResourcesServerConfig,
    response_tools,
)
from aenv_ray.integrations.nemo_gym_sandbox import AenvProvider
from tests.fixtures.doc_blocks import doc_blocks
from tests.fixtures.killed_trainers import kill_once_it_acts
from tests.fixtures.listed_tools import ILLEGAL, TREE, arguments, listed_project

CORRIDOR = str(Path(__file__).parents[1] / "fixtures" / "projects" / "corridor")
EXAMPLE = (
    Path(__file__).parents[2] / "examples" / "integrations" / "trainers" / "nemo_gym_server.py"
)
ROW: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "Walk to the goal."}]},
    "verifier_metadata": {"aenv": {"id": "walk", "seed": 3}},
}
ANSWER = {
    "id": "r", "created_at": 0.0, "model": "m", "object": "response", "output": [],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
}  # fmt: skip


def made(
    tmp_path: Path, *, environment: str = CORRIDOR, only: list[str] | None = None
) -> AenvResourcesServer:
    config = AenvResourcesServerConfig(
        name="corridor", host="127.0.0.1", port=8000, entrypoint="app.py", only=only,
        environment=environment, pool={"out": str(tmp_path / "records.jsonl")},
    )  # fmt: skip
    head = BaseServerConfig(host="127.0.0.1", port=11000)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    return AenvResourcesServer(config=config, server_client=client)


@contextlib.asynccontextmanager
async def served(server: AenvResourcesServer) -> AsyncIterator[httpx.AsyncClient]:
    app = server.setup_webserver()
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client,
    ):
        yield client
    assert not aenv_ray.list_instances()


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with served(made(tmp_path, only=["step", "leave"])) as client:
        yield client


@pytest.fixture(scope="session", autouse=True)
def ended() -> Iterator[None]:
    yield
    aenv_ray.shutdown()


async def test_a_session_is_an_episode(http: httpx.AsyncClient, tmp_path: Path) -> None:
    early = await http.post("/step", json={"action": 1})
    assert (early.status_code, "no episode" in early.text) == (422, True)
    (await http.post("/seed_session", json=ROW)).raise_for_status()
    wrong = await http.post("/step", json={"action": 7})
    assert (wrong.status_code, "7 is no step" in wrong.text) == (422, True)
    unknown = await http.post("/nonsense", json={})
    assert (unknown.status_code, "there is no tool" in unknown.text) == (422, True)
    stepped = await http.post("/step", json={"action": 1})
    assert json.loads(stepped.text)["terminated"] is True
    verified = await http.post("/verify", json={**ROW, "response": ANSWER})
    verified.raise_for_status()
    told = verified.json()
    assert (told["reward"], told["void"], told["status"]) == (1.0, False, "completed")
    assert told["verifier_metadata"] == ROW["verifier_metadata"]
    [record] = trajectories.read(tmp_path / "records.jsonl")
    assert (record.task_id, len(record.steps)) == ("walk", 2)


async def test_a_lost_sandbox_is_void(http: httpx.AsyncClient) -> None:
    (await http.post("/seed_session", json=ROW)).raise_for_status()
    for info in aenv_ray.list_instances():
        await aenv_ray.get(info.id).release.remote()
    lost = await http.post("/step", json={"action": 1})
    assert (lost.status_code, "has ended" in lost.text) == (503, True)
    told = (await http.post("/verify", json={**ROW, "response": ANSWER})).json()
    assert (told["reward"], told["void"]) == (0.0, True)


async def test_a_sandbox_that_its_agent_ends_earns_nothing(http: httpx.AsyncClient) -> None:
    (await http.post("/seed_session", json=ROW)).raise_for_status()
    await http.post("/leave", json={})
    told = (await http.post("/verify", json={**ROW, "response": ANSWER})).json()
    assert (told["reward"], told["void"]) == (0.0, False)


async def test_sessions_are_apart(http: httpx.AsyncClient) -> None:
    other = httpx.AsyncClient(transport=http._transport, base_url="http://server", timeout=60)
    for client, seed in ((http, 3), (other, 0)):
        row = {**ROW, "verifier_metadata": {"aenv": {"seed": seed}}}
        (await client.post("/seed_session", json=row)).raise_for_status()
    ended = [
        json.loads((await one.post("/step", json={"action": 1})).text) for one in (http, other)
    ]
    assert [one["terminated"] for one in ended] == [True, False]
    (await other.post("/seed_session", json=ROW)).raise_for_status()  # abandons the first


def test_rows_get_the_tools_of_the_environment() -> None:
    [tool] = response_tools(CORRIDOR, only=["step"])
    assert (tool["type"], tool["name"]) == ("function", "step")
    assert tool["parameters"]["properties"]["action"]["type"] == "integer"


async def test_names_and_schemas_that_routes_cannot_have(tmp_path: Path) -> None:
    """They become legal and lead to their own tools, or are refused."""
    listed = {name: arguments("number") for name in ILLEGAL}
    project = listed_project(tmp_path / "illegal", **listed)
    names = [tool["name"] for tool in await asyncio.to_thread(response_tools, project)]
    assert len(set(names)) == len(ILLEGAL)
    async with served(made(tmp_path, environment=project)) as http:
        (await http.post("/seed_session", json=ROW)).raise_for_status()
        for number, name in enumerate(names):
            called = await http.post(f"/{name}", json={"number": number})
            assert (called.status_code, json.loads(called.text)) == (200, {"number": number})
    tree = listed_project(tmp_path / "tree", tree=TREE, verify=arguments())
    with pytest.raises(ConfigError, match=r"tool 'tree': .* contains itself"):
        await asyncio.to_thread(response_tools, tree)
    with pytest.raises(ConfigError, match="'verify' has the name of a route"):
        await asyncio.to_thread(response_tools, tree, only=["verify"])
    async with served(made(tmp_path, environment=tree)) as http:
        with pytest.raises(ConfigError, match="contains itself"):
            await http.post("/seed_session", json=ROW)


def test_the_example_makes_a_server() -> None:
    found = runpy.run_path(str(EXAMPLE))
    assert issubclass(found["TerminalServer"], AenvResourcesServer)
    [row] = found["rows"](CORRIDOR)
    assert {tool["name"] for tool in row["responses_create_params"]["tools"]} >= {"step"}


async def test_the_docs_configure_a_server_and_run_a_sandbox(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [text] = doc_blocks("nemo-gym", "yaml")
    given = OmegaConf.to_container(OmegaConf.create(text))["terminal"]["resources_servers"]
    config = AenvResourcesServerConfig(
        name="terminal", host="127.0.0.1", port=8000, **given["terminal"]
    )
    assert config.environment == "mini-terminal"
    assert Path(config.entrypoint).name == "app.py"
    register_provider("aenv", AenvProvider, override=True)  # the entry point does on install
    found: dict[str, Any] = {}
    exec(doc_blocks("nemo-gym")[0], found)
    await found["main"]()
    assert int(capsys.readouterr().out) > 0
    assert not aenv_ray.list_instances()


async def test_an_instance_is_a_sandbox(tmp_path: Path) -> None:
    register_provider("aenv", AenvProvider, override=True)
    assert get_provider_class("aenv") is AenvProvider
    spec = SandboxSpec(
        env={"COLOUR": "blue"}, files={"given.txt": "content"}, ttl_s=600, metadata={"of": "gym"}
    )
    sandbox = await AsyncSandbox({"aenv": {"environment": CORRIDOR}}, spec).start()
    assert await sandbox.status() is SandboxStatus.RUNNING
    [info] = aenv_ray.list_instances()
    assert info.labels["of"] == "gym"
    done = await sandbox.exec("cat given.txt; echo $COLOUR $X; echo no >&2; exit 3", env={"X": "1"})
    assert (done.stdout, done.stderr, done.return_code) == ("contentblue 1\n", "no\n", 3)
    assert done.error_type is None
    late = await sandbox.exec("sleep 60", timeout_s=0.5)
    assert (late.return_code, late.error_type) == (125, "timeout")
    await sandbox.download("given.txt", tmp_path / "back.txt")
    assert (tmp_path / "back.txt").read_text() == "content"
    with pytest.raises(ConfigError, match="it has one user"):
        await sandbox.exec("id", user="root")
    await aenv_ray.get(info.id).release.remote()
    lost = await sandbox.exec("true")
    assert (lost.return_code, lost.error_type) == (125, "sandbox")
    await sandbox.stop()
    assert not aenv_ray.list_instances()


async def test_what_no_sandbox_can_have_is_refused() -> None:
    provider = AenvProvider(environment=CORRIDOR)
    for spec, words in (
        (SandboxSpec(entrypoint=["sh"]), "an entrypoint"),
        (SandboxSpec(resources={"gpu": 1}), "a GPU"),
        (SandboxSpec(resources={"cpu": 2}), "those of its project"),
    ):
        with pytest.raises(SandboxCreateError, match=words):
            await provider.create(spec)
    with pytest.raises(SandboxCreateError, match="no environment"):
        await AenvProvider().create(SandboxSpec())


SANDBOX = f"""
import asyncio
from nemo_gym.sandbox import SandboxSpec
from aenv_ray.integrations.nemo_gym_sandbox import AenvProvider

async def main():
    provider = AenvProvider(environment={CORRIDOR!r})
    handle = await provider.create(SandboxSpec())
    await provider.exec(handle, "true")
    print("begun")
    await provider.exec(handle, "sleep 600", timeout_s=600)

asyncio.run(main())
"""


def test_a_killed_user_of_a_sandbox_leaves_none(tmp_path: Path) -> None:
    kill_once_it_acts(SANDBOX, directory=tmp_path)


SERVER = """
from pathlib import Path
from starlette.testclient import TestClient
from tests.heavy.test_nemo_gym import ROW, made

with TestClient(made(Path("."), only=["get_observation"]).setup_webserver()) as client:
    client.post("/seed_session", json=ROW).raise_for_status()
    print("begun")
    while True:
        client.post("/get_observation", json={}).raise_for_status()
"""


def test_a_killed_server_leaves_no_instance(tmp_path: Path) -> None:
    kill_once_it_acts(SERVER, directory=tmp_path)
