"""What the catalog decides: the order of versions, which content is the same, statuses, search."""

from __future__ import annotations

import contextlib
import itertools
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray import ids
from aenv_ray.errors import CatalogConflict, ConfigError
from aenv_ray.hub import catalog
from aenv_ray.hub.base import from_cursor, to_cursor
from aenv_ray.hub.records import EnvironmentStatus, EnvironmentVersion
from tests.contract.hub.hub_contract import entry
from tests.contract.hub.hub_contract_environments import is_found


def is_version(text: str) -> bool:
    return bool(ids._VERSION.fullmatch(text))


NUMBER = st.integers(0, 10**20).map(str)
# Joined texts: the same as from a pattern, of which Hypothesis takes several times as long to make.
LETTERS = string.ascii_letters + "-"
IDENTIFIER = st.one_of(
    NUMBER,
    st.builds(
        "{}{}{}".format,
        st.text(string.digits, max_size=6),
        st.sampled_from(LETTERS),
        st.text(string.digits + LETTERS, max_size=12),
    ),
)
SEMANTIC = st.builds(
    lambda core, pre: ".".join(core) + ("-" + ".".join(pre) if pre else ""),
    st.lists(NUMBER, min_size=3, max_size=3),
    st.lists(IDENTIFIER, max_size=3),
).filter(is_version)


def framed(ends: str, between: str, most_between: int) -> st.SearchStrategy[str]:
    """Return texts that begin and end with one of `ends`, be it the same."""
    end = st.sampled_from(ends)
    longer = st.builds("{}{}{}".format, end, st.text(ends + between, max_size=most_between), end)
    return end | longer


ANY = framed(string.ascii_letters + string.digits, "._+-", 20)
NAME = framed(string.ascii_lowercase + string.digits, "-", 6)


def compare(a: str, b: str) -> int:
    """Compare as semver.org §11 says, written as it says it."""

    def parts(text: str) -> tuple[list[int], list[str]]:
        core, _, pre = text.partition("-")
        return [int(n) for n in core.split(".")], pre.split(".") if pre else []

    (core_a, pre_a), (core_b, pre_b) = parts(a), parts(b)
    if core_a != core_b:
        return -1 if core_a < core_b else 1
    if not pre_a or not pre_b:
        return bool(pre_b) - bool(pre_a)
    for x, y in itertools.zip_longest(pre_a, pre_b):
        if x is None or y is None:
            return -1 if x is None else 1
        if x.isdigit() and y.isdigit():
            order = (int(x) > int(y)) - (int(x) < int(y))
        elif x.isdigit() or y.isdigit():
            order = -1 if x.isdigit() else 1
        else:
            order = (x > y) - (x < y)
        if order:
            return order
    return 0


@given(st.lists(SEMANTIC, min_size=2, max_size=6))
def test_versions_sort_as_semantic_versions_do(versions: list[str]) -> None:
    by_key = sorted(versions, key=catalog.version_key)
    for lower, higher in itertools.pairwise(by_key):
        assert compare(lower, higher) <= 0


def test_the_order_of_semver_org() -> None:
    order = [
        "latest", "0.9", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta",
        "1.0.0-beta.2", "1.0.0-beta.11", "1.0.0-rc.1", "1.0.0", "1.0.1", "1.2", "1.10",
        "2.0.0-0", "v2", "2024.01.15",
    ]  # fmt: skip
    mixed = [*order[1::2], *order[::2]]
    assert sorted(mixed, key=catalog.version_key) == order


@given(st.lists(st.tuples(NAME, ANY), min_size=2, max_size=8, unique=True))
def test_members_sort_by_name_then_the_highest_version(pairs: list[tuple[str, str]]) -> None:
    members = sorted(catalog.member(*pair).encode() for pair in pairs)
    assert len(set(members)) == len(pairs)
    found = [catalog.member_reference(member.decode()) for member in members]
    assert sorted(found) == sorted(f"{name}@{version}" for name, version in pairs)
    for (name, version), (next_name, next_version) in itertools.pairwise(
        reference.split("@") for reference in found
    ):
        assert name <= next_name
        if name == next_name:
            assert catalog.version_key(version) > catalog.version_key(next_version)


@given(ANY, ANY)
def test_two_versions_never_share_a_key(a: str, b: str) -> None:
    assert (catalog.version_key(a) == catalog.version_key(b)) == (a == b)
    assert re.fullmatch(r"[ -~]+", catalog.version_key(a))


def test_content_is_what_never_changes() -> None:
    digest = catalog.version_digest(entry())
    same = entry(owner="x", archive="y", functions=(), status=EnvironmentStatus.FAILED)
    assert catalog.version_digest(same) == digest
    assert catalog.version_digest(entry(config={"name": "weather"})) != digest
    assert len(catalog.version_digest(entry(description="\udcff"))) == 64


@given(st.lists(st.sampled_from(list(EnvironmentStatus)), max_size=6))
def test_nothing_leads_out_of_released(ways: list[EnvironmentStatus]) -> None:
    status = EnvironmentStatus.RELEASED
    for wanted in ways:
        if catalog.may_become(status, wanted):
            status = wanted
    assert status is EnvironmentStatus.RELEASED


def test_released_comes_after_what_was_verified_alone() -> None:
    before = {s for s in EnvironmentStatus if catalog.may_become(s, EnvironmentStatus.RELEASED)}
    assert before == {
        EnvironmentStatus.VERIFIED, EnvironmentStatus.READY, EnvironmentStatus.RELEASED,
    }  # fmt: skip
    with pytest.raises(CatalogConflict) as caught:
        catalog.check_transition("a@1", EnvironmentStatus.RELEASED, EnvironmentStatus.INIT)
    assert "new version" in str(caught.value.hint)


def test_statuses_have_the_numbers_of_envhub() -> None:
    assert [status.number for status in EnvironmentStatus] == list(range(9))
    assert EnvironmentStatus.READY.number == 6


TEXT = st.text(max_size=30)


@given(TEXT, TEXT)
def test_every_beginning_of_its_words_finds_an_entry(description: str, more: str) -> None:
    found: EnvironmentVersion = entry(description=f"{description} {more}")
    for word in catalog.words_of(description)[: catalog.MAX_SEARCH_WORDS]:
        assert is_found(found, word[:1])
        assert is_found(found, f"  {word}!! WEATHER")
    assert is_found(found, "")
    assert not is_found(entry(), "eather")


@given(st.text(min_size=1, max_size=40))
def test_a_cursor_names_where_it_goes_on(member: str) -> None:
    assert from_cursor(to_cursor(member)) == member
    assert from_cursor(None) == ""


@given(st.text(max_size=40))
def test_a_cursor_of_others_is_refused_or_is_text(cursor: str) -> None:
    with contextlib.suppress(ConfigError):
        assert from_cursor(cursor)
