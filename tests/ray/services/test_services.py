"""Services on a real Serve: replicas, sessions, rolling updates under load, failures."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

import aenv_ray
from aenv_ray import serve as services
from aenv_ray.actors.host.environment_relay import OUTER_LABEL
from aenv_ray.errors import (
    CallOutcomeUnknown,
    FabricUnavailable,
    FunctionFailed,
    ServiceNotFound,
    SessionLost,
)
from aenv_ray.hub import hub_actor
from aenv_ray.hub.client import blocking
from aenv_ray.hub.records import EnvironmentVersion, Right
from aenv_ray.serve.services.apps import ServiceStatus
from tests.ray.faults import actor_pid, eventually, eventually_empty, host_of, kill, stop
from tests.ray.services.services import (
    ACCEPT,
    WIDE_S,
    ServiceGateway,
    call,
    load,
    replicas_of,
    sandboxes,
    settled,
)

pytestmark = [pytest.mark.redis, pytest.mark.timeout(400)]

AGENT = Path(__file__).parents[3] / "examples" / "chat-agent"
SOURCE = """
import os
from pathlib import Path
from aenv_ray.runtime import register_function, register_health, register_tool

_count = 0
_name = ""


@register_health
def health() -> dict:
    is_sick = os.environ.get("SICK") == "yes" or Path("sick").exists()
    return {"status": "unhealthy" if is_sick else "healthy", "message": "as told"}


@register_tool
def name() -> str:
    global _name
    _name = _name or os.urandom(8).hex()  # not at import: sandboxes are forks
    return _name


@register_tool
def leave() -> None:
    os._exit(1)


@register_tool
def count() -> int:
    global _count
    _count += 1
    return _count


@register_tool
def greeting() -> str:
    return os.environ.get("GREETING", "none")


@register_tool
def say(text: str) -> None:
    print(text, flush=True)


@register_tool
def hold(key: str) -> str:
    import time
    Path(f"began-{key}").touch()
    while not Path(key).exists():
        time.sleep(0.1)
    return key


@register_function
def double(number: int) -> int:
    return 2 * number
