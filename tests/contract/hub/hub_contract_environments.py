"""The part of the hub's contract that is about environments; see `hub_contract`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest

from aenv_ray.errors import (
    CatalogConflict,
    ConfigError,
    EnvironmentInUse,
    EnvironmentNotFound,
    VersionConflict,
)
from aenv_ray.hub import catalog
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import (
    EnvironmentQuery,
    EnvironmentStatus,
    EnvironmentVersion,
    FunctionSchema,
    Lease,
)
from aenv_ray.models import InstanceStatus
from aenv_ray.project.config import Artifact
from tests.fake_clock import FakeClock

START_S = 1_763_700_000.123456


def entry(name: str = "weather", version: str = "1.0.0", **fields: Any) -> EnvironmentVersion:
    """Return an entry as a push makes it."""
    values: dict[str, Any] = {
        "name": name, "version": version, "digest": "d" * 64, "archive": "a" * 64,
        "archive_bytes": 10, "config": {"name": name, "unknown": {"ü": [1.5, None, {}]}},
        "artifacts": (Artifact(type="image", content="img:1"),), "owner": "somebody",
        "functions": (FunctionSchema(kind="tool", name="t", input_schema={"type": "object"}),),
        "description": "Tells the weather of a city", "tags": ("demo", "Ünï"),
    }  # fmt: skip
    return EnvironmentVersion(**{**values, **fields})


def lease(instance_id: str = "weather-aaaa", **fields: Any) -> Lease:
    """Return a lease as a create makes it."""
    values: dict[str, Any] = {
        "id": instance_id, "reference": "weather@1.0.0", "digest": "d" * 64, "owner": "somebody",
        "labels": {"experiment": "a"}, "engine": "process", "created_at": START_S,
        "deadline": START_S + 60.25, "capability": f"cap-{instance_id}",
    }  # fmt: skip
    return Lease(**{**values, **fields})


class EnvironmentsContract(ABC):
    """What `HubContract` promises of versions: immutable, ordered, found again."""

    @pytest.fixture
    @abstractmethod
    def hub(self) -> Hub:
        """Return an empty hub that reads the clock of the test."""

    async def test_an_entry_too_large_for_a_listing_is_refused(self, hub: Hub) -> None:
        """An entry is read by every listing."""
        with pytest.raises(ConfigError, match="more than the"):
            await hub.push(entry(description="x" * 2_000_000))
        assert (await hub.environments(EnvironmentQuery())).total == 0

    async def test_a_pushed_version_is_read_back_unchanged(self, hub: Hub) -> None:
        pushed = await hub.push(entry())
        given = entry().model_copy(update={"created_at": START_S, "updated_at": START_S})
        assert pushed == given
        assert await hub.environment("weather", "1.0.0") == given
        assert await hub.environment("weather") == given

    async def test_the_same_content_again_changes_nothing(self, hub: Hub, clock: FakeClock) -> None:
        first = await hub.push(entry())
        clock.advance(5)
        assert await hub.push(entry(archive="b" * 64, functions=())) == first
        assert (await hub.environments(EnvironmentQuery())).total == 1

    @pytest.mark.parametrize(
        "change",
        [
            {"digest": "e" * 64},
            {"config": {}},
            {"artifacts": ()},
            {"tags": ()},
            {"description": "Other"},
        ],
    )
    async def test_the_content_of_a_version_never_changes(
        self, hub: Hub, change: dict[str, Any]
    ) -> None:
        """Invariant 6; also after it was deleted."""
        await hub.push(entry())
        with pytest.raises(VersionConflict) as caught:
            await hub.push(entry(**change))
        assert "weather@1.0.0" in caught.value.message
        assert caught.value.hint
        assert (await hub.environment("weather", "1.0.0")).digest == "d" * 64
        await hub.delete_environment("weather", "1.0.0")
        with pytest.raises(VersionConflict, match="deleted"):
            await hub.push(entry(**change))
        assert await hub.versions("weather") == ()
        await hub.push(entry())
        assert len(await hub.versions("weather")) == 1

    async def test_the_name_alone_means_the_highest_version(self, hub: Hub) -> None:
        for version in ("1.9.0", "nightly", "1.10.0", "1.10.0-rc.1", "2.0.0-alpha", "0.9"):
            await hub.push(entry(version=version))
        assert (await hub.environment("weather")).version == "2.0.0-alpha"
        await hub.set_status("weather", "2.0.0-alpha", EnvironmentStatus.FAILED)
        assert (await hub.environment("weather")).version == "1.10.0"
        await hub.delete_environment("weather", "1.10.0")
        assert (await hub.environment("weather")).version == "1.10.0-rc.1"
        assert [e.version for e in await hub.versions("weather")] == [
            "2.0.0-alpha", "1.10.0-rc.1", "1.9.0", "0.9", "nightly",
        ]  # fmt: skip
        await hub.set_status("weather", "2.0.0-alpha", EnvironmentStatus.READY)
        assert (await hub.environment("weather")).version == "2.0.0-alpha"

    async def test_the_error_for_a_missing_version_lists_what_exists(self, hub: Hub) -> None:
        with pytest.raises(EnvironmentNotFound, match="weather") as caught:
            await hub.environment("weather")
        assert "aenv push" in str(caught.value.hint)
        await hub.push(entry())
        with pytest.raises(EnvironmentNotFound) as caught:
            await hub.environment("weather", "9.9.9")
        assert "1.0.0" in str(caught.value.hint)
        await hub.set_status("weather", "1.0.0", EnvironmentStatus.FAILED)
        with pytest.raises(EnvironmentNotFound, match="Failed"):
            await hub.environment("weather")
        assert (await hub.environment("weather", "1.0.0")).status is EnvironmentStatus.FAILED
        assert await hub.versions("nothing") == ()
        with pytest.raises(EnvironmentNotFound):
            await hub.delete_environment("weather", "2.0.0")
        with pytest.raises(EnvironmentNotFound):
            await hub.set_status("weather", "2.0.0", EnvironmentStatus.READY)

    @pytest.mark.parametrize("name", ["a b", "", "A", "a@b", "a*", "../a"])
    async def test_an_invalid_name_is_refused(self, hub: Hub, name: str) -> None:
        with pytest.raises(ConfigError):
            await hub.environment(name)
        with pytest.raises(ConfigError):
            await hub.push(entry(name=name))
        with pytest.raises(ConfigError):
            await hub.environments(EnvironmentQuery(name=name))

    async def test_names_and_versions_are_not_confused(self, hub: Hub) -> None:
        await hub.push(entry("a-b", "1"))
        await hub.push(entry("a", "b-1"))
        await hub.push(entry("a", "1", description="third"))
        assert [e.reference for e in await hub.versions("a")] == ["a@1", "a@b-1"]
        assert [e.reference for e in await hub.versions("a-b")] == ["a-b@1"]
        page = await hub.environments(EnvironmentQuery())
        assert [e.reference for e in page.items] == ["a@1", "a@b-1", "a-b@1"]

    async def test_a_listing_is_read_page_by_page(self, hub: Hub) -> None:
        for name in ("c", "a", "b"):
            for number in range(4):
                await hub.push(entry(name, f"1.{number}.0"))
        wanted = [f"{name}@1.{number}.0" for name in "abc" for number in (3, 2, 1, 0)]
        for limit in (1, 5, 12, 100):
            query, found = EnvironmentQuery(limit=limit), []
            while True:
                page = await hub.environments(query)
                assert page.total == 12
                assert len(page.items) <= limit
                found += [e.reference for e in page.items]
                if page.cursor is None:
                    break
                query = query.model_copy(update={"cursor": page.cursor})
            assert found == wanted

    async def test_a_page_continues_where_it_ended_whatever_came_between(self, hub: Hub) -> None:
        for number in (0, 1, 2, 4):
            await hub.push(entry("a", f"1.{number}.0"))
        page = await hub.environments(EnvironmentQuery(limit=2))
        await hub.delete_environment("a", "1.2.0")  # where the page ended
        await hub.push(entry("a", "1.3.0"))
        rest = await hub.environments(EnvironmentQuery(limit=2, cursor=page.cursor))
        assert [e.version for e in rest.items] == ["1.1.0", "1.0.0"]

    @pytest.mark.parametrize("cursor", ["", "?", "ü", "YQ=", "a" * 1000])
    async def test_an_invalid_cursor_is_refused(self, hub: Hub, cursor: str) -> None:
        with pytest.raises(ConfigError):
            await hub.environments(EnvironmentQuery(name="weather", cursor=cursor))

    async def test_filters_are_combined(self, hub: Hub) -> None:
        await hub.push(entry("a", "1.0.0", tags=("x", "y")))
        await hub.push(entry("a", "2.0.0", tags=("x",)))
        await hub.push(entry("b", "1.0.0", tags=("y",), description="A Terminal, for shells"))
        await hub.push(entry("my-terminal", "1.0.0", tags=(), description=""))
        await hub.set_status("a", "2.0.0", EnvironmentStatus.RELEASED)

        async def found(**query: Any) -> list[str]:
            page = await hub.environments(EnvironmentQuery(**query))
            assert page.total == len(page.items)
            return [e.reference for e in page.items]

        assert await found(name="a") == ["a@2.0.0", "a@1.0.0"]
        assert await found(tag="x") == ["a@2.0.0", "a@1.0.0"]
        assert await found(tag="x", latest_only=True) == ["a@2.0.0"]
        assert await found(tag="y", name="a") == ["a@1.0.0"]
        assert await found(status=EnvironmentStatus.RELEASED) == ["a@2.0.0"]
        assert await found(status=EnvironmentStatus.READY, name="a") == ["a@1.0.0"]
        assert await found(latest_only=True) == ["a@2.0.0", "b@1.0.0", "my-terminal@1.0.0"]
        assert await found(text="TERM") == ["b@1.0.0", "my-terminal@1.0.0"]
        assert await found(text="term shell") == ["b@1.0.0"]
        assert await found(text="terminal my") == ["my-terminal@1.0.0"]
        assert await found(text="the weather", tag="x") == ["a@2.0.0", "a@1.0.0"]
        assert await found(text="nothing") == []
        assert await found(text="!") == await found()
        assert await found(tag="z") == []
        await hub.delete_environment("b", "1.0.0")
        assert await found(text="shell") == []
        assert await found(tag="y") == ["a@1.0.0"]

    async def test_only_listed_status_changes_are_allowed(self, hub: Hub, clock: FakeClock) -> None:
        await hub.push(entry(status=EnvironmentStatus.INIT))
        clock.advance(10)
        tested = await hub.set_status("weather", "1.0.0", EnvironmentStatus.TESTING)
        assert tested.status is EnvironmentStatus.TESTING
        assert (tested.created_at, tested.updated_at) == (START_S, START_S + 10)
        with pytest.raises(CatalogConflict, match="from status Testing to Released") as caught:
            await hub.set_status("weather", "1.0.0", EnvironmentStatus.RELEASED)
        assert "Verified" in str(caught.value.hint)
        await hub.set_status("weather", "1.0.0", EnvironmentStatus.READY)
        released = await hub.set_status("weather", "1.0.0", EnvironmentStatus.RELEASED)
        clock.advance(10)
        assert await hub.set_status("weather", "1.0.0", EnvironmentStatus.RELEASED) == released
        with pytest.raises(CatalogConflict, match="Released"):
            await hub.set_status("weather", "1.0.0", EnvironmentStatus.FAILED)
        assert await hub.environment("weather", "1.0.0") == released

    async def test_a_version_in_use_is_not_deleted(self, hub: Hub) -> None:
        await hub.push(entry())
        await hub.push(entry(version="2.0.0"))
        await hub.admit([lease("weather-a"), lease("weather-b")])
        await hub.put_document("service", "s1", {"reference": "weather@1.0.0"})
        with pytest.raises(EnvironmentInUse, match="weather-a, weather-b"):
            await hub.delete_environment("weather", "1.0.0")
        await hub.delete_environment("weather", "2.0.0")
        await hub.end_leases(["weather-a"])
        await hub.update_lease("weather-b", status=InstanceStatus.TERMINATED)
        with pytest.raises(EnvironmentInUse, match="service s1"):
            await hub.delete_environment("weather", "1.0.0")
        await hub.delete_document("service", "s1")
        await hub.delete_environment("weather", "1.0.0")
        with pytest.raises(EnvironmentNotFound):
            await hub.environment("weather", "1.0.0")


def is_found(entry: EnvironmentVersion, text: str) -> bool:
    """Return whether a search finds an entry: each word must begin one of the entry's words.

    The specification of the search that `HubCore` runs over sorted sets.
    """
    known = catalog.search_words(entry)
    wanted = catalog.words_of(text)[: catalog.MAX_SEARCH_WORDS]
    return all(any(word.startswith(want) for word in known) for want in wanted)
