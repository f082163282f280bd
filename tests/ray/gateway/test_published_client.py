"""AEnvironment's published client, unmodified, works against the gateway.

It finds the ports 8080 and 8081 and no others: the gateway has a loopback address of its own here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from aenv_ray.actors.fabric.driver_api import init
from aenv_ray.hub.hub_actor import ensure_hub
from aenv_ray.hub.records import Role
from aenv_ray.serve.gateway.app import gateway_app
from aenv_ray.serve.gateway.listener import GatewayListener, listen
from aenv_ray.serve.gateway.settings import GatewaySettings
from tests.conftest import require
from tests.fixtures.published_client import PublishedClient, published_client
from tests.ray.cluster import Cluster
from tests.ray.faults import eventually

PROJECTS = Path(__file__).parents[2] / "fixtures" / "projects"
START_S = 60.0


@pytest.fixture(scope="module")
def host(cluster: Cluster) -> Iterator[str]:
    """Run one gateway replica in this process and return its address."""
    del cluster
    address = f"127.81.{os.getpid() % 250}.{os.getpid() // 250 % 250 + 1}"
    settings = GatewaySettings(host=address)
    fabric, hub = init(), ensure_hub()
    sockets = [listen(address, port) for port in (settings.port, settings.mcp_port)]
    listener = GatewayListener(lambda: gateway_app(settings, fabric, hub), sockets)
    listener.start(START_S)
    yield address
    listener.stop()


@pytest.fixture(scope="module")
def environment() -> Path:
    found, reason = published_client()
    require("published-client", found is not None, reason)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def published(
    environment: Path, host: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PublishedClient]:
    secret, _ = asyncio.run(ensure_hub().create_token(Role.PUBLISHER, "ada"))
    client = PublishedClient(environment, tmp_path_factory.mktemp("home"), host, secret)
    client.configure()
    yield client
    client.close()


@pytest.fixture(scope="module")
def pushed(published: PublishedClient) -> str:
    """Return an environment that the published CLI has pushed."""
    ran = published.cli("push", cwd=PROJECTS / "weather-demo")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Push successfully" in ran.stdout
    return "weather-demo@1.0.0"


def json_of(text: str) -> object:
    """Return the JSON that its CLI prints between words for people."""
    start = min(at for at in (text.find("["), text.find("{")) if at >= 0)
    value, _ = json.JSONDecoder().raw_decode(text[start:])
    return value


# --- its command line -----------------------------------------------------------------------------


def test_the_published_client_pushes_and_finds_an_environment(
    published: PublishedClient, pushed: str
) -> None:
    again = published.cli("push", cwd=PROJECTS / "weather-demo")
    assert again.returncode == 0, again.stdout + again.stderr
    everything = ("list", "--limit", "1000")  # modules before this one published into the same hub
    assert pushed.partition("@")[0] in published.script_cli(*everything).stdout
    listed = published.cli(*everything, "-f", "json")
    assert listed.returncode == 0, listed.stdout + listed.stderr
    rows = json_of(listed.stdout)
    assert isinstance(rows, list)
    assert pushed in {f"{row['name']}@{row['version']}" for row in rows}
    got = json_of(published.cli("get", "weather-demo", "-v", "1.0.0").stdout)
    assert isinstance(got, dict)
    assert (got["name"], got["version"], got["tags"]) == (
        "weather-demo",
        "1.0.0",
        ["linux", "demo"],
    )
    assert got["deploy_config"]["cpu"] == "1C"


def test_the_published_client_cannot_change_a_version(
    published: PublishedClient, pushed: str, tmp_path: Path
) -> None:
    """Invariant 6."""
    changed = tmp_path / "changed"
    (changed / "src").mkdir(parents=True)
    source = PROJECTS / "weather-demo"
    (changed / "config.json").write_text((source / "config.json").read_text())
    text = (source / "src" / "custom_env.py").read_text()
    (changed / "src" / "custom_env.py").write_text(text.replace("-3", "-30"))
    ran = published.cli("push", cwd=changed)
    assert ran.returncode != 0
    assert "Push successfully" not in ran.stdout


def test_the_published_client_manages_instances(published: PublishedClient, pushed: str) -> None:
    made = published.cli("instance", "create", pushed, "--keep-alive", "--ttl", "5m")
    assert made.returncode == 0, made.stdout + made.stderr
    found = re.search(r"Instance ID:\s*(\S+)", made.stdout)
    assert found, made.stdout
    instance_id = found[1]
    listed = published.cli("instance", "list", "-o", "json")
    assert instance_id in listed.stdout, listed.stdout + listed.stderr
    by_version = ("instance", "list", "--name", "weather-demo", "-o", "json", "--version")
    assert instance_id in published.cli(*by_version, "1.0.0").stdout
    assert instance_id not in published.cli(*by_version, "2.0.0").stdout
    got = published.cli("instance", "get", instance_id, "-o", "json")
    assert "Running" in got.stdout, got.stdout
    deleted = published.cli("instance", "delete", instance_id, "--yes")
    assert deleted.returncode == 0, deleted.stdout
    gone = published.cli("instance", "get", instance_id)
    assert gone.returncode != 0 or "Running" not in gone.stdout


@pytest.fixture
def service(published: PublishedClient, pushed: str) -> Iterator[str]:
    """Return the id of a service that its CLI made, and end it and Serve afterwards."""
    made = published.cli("service", "create", pushed, "-s", "forecast", "-e", "CLIMATE=mild",
                         "-o", "json")  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    shown = json_of(made.stdout.partition("successfully")[2])
    assert isinstance(shown, dict)
    try:
        yield str(shown["id"])
    finally:
        published.cli("service", "delete", str(shown["id"]), "--yes")
        from ray import serve

        serve.shutdown()


SERVICE = """
import asyncio, json, logging, os, sys
from aenv.client.scheduler_client import AEnvSchedulerClient

