"""Which instances of a host may ask its chat model, and what becomes of one whose model fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray import chat_endpoint
from aenv_ray.actors.host.host import Host
from aenv_ray.actors.host.model_relay import ModelRelay
from aenv_ray.config import Settings
from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.door import CHAT_METHOD
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    ConfigError,
    EndpointUnavailable,
    InsideCause,
    InternalError,
    SandboxDiedInside,
    SandboxLost,
)
from aenv_ray.ids import new_instance_id
from aenv_ray.models import ActorDensity, InstanceSpec
from aenv_ray.policy import STRICT, Policy
from aenv_ray.project import project
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.unit.actors.host.conftest import TOOLS
from tests.unit.actors.host.spy_engine import HOST, SpyEngine

Started = tuple[Host, InstanceSpec, Sandbox]
Start = Callable[..., Awaitable[Started]]


@pytest.fixture
async def start(
    tmp_path: Path, engine: SpyEngine, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Return what starts an instance of a project on a host with an endpoint that is down."""
    monkeypatch.setattr(chat_endpoint, "_FIRST_PAUSE_S", 0.0)
    hosts: list[Host] = []

    async def make(*, wants: bool, policy: Policy, key_env: str = "") -> Started:
        root = tmp_path / "probe"
        (root / "src").mkdir(parents=True, exist_ok=True)
        deploy = {"network": "none", "chatModel": wants}
        (root / "config.json").write_text(json.dumps({"name": "probe", "deployConfig": deploy}))
        (root / "src" / "tools.py").write_text(TOOLS)
        source = project.resolve(root)
        named = {"chat_model_key_env": key_env} if key_env else {}
        given = Settings(chat_model_url="http://model.example/v1", chat_model="m", **named)
        down = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(503)))
        host = Host(
            HOST, node_id="n", density=ActorDensity.SHARED, make_engine=lambda _: engine,
            policy=lambda: policy, store=MemoryInstanceStore(), projects_dir=tmp_path / "projects",
            model_relay=ModelRelay(given, down),
        )  # fmt: skip
        hosts.append(host)
        await host.open()
        await host.put_project(source.digest, source.archive())
        spec = InstanceSpec(
            instance_id=new_instance_id("probe"), reference=source.reference,
            digest=source.digest, ttl_s=60.0, engine="fake", job_id="j1",
        )  # fmt: skip
        (outcome,) = await host.start([spec])
        if isinstance(outcome, AenvError):
            raise outcome
        return host, spec, host._sandboxes[spec.instance_id]

    yield make
    for host in hosts:
        await host.close()


@pytest.mark.parametrize(
    ("wants", "policy", "may"),
    [
        (True, Policy(), True),
        (False, Policy(), False),
        (True, STRICT.model_copy(update={"engines": ("fake",)}), False),
        (
            True,
            STRICT.model_copy(update={"engines": ("fake",), "chat_models": ("pro*",)}),
            True,
        ),
    ],
)
async def test_an_instance_may_ask_if_its_project_requests_it_and_the_operator_allows_it(
    start: Start, wants: bool, policy: Policy, may: bool
) -> None:
    _, _, sandbox = await start(wants=wants, policy=policy)
    assert (CHAT_METHOD in sandbox.services) is may
    if may:
        assert await sandbox.services[CHAT_METHOD]({}) == b"{}"


@pytest.mark.parametrize(
    ("wants", "policy"),
    [(True, Policy()), (False, Policy()), (True, STRICT.model_copy(update={"engines": ("fake",)}))],
)
async def test_a_key_that_is_missing_is_told_before_a_sandbox_starts(
    start: Start, engine: SpyEngine, monkeypatch: pytest.MonkeyPatch, wants: bool, policy: Policy
) -> None:
    """Only to projects that may ask the model."""
    monkeypatch.delenv("MODEL_KEY", raising=False)
    if wants and policy.allows_chat_model("probe"):
        with pytest.raises(ConfigError, match="names MODEL_KEY, which is not set") as raised:
            await start(wants=wants, policy=policy, key_env="MODEL_KEY")
        assert "unset AENV_CHAT_MODEL_KEY_ENV" in str(raised.value.hint)
        assert await engine.running() == []
    else:
        await start(wants=wants, policy=policy, key_env="MODEL_KEY")


async def test_a_key_that_is_set_or_not_named_is_no_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint on the node often needs none."""
    monkeypatch.setenv("MODEL_KEY", "sk")
    monkeypatch.delenv("AENV_CHAT_MODEL_KEY", raising=False)
    for key_env in ("MODEL_KEY", ""):
        await start(wants=True, policy=Policy(), key_env=key_env)


async def test_an_instance_whose_model_fails_is_lost(start: Start, engine: SpyEngine) -> None:
    """Invariant 2: the sandbox would not be believed, so its host ends it."""
    host, spec, sandbox = await start(wants=True, policy=Policy())
    request: dict[str, Any] = {"body": {"messages": [{"role": "user"}]}, "timeout_s": 5.0}
    with pytest.raises(EndpointUnavailable, match="503"):
        await sandbox.services[CHAT_METHOD](request)
    await host._endings.settle(10)
    assert await engine.running() == []
    (outcome,) = await host.start([spec])
    assert isinstance(outcome, SandboxLost)
    assert "the chat model that its code asked failed" in outcome.message


async def test_only_the_caller_can_say_whether_a_lack_of_room_is_an_outcome(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14: code of an agent may have asked, and claimed that a reward does."""

    async def full(*_: Any) -> bytes:
        raise CapacityExceeded("no room")

    monkeypatch.setattr(ModelRelay, "_asked", full)
    host, spec, sandbox = await start(wants=True, policy=Policy())
    with pytest.raises(CapacityExceeded):
        await sandbox.services[CHAT_METHOD]({"body": {"messages": [{}]}, "timeout_s": 5.0})
    await host._endings.settle(10)
    (outcome,) = await host.start([spec])
    assert isinstance(outcome, SandboxDiedInside)
    assert outcome.died_of is InsideCause.ROOM


async def test_a_bug_of_the_host_is_an_answer_and_no_outcome_of_the_episode(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 2: without an answer the sandbox would wait, and report something of its own."""

    async def broken(*_: Any) -> bytes:
        raise KeyError("secret")

    monkeypatch.setattr(ModelRelay, "_asked", broken)
    host, spec, sandbox = await start(wants=True, policy=Policy())
    request: dict[str, Any] = {"body": {"messages": [{"role": "user"}]}, "timeout_s": 5.0}
    with pytest.raises(InternalError, match="KeyError; the log of host") as raised:
        await sandbox.services[CHAT_METHOD](request)
    assert "secret" not in raised.value.message
    assert [vars(line)["instance"] for line in caplog.records if line.exc_info] == [
        spec.instance_id
    ]
    await host._endings.settle(10)
    (outcome,) = await host.start([spec])
    assert isinstance(outcome, SandboxLost)
