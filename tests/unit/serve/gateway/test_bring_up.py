"""What is decided before hub and gateway are brought up: how long to try, and with which token."""

from __future__ import annotations

import pytest

from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.hub.records import Role
from aenv_ray.serve.gateway import bring_up


def test_bring_up_retries_until_it_succeeds(monkeypatch):
    monkeypatch.setattr(bring_up, "_PAUSE_S", 0.0)
    problems = [FabricUnavailable("no Redis"), ConfigError("a port is taken"), None]

    def attempt() -> None:
        problem = problems.pop(0)
        if problem is not None:
            raise problem

    assert bring_up.persist(attempt, 60.0)
    assert problems == []


def test_bring_up_gives_up_in_time_and_says_why(caplog):
    def attempt() -> None:
        raise FabricUnavailable("no Redis")

    assert not bring_up.persist(attempt, 0.0)
    assert "no Redis" in caplog.text


@pytest.mark.parametrize("text", ["", "short", "x" * 31])
def test_a_short_token_is_refused(text, tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=f"has {len(text)} characters"):
        bring_up.read_secret(path)


def test_a_missing_token_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the administrator token"):
        bring_up.read_secret(tmp_path / "none")


async def test_a_token_with_another_role_is_refused():
    class Known:
        role = Role.PUBLISHER

    class FakeHub:
        async def check_token(self, secret: str) -> Known:
            return Known()

    with pytest.raises(ConfigError, match="role publisher"):
        await bring_up.keep_token(FakeHub(), "secret")