logging.disable(logging.CRITICAL)


async def main():
    url, key = os.environ["AENV_SYSTEM_URL"] + ":8080", os.environ["AENV_API_KEY"]
    service = sys.argv[1]
    async with AEnvSchedulerClient(base_url=url, api_key=key) as client:
        while (found := await client.get_env_service(service)).status != "Running":
            await asyncio.sleep(0.5)
        listed = await client.list_env_services()
        named = await client.list_env_services(env_name="weather-demo")
        changed = await client.update_env_service(
            service, environment_variables={"CLIMATE": "harsh"})
        print(json.dumps({
            "found": found.model_dump(mode="json"), "changed": changed.model_dump(mode="json"),
            "listed": [one.id for one in listed], "named": [one.id for one in named],
        }))


asyncio.run(main())
"""


@pytest.mark.timeout(400)
def test_the_published_client_manages_services(published: PublishedClient, service: str) -> None:
    """Its CLI and its Python class make, find, change and end a service, which answers MCP."""
    found = published.script(SERVICE, service)
    assert service in found["listed"]
    assert service in found["named"]
    assert (found["found"]["replicas"], found["found"]["available_replicas"]) == (1, 1)
    assert found["found"]["owner"] == "ada"
    assert found["found"]["env"]["name"] == "weather-demo"
    assert found["changed"]["environment_variables"] == {"CLIMATE": "***"}  # values are secrets
    url = found["found"]["service_url"]
    eventually(lambda: _climate(published, url) == "harsh", 180.0)  # its replica is replaced
    listed = published.cli("service", "list", "-o", "json")
    assert service in listed.stdout, listed.stdout + listed.stderr
    got = published.cli("service", "get", service, "-o", "json")
    assert service in got.stdout, got.stdout + got.stderr
    scaled = published.cli("service", "update", service, "--replicas", "2", "-o", "json")
    assert '"replicas": 2' in scaled.stdout, scaled.stdout + scaled.stderr
    ended = published.cli("service", "delete", service, "--yes")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert service not in published.cli("service", "list", "-o", "json").stdout


def _climate(published: PublishedClient, service_url: str) -> object:
    """Return what a tool of a service says of its variables."""
    call = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    answer = httpx.post(
        f"{service_url}/mcp", timeout=180, headers={"Authorization": f"Bearer {published.api_key}"},
        json={"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call},
    )  # fmt: skip
    result = answer.json().get("result")
    return result and json.loads(result["content"][0]["text"])["climate"]


def test_the_published_client_needs_a_token(
    published: PublishedClient, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stranger = dataclasses.replace(published, home=tmp_path, api_key="wrong")
    request.addfinalizer(stranger.close)
    stranger.configure()
    for words in (["list"], ["instance", "list"], ["push"]):
        ran = stranger.cli(*words, cwd=PROJECTS / "weather-demo")
        assert ran.returncode != 0, words
        assert "Push successfully" not in ran.stdout


# --- its class ------------------------------------------------------------------------------------

EVERYTHING = """
import asyncio, json, logging, os, sys
from aenv import Environment, ToolError

logging.disable(logging.CRITICAL)


