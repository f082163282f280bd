"""Packages come to uv from where pip's configuration says."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from aenv_ray.engines.node.installer import (
    pip_settings,
    uv_options,
    uv_variables,
    without_passwords,
)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No configuration of pip or uv."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


def test_uv_takes_packages_from_where_pip_would(bare: pytest.MonkeyPatch) -> None:
    """By variables, which only its own user sees: an address may hold a password."""
    bare.setenv("PIP_INDEX_URL", "https://me:pw@index.example/simple")
    bare.setenv("PIP_EXTRA_INDEX_URL", "https://a.example https://b.example")
    bare.setenv("PIP_FIND_LINKS", "/srv/a /srv/b")
    bare.setenv("PIP_NO_INDEX", "true")
    for name in ("SSL_CERT_FILE", "ALL_PROXY"):
        bare.delenv(name, raising=False)
    assert uv_options() == ["--no-index"]
    assert uv_variables() == {
        "UV_DEFAULT_INDEX": "https://me:pw@index.example/simple",
        "UV_INDEX": "https://a.example https://b.example", "UV_FIND_LINKS": "/srv/a,/srv/b",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }  # fmt: skip
    bare.setenv("UV_DEFAULT_INDEX", "https://index.example/simple")
    assert uv_options() == []
    assert uv_variables() == {}


def test_uv_reaches_it_as_pip_would(bare: pytest.MonkeyPatch) -> None:
    bare.delenv("SSL_CERT_FILE", raising=False)
    bare.setenv("UV_DEFAULT_INDEX", "https://index.example/simple")
    bare.setenv("PIP_PROXY", "http://proxy.example:3128")
    bare.setenv("PIP_CERT", "/certs.pem")
    bare.setenv("ALL_PROXY", "http://own.example")
    assert uv_variables() == {"SSL_CERT_FILE": "/certs.pem"}
    bare.delenv("ALL_PROXY")
    assert uv_variables() == {
        "SSL_CERT_FILE": "/certs.pem", "ALL_PROXY": "http://proxy.example:3128",
    }  # fmt: skip


def test_pip_configuration_files_count(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nextra_index_url = https://a.example/simple\ntimeout = 3\n")
    bare.setenv("PIP_CONFIG_FILE", str(file))
    assert pip_settings()["extra-index-url"] == "https://a.example/simple"
    assert "timeout" not in pip_settings()


def test_a_user_without_a_home_has_the_machines_configuration(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in containers that run as any user id."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    (tmp_path / "~" / ".pip").mkdir(parents=True)
    (tmp_path / "~" / ".pip" / "pip.conf").write_text("[global]\nindex-url = https://no.example\n")
    bare.chdir(tmp_path)
    bare.delenv("HOME")
    bare.delenv("PIP_CONFIG_FILE")
    bare.setattr(pwd, "getpwuid", nobody)
    bare.setenv("PIP_EXTRA_INDEX_URL", "https://index.example/simple")
    found = pip_settings()
    assert found["extra-index-url"] == "https://index.example/simple"
    assert found.get("index-url") != "https://no.example"


@pytest.mark.parametrize("password", ["plain", "sl/ash", 'quo"te', "a@t"])
def test_passwords_of_addresses_are_left_out_of_words(
    bare: pytest.MonkeyPatch, password: str
) -> None:
    address = f"https://me:{password}@index.example/simple"
    bare.setenv("PIP_EXTRA_INDEX_URL", f"https://a.example/simple {address}")
    words = f"error: invalid value '{address}' for 'UV_INDEX': invalid port number"
    assert without_passwords(words) == words.replace(f"me:{password}@", "****@")
    assert without_passwords("at https://u:p@else.example") == "at https://****@else.example"
