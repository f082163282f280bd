"""Connections to chat models: what is verified, and what a key may be."""

from __future__ import annotations

import ssl

import pytest

from aenv_ray import chat_endpoint
from aenv_ray.config import secret
from aenv_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "mode"),
    [
        ("https://model.example/v1", ssl.CERT_REQUIRED),
        ("HTTPS://model.example/v1", ssl.CERT_REQUIRED),
        ("http://127.0.0.1:8000/v1", ssl.CERT_NONE),
    ],
)
async def test_the_certificate_is_verified_however_the_scheme_is_written(
    url: str, mode: ssl.VerifyMode
) -> None:
    async with chat_endpoint.new_client(url) as client:
        pool = client._transport._pool  # type: ignore[attr-defined]  # httpx shows it nowhere else
        assert pool._ssl_context.verify_mode == mode


def test_a_key_with_a_line_break_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret\nmore")
    with pytest.raises(ConfigError, match="environment variable MY_KEY has line breaks") as caught:
        secret("MY_KEY")
    assert "sk-secret" not in str(caught.value)
    monkeypatch.setenv("MY_KEY", " sk-secret\n")
    assert secret("MY_KEY") == "sk-secret"
