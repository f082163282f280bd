"""Logins for registries: wherever Docker stores them, and never in a message."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.images import credentials as docker_credentials
from aenv_ray.engines.images.credentials import Credentials

SECRET = "none of your business"
HUB_KEY = "https://index.docker.io/v1/"


def basic(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def credentials(directory: Path, config: Any) -> Credentials:
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.json").write_text(text)
    return Credentials(directory)


def helper(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make the program ``docker-credential-tests``."""
    path = directory / "docker-credential-tests"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def decoded(header: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(header))


@pytest.mark.parametrize("key", ["ghcr.io", "https://ghcr.io", "https://ghcr.io/v2/"])
async def test_a_login_in_the_file_is_found_by_any_form_of_the_name(tmp_path, key):
    own = credentials(tmp_path, {"auths": {key: {"auth": basic("me", "a:b")}}})
    login = await own.login("ghcr.io")
    assert decoded(login.header) == {
        "username": "me", "password": "a:b", "serveraddress": "ghcr.io",
    }  # fmt: skip
    assert (await own.login("gcr.io")).auth is None


async def test_the_login_for_docker_hub_has_its_own_key(tmp_path):
    own = credentials(tmp_path, {"auths": {HUB_KEY: {"identitytoken": SECRET}}})
    login = await own.login("docker.io")
    assert login.auth == {"identitytoken": SECRET, "serveraddress": HUB_KEY}


async def test_without_a_file_there_is_no_login_and_no_problem(tmp_path):
    login = await Credentials(tmp_path / "nowhere").login("ghcr.io")
    assert (login.auth, login.problem) == (None, "")
    assert decoded(login.header) == {}


async def test_a_helper_is_used_for_its_registry_and_the_store_for_all_others(
    tmp_path, monkeypatch
):
    helper(
        tmp_path,
        monkeypatch,
        f'[ "$1" = get ] && printf \'{{"ServerURL":"x","Username":"%s","Secret":"{SECRET}"}}\' '
        '"$(cat)"',
    )
    own = credentials(tmp_path, {"credHelpers": {"ghcr.io": "tests"}, "credsStore": "tests"})
    for registry, key in (("ghcr.io", "ghcr.io"), ("docker.io", HUB_KEY)):
        login = await own.login(registry)
        assert login.auth == {"username": key, "password": SECRET, "serveraddress": key}


async def test_a_helper_may_return_a_token(tmp_path, monkeypatch):
    helper(tmp_path, monkeypatch, f'echo \'{{"Username":"<token>","Secret":"{SECRET}"}}\'')
    own = credentials(tmp_path, {"credsStore": "tests"})
    assert (await own.login("ghcr.io")).auth == {
        "identitytoken": SECRET, "serveraddress": "ghcr.io",
    }  # fmt: skip


async def test_the_file_is_used_if_the_helper_has_no_login(tmp_path, monkeypatch):
    helper(tmp_path, monkeypatch, "echo credentials not found in native keychain; exit 1")
    auths = {"ghcr.io": {"auth": basic("me", "word")}}
    own = credentials(tmp_path, {"credsStore": "tests", "auths": auths})
    login = await own.login("ghcr.io")
    assert login.auth is not None
    assert login.problem == ""


@pytest.mark.parametrize(
    ("config", "script", "problem"),
    [
        ("{", "", "config.json cannot be read"),
        ("[]", "", "is not a JSON object"),
        ({"auths": ["x"]}, "", "auths in"),
        ({"auths": {"ghcr.io": {"auth": SECRET}}}, "", "not base64 of USER:PASSWORD"),
        (
            {"credsStore": "absent"},
            "",
            "docker-credential-absent, which Docker's config",
        ),
        ({"credsStore": "../tests"}, "", "is not on PATH"),
        ({"credsStore": "tests"}, f"echo '{SECRET}'; exit 2", "failed with exit code 2"),
        (
            {"credsStore": "tests"},
            f"echo '{SECRET}'",
            "printed no valid answer of a credential helper",
        ),
    ],
)
async def test_problems_are_reported_without_the_secret(
    tmp_path, monkeypatch, caplog, config, script, problem
):
    """Invariant 10."""
    caplog.set_level(logging.DEBUG)
    helper(tmp_path, monkeypatch, script)
    login = await credentials(tmp_path, config).login("ghcr.io")
    assert login.auth is None
    assert problem in login.problem
    assert problem in caplog.text
    assert SECRET not in caplog.text + login.problem


async def test_a_helper_that_hangs_is_killed(tmp_path, monkeypatch):
    """Invariant 9."""
    monkeypatch.setattr(docker_credentials, "HELPER_DEADLINE_S", 0.2)
    helper(tmp_path, monkeypatch, "exec sleep 600")
    login = await credentials(tmp_path, {"credsStore": "tests"}).login("ghcr.io")
    assert "did not answer within 0.2 s" in login.problem


async def test_the_repr_of_a_login_has_no_secret(tmp_path):
    own = credentials(tmp_path, {"auths": {"ghcr.io": {"auth": basic("me", SECRET)}}})
    assert SECRET not in repr(await own.login("ghcr.io"))
