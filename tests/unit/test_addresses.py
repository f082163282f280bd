"""Which addresses are local, which requests a proxy gets, and how long servers ask to wait."""

from __future__ import annotations

import pytest

from aenv_ray.addresses import is_loopback, is_proxied, local_host, retry_after_s


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("localhost", True), ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True),
        ("[::1]", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False), ("::ffff:10.0.0.1", False),
        ("localhost.example", False), ("", False),
    ],
)  # fmt: skip
def test_loopback(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


@pytest.mark.parametrize(
    ("listens_on", "host"),
    [("0.0.0.0", "127.0.0.1"), ("", "127.0.0.1"), ("::", "[::1]"), ("fd00::1", "[fd00::1]")],
)
def test_what_listens_on_all_addresses_is_reached_on_loopback(listens_on: str, host: str) -> None:
    assert local_host(listens_on) == host


def test_loopback_is_reached_without_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert is_proxied("http://model.example/v1")
    assert not is_proxied("http://127.0.0.1:8000/v1")
    monkeypatch.setenv("no_proxy", "model.example")
    assert not is_proxied("http://model.example/v1")


@pytest.mark.parametrize(
    ("asked", "pause_s"),
    [
        ("2", 2.0), ("0.5", 0.5), ("", 7.0), ("soon", 7.0), ("-3", 7.0),
        ("Fri, 02 Jan 2026 10:00:09 GMT", 9.0), ("Fri, 02 Jan 2026 09:00:00 GMT", 0.0),
    ],
)  # fmt: skip
def test_a_pause_is_a_number_or_a_date(asked: str, pause_s: float) -> None:
    headers = {"Retry-After": asked, "Date": "Fri, 02 Jan 2026 10:00:00 GMT"}
    assert retry_after_s(headers, default=7.0) == pause_s