async def main():
    found = {}
    env = Environment(sys.argv[1], api_key=os.environ["AENV_API_KEY"],
                      environment_variables={"CLIMATE": "harsh"}, ttl="5m", labels={"run": "a"})
    async with env:
        found["tools"] = [tool["name"] for tool in await env.list_tools()]
        result = await env.call_tool("get_weather", {"city": "Oslo"})
        found["weather"] = json.loads(result.content[0]["text"])
        prefixed = await env.call_tool(f"{sys.argv[1]}/get_weather", {"city": "Hangzhou"})
        found["prefixed"] = json.loads(prefixed.content[0]["text"])["temperature"]
        found["wrong"] = (await env.call_tool("get_weather", {})).is_error
        found["function"] = await env.call_function("get_weather_func", {"city": "Oslo"})
        found["reward"] = await env.call_reward({"city": "Oslo"})
        found["functions"] = (await env.list_functions())["total"]
        found["health"] = (await env.check_health({}))["data"]["status"]
        found["info"] = await env.get_env_info()
        calls = [env.call_tool("get_weather", {"city": str(n)}) for n in range(20)]
        found["concurrent"] = [json.loads(r.content[0]["text"])["city"]
                               for r in await asyncio.gather(*calls)]
    print(json.dumps(found))


asyncio.run(main())
"""


def test_the_published_environment_class_works_unmodified(
    published: PublishedClient, pushed: str
) -> None:
    found = published.script(EVERYTHING, pushed)
    assert found["tools"] == [f"{pushed}/get_weather"]
    assert found["weather"] == {"city": "Oslo", "temperature": -3, "climate": "harsh"}
    assert found["prefixed"] == 21
    assert found["wrong"] is True
    assert found["function"]["description"] == "Oslo"
    assert found["reward"] is False
    assert found["functions"] == 2
    assert found["health"] in ("success", "healthy")
    assert found["info"]["status"] == "Running"
    assert found["concurrent"] == [str(number) for number in range(20)]
    instance_id = found["info"]["instance_id"]
    assert instance_id not in published.cli("instance", "list", "-o", "json").stdout


STEAL = """
import asyncio, json, logging, os, sys
import httpx
from aenv import Environment

logging.disable(logging.CRITICAL)


async def main():
    found = {}
    async with Environment(sys.argv[1], api_key=os.environ["AENV_API_KEY"], ttl="5m") as env:
        info = await env.get_env_info()
        url = os.environ["AENV_SYSTEM_URL"] + ":8081/functions/list"
        named = {"AEnvCore-EnvInstance-ID": info["instance_id"]}
        async with httpx.AsyncClient() as http:
            for name, target in {
                "right": f"http://{info['ip']}:8081", "guessed": "http://10.0.0.1:8081",
                "none": None,
            }.items():
                headers = {**named, **({"AEnvCore-MCPProxy-URL": target} if target else {})}
                found[name] = (await http.get(url, headers=headers)).status_code
    print(json.dumps(found))


asyncio.run(main())
"""


def test_the_instance_address_is_a_capability(published: PublishedClient, pushed: str) -> None:
    """It sends no token to the instance: the address grants access."""
    found = published.script(STEAL, pushed)
    assert found["right"] == 200
    assert found["guessed"] in (401, 403, 404)
    assert found["none"] in (400, 401, 403)


UNKNOWN = """
import asyncio, json, logging, os, sys
from aenv import Environment

logging.disable(logging.CRITICAL)


async def main():
    try:
        await Environment(sys.argv[1], api_key=sys.argv[2], max_retries=1).initialize()
    except Exception as exc:
        print(json.dumps(str(exc)))


asyncio.run(main())
"""


def test_the_published_client_shows_our_error_messages(published: PublishedClient) -> None:
    assert "no-such-env" in published.script(UNKNOWN, "no-such-env@1.0.0", published.api_key)
    assert "token" in published.script(UNKNOWN, "weather-demo@1.0.0", "wrong")


def test_a_pushed_version_of_a_built_in_name_is_used(
    published: PublishedClient, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """AEnvironment's mini-terminal is pushed and used beside the built-in one.

    Only administrators may take the name of a built-in environment.
    """
    refused = published.cli("push", cwd=PROJECTS / "mini-terminal")
    assert refused.returncode != 0
    secret, _ = asyncio.run(ensure_hub().create_token(Role.ADMIN, "root"))
    admin = dataclasses.replace(published, home=tmp_path, api_key=secret)
    request.addfinalizer(admin.close)
    admin.configure()
    ran = admin.cli("push", cwd=PROJECTS / "mini-terminal")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    source = EVERYTHING[: EVERYTHING.index('        found["tools"]')] + (
        '        found = (await env.call_tool("execute_command", {"command": "echo $((40+2))"})\n'
        '                 ).content[0]["text"]\n'
        "    print(json.dumps(found))\n\n\nasyncio.run(main())\n"
    )
    assert json.loads(admin.script(source, "mini-terminal@1.0.1")) == {
        "output": ["42\n", True], "returncode": 0,
    }  # fmt: skip
