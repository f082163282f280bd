"""What tokens and addresses reach on the data path: instances of their owner, or of an agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import HTTPConnection

from aenv_ray.errors import Forbidden, InstanceNotFound, Unauthorized
from aenv_ray.hub.records import Lease, Role, TokenRecord, unknown_instance
from aenv_ray.serve.gateway.auth import HubAuthenticator, Principal
from aenv_ray.serve.gateway.data.targets import Targets
from aenv_ray.serve.gateway.signing import Signer
from tests.fake_clock import FakeClock


async def _agent(_: HTTPConnection) -> Principal:
    return Principal(Role.AGENT, "ann", "probe-1", "t")


def _asking(instance_id: str) -> HTTPConnection:
    return HTTPConnection({"type": "http", "path_params": {"instance_id": instance_id}})


async def test_an_agent_reaches_the_tools_of_its_instance_and_nothing_else() -> None:
    """Invariant 8; and its call ids are not those of the owner (invariant 14)."""
    deps: Any = SimpleNamespace(authenticate=_agent, clock=FakeClock())
    targets = Targets(deps)
    with pytest.raises(Forbidden, match="another instance"):
        await targets.of_path(_asking("probe-2"))
    target = await targets.of_path(_asking("probe-1"))
    with pytest.raises(Forbidden, match="only list and call the tools"):
        target.check_not_agent()
    assert target.scoped({"aenv/call_id": "graded"}) == {"aenv/call_id": "agent graded"}


LEASE = Lease(
    id="probe-1", reference="probe@1.0.0", digest="d", owner="ann", created_at=0.0, deadline=60.0,
    capability="nameless",
)  # fmt: skip
CACHE_S = 2.0


class _Hub:
    """A hub with one lease, and tokens."""

    def __init__(self) -> None:
        self.lease_is = LEASE
        self.tokens = {
            f"{owner}s": TokenRecord(id=f"{owner}s", role=role, owner=owner, created_at=0.0)
            for owner, role in {"ann": Role.USER, "bob": Role.USER, "root": Role.ADMIN}.items()
        }

    async def lease(self, instance_id: str) -> Lease:
        assert instance_id == LEASE.id
        return LEASE

    async def lease_of_capability(self, capability: str) -> Lease:
        assert capability == self.lease_is.capability
        return self.lease_is

    async def token(self, token_id: str) -> TokenRecord | None:
        return self.tokens.get(token_id)

    async def remember(self, key: str, value: str, ttl_s: float) -> str:
        del key, value, ttl_s
        return "the gateway's key"


@pytest.mark.parametrize(
    ("principal", "is_allowed"),
    [
        (Principal(Role.USER, "ann", None, "t"), True),
        (Principal(Role.PUBLISHER, "bob", None, "t"), False),
        (Principal(Role.ADMIN, "root", None, "t"), True),
    ],
)
async def test_an_owner_reaches_their_own_instances_only(
    principal: Principal, is_allowed: bool
) -> None:
    """Invariant 15: to another owner, the instance does not exist."""

    async def authenticate(_: HTTPConnection) -> Principal:
        return principal

    targets = Targets(SimpleNamespace(authenticate=authenticate, clock=FakeClock(), hub=_Hub()))  # type: ignore[arg-type]
    for _ in ("asked", "remembered"):
        if is_allowed:
            assert (await targets.of_path(_asking("probe-1"))).instance_id == "probe-1"
        else:
            with pytest.raises(InstanceNotFound) as refused:
                await targets.of_path(_asking("probe-1"))
            unknown = unknown_instance("probe-1")
            assert (refused.value.message, refused.value.hint) == (unknown.message, unknown.hint)


class _Addresses:
    """A gateway's addresses, for the one lease of its hub."""

    def __init__(self) -> None:
        self.clock = FakeClock(100.0)
        self.hub = _Hub()
        self.signer = Signer(self.hub, self.clock)  # type: ignore[arg-type]
        authenticate = HubAuthenticator(self.hub, self.clock, CACHE_S)  # type: ignore[arg-type]
        deps: Any = SimpleNamespace(
            authenticate=authenticate, clock=self.clock, hub=self.hub, signer=self.signer
        )
        self._targets = Targets(deps)

    async def instance_at(self, address: str, instance_id: str = "") -> str:
        headers = {
            "AEnvCore-MCPProxy-URL": f"http://{address}:8081",
            "AEnvCore-EnvInstance-ID": instance_id,
        }
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items() if value]
        scope = {"type": "http", "headers": raw, "path": "/mcp", "server": ("g", 1)}
        return (await self._targets.of_headers(HTTPConnection(scope))).instance_id


async def test_an_address_is_of_one_instance() -> None:
    """Invariant 15: the id that a client sends beside an address does not choose another one."""
    gateway = _Addresses()
    address = await gateway.signer.address(LEASE.capability, "anns")
    for instance_id in ("probe-1", ""):
        assert await gateway.instance_at(address, instance_id) == "probe-1"
    with pytest.raises(InstanceNotFound, match="does not belong to probe-2"):
        await gateway.instance_at(address, "probe-2")


async def test_an_address_opens_no_more_than_the_token_that_it_was_shown_to() -> None:
    """Invariant 15: neither the capability alone, nor for another token, nor of another owner."""
    gateway = _Addresses()
    address = await gateway.signer.address(LEASE.capability, "anns")
    for forged in (
        LEASE.capability, f"{LEASE.capability}.anns", f"{LEASE.capability}.anns.",
        address.replace("anns", "roots"), address[:-1], f"x{address}", "127.0.0.1",
    ):  # fmt: skip
        with pytest.raises(InstanceNotFound, match="no instance has this address"):
            await gateway.instance_at(forged)
    assert await gateway.instance_at(await gateway.signer.address(LEASE.capability, "roots"))
    with pytest.raises(InstanceNotFound):
        await gateway.instance_at(await gateway.signer.address(LEASE.capability, "bobs"))


async def test_an_address_ends_with_the_token_that_it_was_shown_to() -> None:
    """Invariant 15: the hub knows neither revoked tokens nor those that have expired."""
    gateway = _Addresses()
    address = await gateway.signer.address(LEASE.capability, "anns")
    assert await gateway.instance_at(address) == "probe-1"
    del gateway.hub.tokens["anns"]
    gateway.clock.advance(CACHE_S + 0.1)
    with pytest.raises(Unauthorized):
        await gateway.instance_at(address)


async def test_clients_of_instances_of_an_earlier_version_keep_their_addresses() -> None:
    """They were the capability alone."""
    gateway = _Addresses()
    gateway.hub.lease_is = LEASE.model_copy(update={"capability": "i0123"})
    assert await gateway.instance_at("i0123") == "probe-1"
    assert await gateway.instance_at(await gateway.signer.address("i0123", "anns")) == "probe-1"