"""


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The service lives across tests; its fixture proves that nothing is left of it."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("desk")
    (root / "src").mkdir()
    config = '{"name": "desk", "version": "1.0.0", "deployConfig": {"network": "host"}}'
    (root / "config.json").write_text(config)
    (root / "src" / "tools.py").write_text(SOURCE)
    return root


@pytest.fixture(scope="module")
def gateway(service_gateway: ServiceGateway) -> httpx.Client:
    return service_gateway.http


@pytest.fixture(scope="module")
def desk(gateway: httpx.Client, root: Path) -> Iterator[Any]:
    """A service with two replicas, for tests that leave it healthy."""
    del gateway
    yield services.deploy(root, name="desk", replicas=2, owner="ann")
    services.remove("desk")
    with pytest.raises(ServiceNotFound):
        services.state("desk")
    eventually_empty(lambda: sandboxes("desk"), WIDE_S)


# --- calls -----------------------------------------------------------------------------------


def test_a_handle_calls_tools_and_functions(desk: Any) -> None:
    assert call(desk, "greeting") == "none"
    assert desk.call_function.remote("double", {"number": 4}).result(timeout_s=60) == 8
    assert {tool["name"] for tool in desk.list_tools.remote().result(timeout_s=60)} >= {"name"}
    assert desk.health.remote().result(timeout_s=60)["status"] == "healthy"


def test_calls_pass_the_host_by(desk: Any, gateway: httpx.Client) -> None:
    """A replica is connected to its sandbox: calls are answered while the host is stopped."""

    def double(number: int) -> int:
        answer = gateway.post("/services/desk/functions/double", json={"number": number})
        return int(answer.json()["data"])

    for n in range(30):  # replicas connect after a few calls
        assert (call(desk, "greeting"), double(n)) == ("none", 2 * n)
    hosts = {actor_pid(host_of(aenv_ray.get(one))) for one in sandboxes("desk")}
    for pid in hosts:
        stop(pid)
    try:
        for n in range(6):
            assert (call(desk, "greeting"), double(n)) == ("none", 2 * n)
    finally:
        for pid in hosts:
            kill(pid, signal.SIGCONT)


def test_a_service_of_a_path_is_shown_with_the_engine_that_the_cluster_chose(
    desk: Any, root: Path, service_gateway: ServiceGateway
) -> None:
    del desk
    headers = {"Authorization": f"Bearer {service_gateway.token}"}
    url = f"http://127.0.0.1:{service_gateway.settings.port}/env-service/desk"
    answer = httpx.get(url, headers=headers, timeout=WIDE_S)
    assert answer.status_code == 200, answer.text
    shown = answer.json()["data"]
    assert (shown["engine"], shown["chosen_engine"]) == ("", "process")
    assert shown["env"]["name"] == root.name


def test_a_service_that_no_node_can_run_is_refused(gateway: httpx.Client, root: Path) -> None:
    """There is no Kubernetes here; nothing of it is kept."""
    del gateway
    with pytest.raises(FabricUnavailable, match="no node can run instances on engine kubernetes"):
        services.deploy(root, name="nowhere", engine="kubernetes", owner="ann")
    with pytest.raises(ServiceNotFound):
        services.state("nowhere")


async def test_mcp_clients_can_use_a_service(desk: Any, gateway: httpx.Client) -> None:
    """With both generations of the protocol; a session keeps its sandbox."""
    from fastmcp import Client
    from fastmcp.client.transports import StreamableHttpTransport

    del desk
    token = gateway.headers["Authorization"].removeprefix("Bearer ")
    for mode in ("legacy", "auto"):
        transport = StreamableHttpTransport(
            f"{gateway.base_url}/services/desk/mcp", auth=token, headers={"x-session-id": mode}
        )
        async with Client(transport, mode=mode, timeout=WIDE_S) as client:
            tools = await client.list_tools()
            assert {tool.name for tool in tools} >= {"count", "name"}
            answers = [await client.call_tool("count", {}) for _ in range(4)]
            counts = [(answer.structured_content or {})["result"] for answer in answers]
            # Both sessions may be bound to one replica, whose sandbox counts on.
            assert counts == list(range(counts[0], counts[0] + 4))


def test_functions_and_health_are_routes_below_the_service(
    desk: Any, gateway: httpx.Client
) -> None:
    del desk
    answer = gateway.post("/services/desk/functions/double", json={"number": 21})
    assert answer.json() == {"success": True, "data": 42}
    health = gateway.get("/services/desk/health").json()
    assert health["data"]["status"] == "healthy"
    assert gateway.get("/services/nothing/health").status_code == 404
    listed = gateway.get("/services/desk/functions/list").json()["data"]
    assert [one["name"] for one in listed["functions"]] == ["double"]


def test_a_service_calls_environments_that_its_owner_may_use(
    gateway: httpx.Client, tmp_path: Path
) -> None:
    """Invariant 15, and the inner instance ends with the service."""
    del gateway
    hub = hub_actor.ensure_hub()
    for name in ("secret", "shared"):
        entry = EnvironmentVersion(
            name=name, version="1.0.0", digest=name, archive="", archive_bytes=0,
            config={"name": name}, owner="bob",
        )  # fmt: skip
        blocking(hub.push(entry))
    blocking(hub.grant("shared", "ann", Right.USE))
    (tmp_path / "src").mkdir()
    names = ["mini-terminal", "secret", "shared"]
    deploy = {"network": "none", "environments": names}
    (tmp_path / "config.json").write_text(json.dumps({"name": "nest", "deployConfig": deploy}))
    (tmp_path / "src" / "tools.py").write_text(
        "from aenv_ray.runtime import current_call, register_tool\n"
        "@register_tool\n"
        "def tools(environment: str) -> list[str]:\n"
        "    return [t['name'] for t in current_call().env(environment).list_tools()]\n"
    )
    service = services.deploy(tmp_path, name="nest", replicas=1, owner="ann")
    try:
        assert "execute_command" in call(service, "tools", environment="mini-terminal")
        (sandbox,) = sandboxes("nest")
        inner = [i for i in aenv_ray.list_instances() if i.labels.get(OUTER_LABEL) == sandbox]
        assert [one.owner for one in inner] == ["ann"]
        with pytest.raises(FunctionFailed, match="ann may not use it"):
            call(service, "tools", environment="secret")
        with pytest.raises(FunctionFailed, match="published without its source"):
            call(service, "tools", environment="shared")
    finally:
        services.remove("nest")
        for name in ("secret", "shared"):
            blocking(hub.delete_environment(name, "1.0.0"))
    eventually_empty(
        lambda: [i for i in aenv_ray.list_instances() if i.labels.get(OUTER_LABEL) == sandbox],
        WIDE_S,
    )


def test_calls_without_a_session_reach_all_replicas(desk: Any) -> None:
    names: set[str] = set()

    def both() -> bool:
        names.add(call(desk, "name"))
        return len(names) == 2

    eventually(both, WIDE_S)


def test_a_repeated_call_runs_once_whichever_replica_gets_it(
    desk: Any, gateway: httpx.Client
) -> None:
    """Invariant 1."""
    del desk
    message = {
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": "count", "arguments": {}, "_meta": {"aenv/call_id": "once"}},
    }  # fmt: skip
    answers = [
        gateway.post("/services/desk/mcp", json=message, headers=ACCEPT).json()["result"]
        for _ in range(6)
    ]
    assert all(answer == answers[0] for answer in answers)


def test_logs_cover_every_sandbox(desk: Any, gateway: httpx.Client) -> None:
    said = desk.call_tool.remote("say", {"text": "a-line-of-mine"}).result(timeout_s=WIDE_S)
    assert not said.is_error

    def is_there() -> bool:
        text = gateway.get("/env-service/desk/logs").text
        return any(line.endswith(": a-line-of-mine") for line in text.splitlines())

    eventually(is_there, WIDE_S)


# --- changes under load ----------------------------------------------------------------------


def test_no_call_fails_during_scaling_and_rolling_updates(
    desk: Any, gateway: httpx.Client, root: Path
) -> None:
    sessions = [desk.options(session_id=f"roll-{n}") for n in range(6)]
    before = [(call(one, "name"), call(one, "count")) for one in sessions]
    with load(gateway, "desk") as wrong:
        services.deploy(root, name="desk", replicas=3)
        settled("desk", 3)
        assert [call(one, "name") for one in sessions] == [name for name, _ in before]
        services.deploy(root, name="desk", replicas=2, environment_variables={"GREETING": "hi"})
        settled("desk", 2)
    assert wrong == []
    assert {call(desk, "greeting") for _ in range(6)} == {"hi"}
    for one in sessions:
        with pytest.raises(SessionLost):
            call(one, "name")
        call(one, "name")  # told once


def test_a_call_is_cancelled_in_a_replica_that_is_being_stopped(
    gateway: httpx.Client, root: Path
) -> None:
    """Invariant 11: Serve waits for the call, and does not pass the cancellation to its replica."""
    service = services.deploy(root, name="leaver", replicas=1, owner="ann")

    def reached() -> set[str]:
        """Return the sandboxes of the replicas that Serve asks."""
        facts = service.broadcast("facts").results(timeout_s=WIDE_S)
        return {one["instance_id"] for one in facts}

    headers = {"Accept": "application/json", "mcp-session-id": "s"}
    message = {
        "jsonrpc": "2.0", "id": 7, "method": "tools/call",
        "params": {"name": "hold", "arguments": {"key": "k"}},
    }  # fmt: skip
    note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
    try:
        old = aenv_ray.get(*sandboxes("leaver"))
        with ThreadPoolExecutor(1) as threads:
            url = "/services/leaver/mcp"
            held = threads.submit(gateway.post, url, json=message, headers=headers)
            eventually(lambda: ray.get(old.exec.remote("test -e began-k")).exit_code == 0, WIDE_S)
            try:
                services.deploy(
                    root, name="leaver", replicas=1, wait=False,
                    environment_variables={"GREETING": "new"},
                )  # fmt: skip
                eventually(lambda: old.instance_id not in reached(), WIDE_S)
                assert gateway.post(url, json=note, headers=headers).status_code == 202
                eventually(held.done)
            finally:
                ray.get(old.write_file.remote("k", b""))
            assert held.result().json()["error"]["data"]["code"] == "call_cancelled"
    finally:
        services.remove("leaver")
    eventually_empty(lambda: sandboxes("leaver"), WIDE_S)


def test_an_unhealthy_version_stops_the_rolling_update(
    desk: Any, gateway: httpx.Client, root: Path
) -> None:
    with load(gateway, "desk") as wrong:
        with pytest.raises(FabricUnavailable, match="as told"):
            services.deploy(
                root, name="desk", replicas=2, environment_variables={"SICK": "yes"},
                healthy_within_s=1.0,
            )  # fmt: skip
        state = services.state("desk")
        assert state.status is ServiceStatus.FAILED
        assert state.available_replicas == 2
        assert "as told" in state.reason
    assert wrong == []
    services.deploy(root, name="desk", replicas=2, environment_variables={"SICK": "no"})
    settled("desk", 2)
    assert call(desk, "name")


def test_a_parked_service_has_no_sandbox_and_can_be_resumed(
    desk: Any, gateway: httpx.Client, root: Path
) -> None:
    services.deploy(root, name="desk", replicas=0)
    eventually_empty(lambda: sandboxes("desk"), WIDE_S)
    eventually(lambda: gateway.get("/services/desk/health").status_code == 409, WIDE_S)
    assert services.state("desk").status is ServiceStatus.PENDING
    services.deploy(root, name="desk", replicas=2)
    settled("desk", 2)
    assert call(desk, "name")


def test_load_adds_replicas(gateway: httpx.Client, root: Path) -> None:
    handle = services.deploy(root, name="elastic", autoscale=(1, 2), owner="ann")
    try:
        held = [handle.call_tool.remote("hold", {"key": f"k{n}"}, WIDE_S) for n in range(12)]
        eventually(lambda: services.state("elastic").available_replicas == 2, WIDE_S)
        for one in held:
            one.cancel()
    finally:
        services.remove("elastic")
    eventually_empty(lambda: sandboxes("elastic"), WIDE_S)
    del gateway


# --- failures -------------------------------------------------------------------------------


def test_a_dead_sandbox_is_replaced(desk: Any) -> None:
    session = desk.options(session_id="of the dead")
    name = call(session, "name")
    with pytest.raises(SessionLost):
        call(session, "leave")

    assert call(session, "name") != name  # told once
    settled("desk", 2)


def test_a_call_of_a_session_does_not_run_again_in_another_sandbox(desk: Any) -> None:
    """Invariant 1: its client may have missed the error that the session is lost."""
    session = desk.options(session_id="of a repeated call")
    counting = {"name": "count", "call_id": "of a session"}
    session.call_tool.remote(**counting).result(timeout_s=WIDE_S)
    with pytest.raises(SessionLost):
        call(session, "leave")

    with pytest.raises(CallOutcomeUnknown):
        session.call_tool.remote(**counting).result(timeout_s=WIDE_S)
    settled("desk", 2)


def test_a_dead_replica_is_replaced_and_its_sandbox_ends(desk: Any, gateway: httpx.Client) -> None:
    """Invariant 3: the lease of its sandbox is not renewed."""
    before = set(sandboxes("desk"))
    victim = replicas_of("desk")[0]
    with load(gateway, "desk") as wrong:
        import ray

        ray.kill(victim)
        eventually(lambda: len(set(sandboxes("desk")) - before) == 1, WIDE_S)
    codes = {json.loads(text)["error"]["data"]["code"] for text in wrong}
    assert codes <= {"call_outcome_unknown", "sandbox_lost"}, wrong
    settled("desk", 2)
    assert call(desk, "name")


def test_calls_continue_while_serves_controller_restarts(desk: Any, gateway: httpx.Client) -> None:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    with load(gateway, "desk") as wrong:
        ray.kill(controller, no_restart=False)
        eventually(lambda: len(sandboxes("desk")) == 2, WIDE_S)
        settled("desk", 2)
    assert wrong == []
    assert call(desk, "name")


# --- an agent --------------------------------------------------------------------------------


def test_an_agent_keeps_the_history_of_each_client(gateway: httpx.Client) -> None:
    """The example over the gateway: four clients take turns on two replicas."""
    services.deploy(AGENT, name="agent", replicas=2, owner="ann")
    clients = [f"client-{n}" for n in range(4)]
    try:
        for turn in range(3):
            for one in clients:
                said = chat(gateway, one, f"{one} says {turn}")
                assert said == f"Noted, that is message {turn + 1}."
        for one in clients:
            told = "; ".join(f"{one} says {turn}" for turn in range(3))
            assert chat(gateway, one, "What did I say?") == f"You said: {told}"
    finally:
        services.remove("agent")


def chat(gateway: httpx.Client, client: str, text: str) -> str:
    """Send a message to the agent, in a session."""
    arguments = {"message": text, "conversation": client}
    message = {
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": "chat", "arguments": arguments},
    }  # fmt: skip
    answer = gateway.post(
        "/services/agent/mcp", json=message, headers=ACCEPT | {"x-session-id": client}
    )
    return str(answer.json()["result"]["content"][0]["text"])
