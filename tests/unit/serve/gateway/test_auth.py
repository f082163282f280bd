"""Authentication and rate limits of the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable, RateLimited, Unauthorized
from aenv_ray.hub.records import Role, TokenRecord
from aenv_ray.serve.gateway import auth
from aenv_ray.serve.gateway.auth import HubAuthenticator, RequestRate, bearer_of
from tests.fake_clock import FakeClock

OWNER = TokenRecord(id="t1", role=Role.PUBLISHER, owner="ann", created_at=0.0)


class Tokens:
    """The part of a hub that knows tokens; it counts lookups."""

    def __init__(self) -> None:
        self.known: dict[str, TokenRecord] = {"good": OWNER}
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None

    async def check_token(self, secret: str) -> TokenRecord | None:
        self.asked += 1
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return self.known.get(secret)

    async def token(self, token_id: str) -> TokenRecord | None:
        self.asked += 1
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return next((one for one in self.known.values() if one.id == token_id), None)


def request(token: str | None) -> Request:
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    return Request({"type": "http", "headers": headers})


@pytest.fixture
def hub() -> Any:
    return Tokens()


async def test_many_requests_with_one_token_ask_the_hub_once(hub: Any) -> None:
    authenticate = HubAuthenticator(hub, FakeClock(), 2.0)
    hub.gate.clear()
    waiting = [asyncio.create_task(authenticate(request("good"))) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # one cancelled request must not cancel the others
    hub.gate.set()
    outcomes = [await task for task in waiting[1:]]
    assert {principal.owner for principal in outcomes} == {"ann"}
    assert hub.asked == 1


async def test_an_unknown_token_is_cached_for_a_short_time(hub: Any) -> None:
    clock = FakeClock()
    authenticate = HubAuthenticator(hub, clock, 2.0)
    for _ in range(3):
        with pytest.raises(Unauthorized):
            await authenticate(request("new"))
    assert hub.asked == 1
    hub.known["new"] = OWNER
    clock.advance(2.1)
    assert (await authenticate(request("new"))).token_id == "t1"
    del hub.known["new"]
    clock.advance(2.1)
    with pytest.raises(Unauthorized):
        await authenticate(request("new"))


async def test_an_expired_token_is_refused_at_once(hub: Any) -> None:
    clock = FakeClock(100.0)
    hub.known["short"] = OWNER.model_copy(update={"expires_at": 100.5})
    authenticate = HubAuthenticator(hub, clock, 60.0)
    await authenticate(request("short"))
    del hub.known["short"]
    clock.advance(0.6)
    with pytest.raises(Unauthorized):
        await authenticate(request("short"))


async def test_an_unavailable_hub_does_not_refuse_a_token(hub: Any) -> None:
    """The error is retryable, and nothing is cached."""
    authenticate = HubAuthenticator(hub, FakeClock(), 60.0)
    hub.failure = FabricUnavailable("away")
    with pytest.raises(FabricUnavailable):
        await authenticate(request("good"))
    hub.failure = None
    assert (await authenticate(request("good"))).owner == "ann"


async def test_an_admitted_request_is_refused_once_its_token_is_revoked(hub: Any) -> None:
    clock = FakeClock()
    authenticate = HubAuthenticator(hub, clock, 2.0)
    admitted = request("good")
    await authenticate(admitted)
    del hub.known["good"]
    await authenticate.check_again(admitted)
    assert hub.asked == 1  # one lookup serves both checks
    clock.advance(2.1)
    for _ in range(2):
        with pytest.raises(Unauthorized):
            await authenticate.check_again(admitted)
    assert hub.asked == 2
    await authenticate.check_again(request(None))  # an address of an earlier version


@pytest.mark.parametrize(
    ("failure", "is_silent"),
    [
        (FabricUnavailable("away"), True),
        (FabricUnavailable("away"), False),
        (ConfigError("Redis refuses the password", hint="set AENV_REDIS_PASSWORD"), False),
    ],
)
async def test_an_admitted_request_does_not_need_the_hub(
    hub: Any, failure: AenvError, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is not lost, and comes although the hub waits for its Redis."""
    clock = FakeClock()
    monkeypatch.setattr(auth, "AGAIN_S", 0.01)
    authenticate = HubAuthenticator(hub, clock, 2.0)
    admitted = request("good")
    await authenticate(admitted)
    clock.advance(2.1)
    hub.failure = failure
    if is_silent:
        hub.gate.clear()
    async with asyncio.timeout(30):
        await authenticate.check_again(admitted)
    hub.gate.set()


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic eDp5", "Bearer " + "x" * 600])
def test_a_header_without_a_bearer_token_is_refused(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        bearer_of(header)


def test_each_token_has_its_own_refilling_bucket() -> None:
    clock = FakeClock()
    rate = RequestRate(2.0, 3, clock)
    for _ in range(3):
        rate.take("a")
    with pytest.raises(RateLimited) as caught:
        rate.take("a")
    assert caught.value.retry_after_s == pytest.approx(0.5)
    rate.take("b")
    clock.advance(0.5)
    rate.take("a")
    with pytest.raises(RateLimited):
        rate.take("a")
