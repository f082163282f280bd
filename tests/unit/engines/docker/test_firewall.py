"""Rules of the packet filter."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from aenv_ray.engines.docker.firewall import Bridge, Opening
from aenv_ray.project.destinations import NOT_PUBLIC

SCOPE = "session/docker"


def chain_of(rules: str, chain: str) -> list[str]:
    return [line.split(" ", 2)[2] for line in rules.splitlines() if line.startswith(f"-A {chain} ")]


def test_the_internet_excludes_addresses_that_are_not_public() -> None:
    bridge = Bridge(SCOPE)
    rules = chain_of(bridge.rules(()), bridge.chain)
    assert "ESTABLISHED" in rules[0]
    assert [rule.split()[1] for rule in rules[1:]] == list(NOT_PUBLIC)
    assert all(" -j REJECT " in rule for rule in rules[1:])


@pytest.mark.parametrize(
    "address",
    ["10.1.2.3", "172.31.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "127.0.0.1",
     "198.18.0.1", "0.0.0.0", "192.0.0.8", "224.0.0.1", "255.255.255.255"],
)  # fmt: skip
def test_no_private_address_is_part_of_the_internet(address: str) -> None:
    """Invariant 7: other nodes, the metadata service of a cloud, carriers' and test networks."""
    assert any(ip_address(address) in ip_network(block) for block in NOT_PUBLIC)


@pytest.mark.parametrize("allow", [(), ("a.org",)])
def test_sandboxes_of_a_bridge_do_not_reach_each_other(allow: tuple[str, ...]) -> None:
    """Invariant 7; the rules are those of IPv4, so there is no IPv6."""
    body = Bridge(SCOPE, allow).body()
    assert body["Options"]["com.docker.network.bridge.enable_icc"] == "false"
    assert body["EnableIPv6"] is False


def test_an_allow_list_allows_nothing_else_and_never_the_node() -> None:
    bridge = Bridge(SCOPE, ("a.org:443", "10.0.0.0/8"))
    text = bridge.rules({Opening("10.0.0.0/8"), Opening("1.2.3.4/32", 443)})
    assert chain_of(text, bridge.chain)[1:] == [
        "-d 1.2.3.4/32 -p tcp --dport 443 -j RETURN",
        "-d 10.0.0.0/8 -j RETURN",
        "-j REJECT --reject-with icmp-port-unreachable",
    ]
    assert [rule.split()[-3] for rule in chain_of(text, f"{bridge.chain}-IN")[1:]] == ["REJECT"]


def test_names_are_short_enough_and_unique_by_list_and_scope() -> None:
    bridges = [
        Bridge(SCOPE), Bridge("other/docker"), Bridge(SCOPE, ("a.org",)), Bridge(SCOPE, ("b.org",)),
        Bridge("other/docker", ("a.org",)),
    ]  # fmt: skip
    for part in ("name", "interface", "chain"):
        assert len({getattr(bridge, part) for bridge in bridges}) == len(bridges)
    assert all(len(bridge.interface) <= 15 for bridge in bridges)
    assert all(len(f"{bridge.chain}-IN") <= 28 for bridge in bridges)
    assert Bridge(SCOPE, ("a.org", "b.org")).chain == Bridge(SCOPE, ("b.org", "a.org")).chain
    assert Bridge(SCOPE, ("a.org",)).chain.startswith(f"{Bridge(SCOPE).chain}-")
