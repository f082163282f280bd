"""The blocking gateway client: addresses, calls, and the errors that responses become."""

from __future__ import annotations

import hashlib
import json

import httpx
import pytest

from aenv_ray.client.gateway import Gateway
from aenv_ray.client.gateway_http import GatewayHttp, GatewayPolicy, parse_url
from aenv_ray.client.gateway_records import InstanceAnswer
from aenv_ray.errors import (
    ERRORS,
    CallOutcomeUnknown,
    ConfigError,
    FabricUnavailable,
    Forbidden,
    InstanceNotFound,
    InternalError,
    QuotaExceeded,
    RateLimited,
    Unauthorized,
    to_wire,
)


@pytest.mark.parametrize(("data", "where"), [({"id": 3}, "id: "), ("hi", "the response: ")])
def test_a_malformed_response_is_refused_with_the_field(data, where):
    with pytest.raises(FabricUnavailable, match=f"not the response of a gateway: {where}"):
        InstanceAnswer.read(data)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("host", "http://host:8080"),
        (" http://host/ ", "http://host:8080"),
        ("host:81", "http://host:81"),
        ("https://host", "https://host"),
        ("https://host:8443/prefix/", "https://host:8443/prefix"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses(text, url):
    assert parse_url(text) == url


@pytest.mark.parametrize("text", ["", "ftp://host", "http://", "http://h:99999", "http://h?x=1"])
def test_an_invalid_address_is_a_config_error(text):
    with pytest.raises(ConfigError):
        parse_url(text)


def test_a_secret_in_an_address_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        parse_url("http://user:hunter2@host")
    assert "hunter2" not in str(caught.value)


# --- repeating ----------------------------------------------------------------------------------

REFUSED = httpx.ConnectError("refused")
LOST = httpx.ReadError("reset")


@pytest.mark.parametrize(
    ("error", "repeatable", "again"),
    [
        (REFUSED, False, True),  # it was never sent
        (LOST, False, False),
        (LOST, True, True),
        (httpx.RemoteProtocolError("closed"), True, True),
        (httpx.ReadTimeout("slow"), True, False),  # it took all the time it was given
        (FabricUnavailable("away"), True, True),
        (FabricUnavailable("away"), False, False),
        (RateLimited("slow down", retry_after_s=2.0), False, True),
        (RateLimited("slow down", retry_after_s=3600.0), True, False),
        (QuotaExceeded("full"), True, False),
        (InstanceNotFound("gone"), True, False),
        (InternalError("bug"), True, False),
    ],
)
def test_what_is_sent_again(error, repeatable, again):
    policy = GatewayPolicy("gateway", None)
    pause_s = policy.pause_before_retry(error, attempt=1, repeatable=repeatable)
    assert (pause_s is not None) == again


class Server:
    """Answers from a list; remembers what it was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[httpx.Request] = []
        self.bodies: list[bytes] = []
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        self.bodies.append(request.read())
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, token: str | None = "secret") -> Gateway:
        transport = httpx.MockTransport(self)
        return Gateway(GatewayHttp("gateway", token, transport=transport, sleep=self.pauses.append))


def good(data, **headers: str) -> httpx.Response:
    body = {"success": True, "code": 0, "message": "", "data": data}
    return httpx.Response(200, json=body, headers=headers)


def bad(error) -> httpx.Response:
    body = {"success": False, "code": error.http_status, "message": error.message}
    return httpx.Response(error.http_status, json={**body, "error": to_wire(error)})


def test_a_create_whose_response_was_lost_is_repeated_with_the_same_key():
    server = Server(LOST, good([{"id": "a-1", "status": "Running"}]))
    with server.client() as gateway:
        (made,) = gateway.create("a", {"ttl": "1m"})
    assert made.id == "a-1"
    first, second = (request.headers["Idempotency-Key"] for request in server.asked)
    assert first == second
    assert len(first) >= 16


def test_a_command_whose_response_was_lost_is_not_sent_again():
    server = Server(LOST)
    with server.client() as gateway, pytest.raises(CallOutcomeUnknown, match="was lost"):
        gateway.exec("a-1", ["rm", "x"], 5.0)
    assert len(server.asked) == 1


def test_a_token_request_whose_response_was_lost_is_not_sent_again():
    server = Server(LOST)
    with server.client() as gateway, pytest.raises(CallOutcomeUnknown):
        gateway.create_token(role="owner")
    assert len(server.asked) == 1


def test_an_unreachable_gateway_is_tried_three_times_and_the_hint_says_what_to_do():
    server = Server(REFUSED, REFUSED, REFUSED)
    with server.client() as gateway, pytest.raises(FabricUnavailable) as caught:
        gateway.hub()
    assert len(server.pauses) == 2
    assert "aenv up" in str(caught.value.hint)


def test_an_upload_restarts_after_a_lost_connection_and_its_progress_adds_up():
    content = bytes(range(256)) * 4000
    server = Server(LOST, good(None))
    seen: list[int] = []
    with server.client() as gateway:
        gateway.upload(content, hashlib.sha256(content).hexdigest(), seen.append)
    assert server.bodies == [content, content]
    assert sum(seen) == len(content)


def test_a_download_is_checked_against_its_digest():
    content = b"x" * 1_000_000
    digest = hashlib.sha256(content).hexdigest()
    server = Server(httpx.Response(200, content=content), httpx.Response(200, content=b"other"))
    with server.client() as gateway:
        assert gateway.download(digest) == content
        with pytest.raises(FabricUnavailable, match="arrived with digest"):
            gateway.download(digest)


def test_a_missing_archive_is_not_an_error():
    server = Server(httpx.Response(404), httpx.Response(200))
    with server.client() as gateway:
        assert not gateway.has_artifact("a" * 64)
        assert gateway.has_artifact("a" * 64)


def test_an_instance_is_followed_until_it_ends():
    def event(status: str) -> str:
        return f'event: status\ndata: {{"id": "a-1", "status": "{status}"}}\n\n'

    stream = ": still so\n\n".join(map(event, ("Pending", "Running", "Terminated", "Running")))
    broken = 'event: error\ndata: {"code": "fabric_unavailable", "message": "away"}\n\n'
    server = Server(
        httpx.Response(200, text=stream),
        httpx.Response(200, text=event("Running")),
        httpx.Response(200, text=broken),
    )
    with server.client() as gateway:
        seen = [one.status for one in gateway.follow("a-1")]
        assert seen == ["Pending", "Running", "Terminated"]
        for _ in range(2):
            with pytest.raises(FabricUnavailable):
                list(gateway.follow("a-1"))


# --- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [e for e in ERRORS if not issubclass(e, RateLimited)])
def test_every_error_arrives_as_itself(cls):
    server = Server(*[bad(cls("what", hint="how"))] * 3)
    with server.client() as gateway, pytest.raises(cls) as caught:
        gateway.environment("a")
    assert type(caught.value) is cls
    assert (caught.value.message, caught.value.hint) == ("what", "how")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (httpx.Response(401, text="no"), Unauthorized),
        (httpx.Response(403, text="no"), Forbidden),
        (httpx.Response(502, text="<html>bad gateway"), FabricUnavailable),
        (httpx.Response(500, json={"success": False, "message": "boom"}), InternalError),
        (httpx.Response(200, text="<html>hello"), ConfigError),
        (httpx.Response(302, headers={"Location": "http://evil/"}), ConfigError),
        (httpx.Response(200, json=[1]), ConfigError),
        (good({"no": "name"}), FabricUnavailable),
    ],
)
def test_responses_of_other_servers_become_errors(answer, error):
    server = Server(*[answer] * 3)
    with server.client() as gateway, pytest.raises(error) as caught:
        gateway.environment("a", "1")
    assert type(caught.value) is error
    assert all(request.url.host == "gateway" for request in server.asked), "never followed"


def test_a_listing_is_read_page_by_page_up_to_its_limit():
    def row(n: int) -> dict[str, str]:
        return {"name": "a", "version": str(n)}

    first = good([row(n) for n in range(200)], **{"X-Next-Cursor": "c1"})
    second = good([row(n) for n in range(200, 220)], **{"X-Next-Cursor": "c2"})
    server = Server(first, second)
    with server.client() as gateway:
        found = gateway.environments(210, offset=10, tag="x", name=None)
    assert [one.version for one in found] == [str(n) for n in range(10, 220)]
    asked = [dict(request.url.params) for request in server.asked]
    assert asked == [
        {"tag": "x", "limit": "200"},
        {"tag": "x", "limit": "20", "cursor": "c1"},
    ]


def test_names_in_a_path_are_quoted():
    server = Server(good({"name": "a", "version": "1"}))
    with server.client() as gateway:
        gateway.environment("../../tokens?x", "1/2")
        with pytest.raises(ConfigError):
            gateway.instance("..")
    assert server.asked[0].url.raw_path == b"/env/..%2F..%2Ftokens%3Fx/1%2F2"


def test_a_token_is_sent_and_never_shown():
    server = Server(good({"id": "t1", "token": "made-secret"}))
    with server.client() as gateway:
        made = gateway.create_token(role="agent", instance_id="a-1", note=None)
    assert server.asked[0].headers["Authorization"] == "Bearer secret"
    assert json.loads(server.bodies[0]) == {"role": "agent", "instance_id": "a-1"}
    assert "made-secret" not in repr(made)
