"""What all control routes have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from aenv_ray.hub.records import Role
from tests.contract.gateway.gateway_bench import Bench, created

pytestmark = pytest.mark.redis


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/json"]
)
async def test_a_body_is_json_whatever_its_content_type(
    ann: httpx.AsyncClient, content_type: str | None
) -> None:
    made = await created(ann)
    headers = {} if content_type is None else {"Content-Type": content_type}
    path = f"/instances/{made['id']}/renew"
    renewed = await ann.post(path, content=b'{"ttl": "2h"}', headers=headers)
    assert renewed.json()["data"]["deadline"] > made["deadline"]


async def test_an_empty_body_is_an_empty_object(ann: httpx.AsyncClient) -> None:
    made = await created(ann)
    assert (await ann.post(f"/instances/{made['id']}/renew")).status_code == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"command": "\\ud800"}', b"[" * 5000])
async def test_an_invalid_body_is_refused_in_an_envelope(
    ann: httpx.AsyncClient, body: bytes
) -> None:
    answer = await ann.post("/env-instance", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "config_error"


async def test_an_invalid_field_is_named_and_the_way_out_too(ann: httpx.AsyncClient) -> None:
    answer = await ann.post("/instances", json={"envName": "probe", "count": 0, "ttl": "soon"})
    error = answer.json()["error"]
    assert "field count: Input should be greater than or equal to 1" in error["message"]
    assert "field ttl: ttl 'soon' is not a duration: write it as 90s" in error["message"]
    assert error["hint"] == "GET /openapi.json describes every route"


@pytest.mark.parametrize(
    ("path", "parameter"), [("/instances?stauts=Running", "stauts"), ("/env?limit=0", "limit")]
)
async def test_an_invalid_query_parameter_is_named(
    ann: httpx.AsyncClient, path: str, parameter: str
) -> None:
    answer = await ann.get(path)
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(f"query parameter {parameter}: ")


@pytest.mark.parametrize(("secret", "status"), [(None, 401), ("wrong", 401), ("agent", 403)])
async def test_a_body_is_not_read_before_the_token_is_checked(
    bench: Bench, secret: str | None, status: int
) -> None:
    """Otherwise anybody could make a replica hold 64 MiB per connection."""
    if secret == "agent":
        secret = await bench.token(Role.AGENT, "ann", "probe-abcdefgh")
    pieces_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal pieces_read
        pieces_read += 1
        yield b"{}"

    async with bench.client(secret) as http:
        answer = await http.post("/env-instance", content=body())
    assert (answer.status_code, pieces_read) == (status, 0)


async def test_get_routes_answer_head(ann: httpx.AsyncClient) -> None:
    assert (await ann.head("/instances")).status_code == 200
    refused = await ann.delete("/health")
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}


async def test_unknown_paths_answer_in_the_envelope(ann: httpx.AsyncClient) -> None:
    answer = await ann.get("/nowhere")
    assert answer.json()["error"]["hint"] == "GET /openapi.json lists all routes"
    assert answer.status_code == answer.json()["code"] == 404
