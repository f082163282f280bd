"""Allow-lists as people write them: what is meant, and what cannot be kept."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.project.destinations import can_be_reached, is_public, parse_destination


@pytest.mark.parametrize(
    ("text", "name", "block", "port"),
    [
        ("pypi.org:443", "pypi.org", "", 443),
        (" Files.PythonHosted.org ", "files.pythonhosted.org", "", None),
        ("mirror:8080", "mirror", "", 8080),
        ("1and1.com", "1and1.com", "", None),
        ("10.1.0.0/16", "", "10.1.0.0/16", None),
        ("10.1.2.3:5432", "", "10.1.2.3/32", 5432),
        ("203.0.113.0/24:80", "", "203.0.113.0/24", 80),
    ],
)
def test_entries(text: str, name: str, block: str, port: int | None) -> None:
    entry = parse_destination(text, what="entry")
    assert (entry.name, entry.block, entry.port, entry.text) == (name, block, port, text)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (7, "not text"), ("", "not a name"), ("pypi.org:", "port"), ("pypi.org:0", "port"),
        ("pypi.org:65536", "port"), ("pypi.org:https", "port"), ("pypi.org:٤٤", "port"),
        ("*.pypi.org:443", r"wildcards are not supported"), ("https://pypi.org", "port"),
        ("a_b.org", "not a name"), ("-a.org", "not a name"), (f"{'a' * 64}.org", "not a name"),
        ("300.1.1.1", "not a name"), ("10.1.0.0/33", "not a name"), ("10.1.2.3/16", "host bits"),
        ("2001:db8::1", "only IPv4"), ("::/0", "only IPv4"),
        ("0.0.0.0/0", "127.0.0.0/8"), ("127.0.0.1:80", "sandboxes cannot reach"),
        ("169.254.169.254", "sandboxes cannot reach"), ("224.0.0.1", "sandboxes cannot reach"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(entry: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        parse_destination(entry, what="entry")
    assert raised.value.message.startswith(f"entry {entry!r}")
    assert raised.value.hint


def test_addresses_that_no_list_opens() -> None:
    assert can_be_reached("10.0.0.1")
    assert not can_be_reached("127.0.0.53")
    assert not can_be_reached("169.254.169.254")
    assert is_public("8.8.8.0/24")
    assert not is_public("10.1.0.0/16")


def deploy(**fields: Any) -> Any:
    return EnvironmentConfig.model_validate({"name": "x", "deployConfig": fields}).deploy


def test_an_allow_list_is_a_network() -> None:
    assert deploy(allow=["pypi.org:443"]).network == "allowlist"
    assert deploy(allow=["pypi.org:443"], network="allowlist").allow == ("pypi.org:443",)
    assert deploy(network="internet").allow is None
    again = EnvironmentConfig.model_validate(
        {"name": "x", "deployConfig": deploy(allow=["a.org"]).model_dump(by_alias=True)}
    )
    assert again.deploy.allow == ("a.org",)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"allow": ["a.org"], "network": "internet"}, r'deployConfig\.allow.*"internet"'),
        ({"allow": ["a.org"], "network": "none"}, r'deployConfig\.allow.*"none"'),
        ({"allow": []}, r"requires entries in deployConfig\.allow"),
        ({"network": "allowlist"}, r"requires entries in deployConfig\.allow"),
        ({"allow": ["a.org", "*.b.org"]}, r"deployConfig\.allow\[1\]"),
    ],
)
def test_a_list_that_would_not_hold_is_refused_by_field(fields: dict[str, Any], says: str) -> None:
    """A list is never silently ignored."""
    with pytest.raises(ConfigError, match=says):
        deploy(**fields)
