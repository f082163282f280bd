"""Rules of the packet filter."""

from __future__ import annotations

from aenv_ray.engines.docker.firewall import NOT_PUBLIC, Bridge, Opening

SCOPE = "session/docker"


def chain_of(rules: str, chain: str) -> list[str]:
    return [line.split(" ", 2)[2] for line in rules.splitlines() if line.startswith(f"-A {chain} ")]


def test_the_internet_excludes_addresses_that_are_not_public() -> None:
    bridge = Bridge(SCOPE)
    rules = chain_of(bridge.rules(()), bridge.chain)
    assert "ESTABLISHED" in rules[0]
    assert [rule.split()[1] for rule in rules[1:]] == list(NOT_PUBLIC)
    assert all(" -j REJECT " in rule for rule in rules[1:])


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
