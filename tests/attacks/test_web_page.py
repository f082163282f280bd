"""A web page in the browser of an author tries to use the author's `aenv run`."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.serving import PROJECT, serving


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(PROJECT, tmp_path_factory.mktemp("run")) as server:
        yield server.url


@pytest.mark.parametrize("page", ["another site", "another local port", "a file"])
def test_pages_of_other_origins_call_nothing(url: str, page: str) -> None:
    """Invariant 8: a page of somebody else has no door at all, also if this machine serves it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        origin = {
            "another site": "https://evil.example",
            "another local port": f"http://127.0.0.1:{other.getsockname()[1]}",
            "a file": "null",
        }[page]
    for path in ("/mcp", "/task/reward", "/functions/reset"):
        answer = httpx.post(f"{url}{path}", json={}, headers={"origin": origin})
        assert answer.status_code == 403, path
    assert httpx.post(f"{url}/functions/reset", json={}).status_code != 403


def test_dns_rebinding_is_refused(url: str) -> None:
    """Invariant 8: a page whose name now resolves to this machine has the server's own origin."""
    headers = {"host": "evil.example", "origin": "http://evil.example"}
    assert httpx.post(f"{url}/functions/reset", json={}, headers=headers).status_code == 421
