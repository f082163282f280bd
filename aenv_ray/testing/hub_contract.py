"""The contract of `aenv_ray.hub.api.Hub` as a test class; the hub over Redis and its actor pass it.

    class TestMyHub(HubContract):
        @pytest.fixture
        async def hub(self):
            yield MyHub(...)

The hub is empty, and `clock` is what it reads the time from. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.clock import FakeClock
from aenv_ray.errors import (
    CatalogConflict,
    ConfigError,
    EnvironmentInUse,
    EnvironmentNotFound,
    InstanceNotFound,
    QuotaExceeded,
    VersionConflict,
)
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import (
    EnvironmentQuery,
    EnvironmentStatus,
    EnvironmentVersion,
    FunctionSchema,
    Lease,
    LeaseQuery,
    Quota,
    Role,
)
from aenv_ray.models import InstanceStatus
from aenv_ray.project_config import Artifact

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


class HubContract:
    """Every guarantee of the hub but what faults do; subclass it for a hub."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        """Return the clock of the hub."""
        return FakeClock(START_S)

    @pytest.fixture
    def hub(self) -> Hub:
        """Return an empty hub that reads `clock`."""
        raise NotImplementedError

    # --- environments -----------------------------------------------------------------------

    async def test_what_was_pushed_comes_back_whole(self, hub: Hub) -> None:
        pushed = await hub.push(entry())
        given = entry().model_copy(update={"created_at": START_S, "updated_at": START_S})
        assert pushed == given
        assert await hub.environment("weather", "1.0.0") == given
        assert await hub.environment("weather") == given

    async def test_the_same_content_again_changes_nothing(self, hub: Hub, clock: FakeClock) -> None:
        first = await hub.push(entry())
        clock.advance(5)
        assert await hub.push(entry(owner="another", archive="b" * 64, functions=())) == first
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
    async def test_a_version_never_gets_other_content(
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

    async def test_what_is_not_there_says_what_is(self, hub: Hub) -> None:
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
    async def test_a_name_that_cannot_be_is_refused(self, hub: Hub, name: str) -> None:
        with pytest.raises(ConfigError):
            await hub.environment(name)
        with pytest.raises(ConfigError):
            await hub.push(entry(name=name))
        with pytest.raises(ConfigError):
            await hub.environments(EnvironmentQuery(name=name))

    async def test_names_and_versions_do_not_run_into_each_other(self, hub: Hub) -> None:
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
    async def test_a_cursor_that_is_none_is_refused_or_harmless(
        self, hub: Hub, cursor: str
    ) -> None:
        with pytest.raises(ConfigError):
            await hub.environments(EnvironmentQuery(name="weather", cursor=cursor))

    async def test_filters_hold_together(self, hub: Hub) -> None:
        await hub.push(entry("a", "1.0.0", tags=("x", "y")))
        await hub.push(entry("a", "2.0.0", tags=("x",)))
        await hub.push(entry("b", "1.0.0", tags=("y",), description="A Terminal, for shells"))
        await hub.push(entry("mini-terminal", "1.0.0", tags=(), description=""))
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
        assert await found(latest_only=True) == ["a@2.0.0", "b@1.0.0", "mini-terminal@1.0.0"]
        assert await found(text="TERM") == ["b@1.0.0", "mini-terminal@1.0.0"]
        assert await found(text="term shell") == ["b@1.0.0"]
        assert await found(text="terminal mini") == ["mini-terminal@1.0.0"]
        assert await found(text="the weather", tag="x") == ["a@2.0.0", "a@1.0.0"]
        assert await found(text="nothing") == []
        assert await found(text="!") == await found()
        assert await found(tag="z") == []
        await hub.delete_environment("b", "1.0.0")
        assert await found(text="shell") == []
        assert await found(tag="y") == ["a@1.0.0"]

    async def test_statuses_go_their_ways(self, hub: Hub, clock: FakeClock) -> None:
        await hub.push(entry(status=EnvironmentStatus.INIT))
        clock.advance(10)
        tested = await hub.set_status("weather", "1.0.0", EnvironmentStatus.TESTING)
        assert tested.status is EnvironmentStatus.TESTING
        assert (tested.created_at, tested.updated_at) == (START_S, START_S + 10)
        with pytest.raises(CatalogConflict, match="Testing and cannot become Released") as caught:
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
        await hub.put_document("service", "s1", {"environment": "weather@1.0.0"})
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

    # --- leases -----------------------------------------------------------------------------

    async def test_a_lease_comes_back_whole(self, hub: Hub) -> None:
        given = lease(labels={"a": "1", "ü": ""}, deadline=START_S + 0.000001, reason="because")
        await hub.admit([given])
        assert await hub.lease(given.id) == given
        assert await hub.lease_of_capability(given.capability) == given
        assert (await hub.leases(LeaseQuery())).items == (given,)

    async def test_an_unknown_lease_is_not_found(self, hub: Hub) -> None:
        with pytest.raises(InstanceNotFound) as caught:
            await hub.lease("weather-x")
        assert caught.value.instance_id == "weather-x"
        with pytest.raises(InstanceNotFound) as caught:
            await hub.lease_of_capability("secret-name")
        assert "secret-name" not in str(vars(caught.value)) + str(caught.value)
        with pytest.raises(InstanceNotFound):
            await hub.update_lease("weather-x", status=InstanceStatus.RUNNING)
        await hub.end_leases(["weather-x"])
        await hub.end_leases([])
        await hub.admit([])

    async def test_a_lease_changes_in_what_is_given(self, hub: Hub) -> None:
        await hub.admit([lease()])
        changed = await hub.update_lease(
            "weather-aaaa", status=InstanceStatus.RUNNING, deadline=START_S + 99.123456, engine="e"
        )
        wanted = lease(status=InstanceStatus.RUNNING, deadline=START_S + 99.123456, engine="e")
        assert changed == wanted
        failed = await hub.update_lease(
            "weather-aaaa", status=InstanceStatus.FAILED, reason="its image is gone"
        )
        assert (failed.status, failed.reason) == (InstanceStatus.FAILED, "its image is gone")
        late = await hub.update_lease(
            "weather-aaaa", status=InstanceStatus.RUNNING, deadline=START_S + 500
        )
        assert late == failed

    async def test_leases_are_listed_newest_first(self, hub: Hub) -> None:
        leases = [
            lease(
                f"weather-{number:02d}",
                created_at=START_S + number / 1000,
                reference=f"weather@{number % 2}.0.0" if number else "other@1.0.0",
                owner=f"o{number % 3}",
                labels={"experiment": "a" if number < 5 else "b", "k": "="},
            )
            for number in range(12)
        ]
        await hub.admit(leases)
        await hub.update_lease("weather-04", status=InstanceStatus.RUNNING)

        async def found(**fields: Any) -> list[int]:
            query, numbers = LeaseQuery(limit=3, **fields), []
            while True:
                page = await hub.leases(query)
                numbers += [int(item.id[-2:]) for item in page.items]
                if page.cursor is None:
                    assert page.total == len(numbers)
                    return numbers
                query = query.model_copy(update={"cursor": page.cursor})

        assert await found() == list(range(11, -1, -1))
        assert await found(owner="o1") == [10, 7, 4, 1]
        assert await found(owner="o1", label=("experiment", "a")) == [4, 1]
        assert await found(name="weather", version="1.0.0") == [11, 9, 7, 5, 3, 1]
        assert await found(name="other") == [0]
        assert await found(status=InstanceStatus.RUNNING) == [4]
        assert await found(status=InstanceStatus.RUNNING, owner="o2") == []
        assert await found(owner="nobody") == []

    async def test_what_ended_is_forgotten_with_all_its_names(self, hub: Hub) -> None:
        await hub.admit([lease(), lease("weather-b")])
        for _ in range(2):
            await hub.end_leases(["weather-aaaa"])
            with pytest.raises(InstanceNotFound):
                await hub.lease("weather-aaaa")
            with pytest.raises(InstanceNotFound):
                await hub.lease_of_capability("cap-weather-aaaa")
            assert [item.id for item in (await hub.leases(LeaseQuery())).items] == ["weather-b"]

    # --- quotas -----------------------------------------------------------------------------

    async def test_a_quota_admits_so_many_and_all_or_none(self, hub: Hub) -> None:
        await hub.set_quota(Quota(subject="owner:somebody", max_instances=3))
        await hub.admit([lease("w-1"), lease("w-2")])
        with pytest.raises(QuotaExceeded, match="2 of 3") as caught:
            await hub.admit([lease("w-3"), lease("w-4")])
        assert 0 < caught.value.retry_after_s <= 10
        assert caught.value.retryable
        assert (await hub.quotas()) == {"owner:somebody": (2, 3)}
        with pytest.raises(InstanceNotFound):
            await hub.lease("w-3")
        await hub.admit([lease("w-3")])
        await hub.admit([lease("w-9", owner="another", labels={})])
        with pytest.raises(QuotaExceeded, match="were asked for"):
            await hub.admit([lease(f"x-{number}") for number in range(4)])

    async def test_an_id_again_takes_no_second_place(self, hub: Hub) -> None:
        await hub.set_quota(Quota(subject="owner:somebody", max_instances=2))
        for _ in range(3):
            await hub.admit([lease("w-1"), lease("w-1")])
        await hub.admit([lease("w-1"), lease("w-2")])
        assert (await hub.quotas()) == {"owner:somebody": (2, 2)}

    @pytest.mark.parametrize("status", [InstanceStatus.FAILED, InstanceStatus.TERMINATED, None])
    async def test_what_ended_gives_its_place_back(
        self, hub: Hub, status: InstanceStatus | None
    ) -> None:
        await hub.set_quota(Quota(subject="label:experiment=a", max_instances=1))
        for number in range(3):
            await hub.admit([lease(f"w-{number}")])
            assert (await hub.quotas()) == {"label:experiment=a": (1, 1)}
            if status is None:
                await hub.end_leases([f"w-{number}"])
            else:
                await hub.update_lease(f"w-{number}", status=status)
            assert (await hub.quotas()) == {"label:experiment=a": (0, 1)}

    async def test_what_is_overdue_gives_its_place_back(self, hub: Hub, clock: FakeClock) -> None:
        await hub.set_quota(Quota(subject="owner:somebody", max_instances=1))
        await hub.admit([lease("w-1")])
        clock.advance(69)  # its deadline passed; its sandbox may still be ending
        with pytest.raises(QuotaExceeded):
            await hub.admit([lease("w-2")])
        clock.advance(2)
        await hub.admit([lease("w-2", deadline=START_S + 200)])
        assert (await hub.lease("w-1")).status is InstanceStatus.TERMINATED
        assert (await hub.lease("w-1")).reason == "its deadline passed"

    async def test_a_quota_counts_what_was_there_before_it(self, hub: Hub) -> None:
        await hub.admit([lease("w-1"), lease("w-2")])
        await hub.set_quota(Quota(subject="label:experiment=a", max_instances=2))
        await hub.set_quota(Quota(subject="owner:nobody", max_instances=0))
        assert (await hub.quotas()) == {"label:experiment=a": (2, 2), "owner:nobody": (0, 0)}
        with pytest.raises(QuotaExceeded, match="experiment=a"):
            await hub.admit([lease("w-3")])
        await hub.delete_quota("label:experiment=a")
        await hub.delete_quota("label:experiment=a")
        await hub.admit([lease("w-3")])
        with pytest.raises(QuotaExceeded, match="owner:nobody"):
            await hub.admit([lease("w-4", owner="nobody")])

    @pytest.mark.parametrize("subject", ["", "somebody", "owner:", "label:a", "label:=a", "x:y"])
    async def test_a_subject_that_is_none_is_refused(self, hub: Hub, subject: str) -> None:
        with pytest.raises(ConfigError, match="subject"):
            await hub.set_quota(Quota(subject=subject, max_instances=1))

    async def test_who_was_refused_first_is_admitted_first(
        self, hub: Hub, clock: FakeClock
    ) -> None:
        """Several owners share a quota: a large group does not wait for ever behind small ones."""
        await hub.set_quota(Quota(subject="label:experiment=a", max_instances=4))
        await hub.admit([lease(f"w-{number}", owner="many") for number in range(4)])
        group = [lease(f"g-{number}", owner="group") for number in range(3)]
        with pytest.raises(QuotaExceeded):
            await hub.admit(group)
        clock.advance(0.5)
        await hub.end_leases(["w-0"])
        with pytest.raises(QuotaExceeded, match="1 others wait") as caught:
            await hub.admit([lease("w-9", owner="many")])
        assert caught.value.retry_after_s > 1
        await hub.end_leases(["w-1", "w-2"])
        await hub.admit(group)
        await hub.end_leases(["w-3"])
        await hub.admit([lease("w-9", owner="many")])

    async def test_who_does_not_come_back_loses_his_place(self, hub: Hub, clock: FakeClock) -> None:
        await hub.set_quota(Quota(subject="label:experiment=a", max_instances=2))
        await hub.admit([lease("w-1", owner="many")])
        with pytest.raises(QuotaExceeded):
            await hub.admit([lease(f"g-{number}", owner="group") for number in range(2)])
        with pytest.raises(QuotaExceeded):
            await hub.admit([lease("w-2", owner="many")])
        clock.advance(10)
        await hub.admit([lease("w-2", owner="many")])

    # --- tokens -----------------------------------------------------------------------------

    async def test_a_token_is_known_by_its_secret_alone(self, hub: Hub, clock: FakeClock) -> None:
        secret, record = await hub.create_token(Role.OWNER, "somebody", note="laptop")
        other, _ = await hub.create_token(Role.ADMIN, "admin")
        assert secret != other
        assert len(secret) > 40
        assert (record.role, record.owner, record.note) == (Role.OWNER, "somebody", "laptop")
        assert await hub.check_token(secret) == record
        for wrong in ("", secret[:-1], secret + "x", record.id, "ü\0", "\udcff"):
            assert await hub.check_token(wrong) is None
        assert [t.id for t in await hub.tokens("somebody")] == [record.id]
        assert len(await hub.tokens()) == 2
        assert secret not in str(await hub.tokens())
        await hub.revoke_token(record.id)
        await hub.revoke_token(record.id)
        assert await hub.check_token(secret) is None
        assert await hub.tokens("somebody") == ()
        assert await hub.check_token(other) is not None

    async def test_a_token_ends_at_its_time(self, hub: Hub, clock: FakeClock) -> None:
        secret, record = await hub.create_token(Role.OWNER, "somebody", ttl_s=5)
        assert record.expires_at == START_S + 5
        clock.advance(4)
        assert await hub.check_token(secret) == record
        clock.advance(1)
        assert await hub.check_token(secret) is None
        assert await hub.tokens() == ()

    async def test_an_agents_token_ends_with_its_instance(self, hub: Hub) -> None:
        await hub.admit([lease("w-1"), lease("w-2")])
        secrets = {}
        for name in ("w-1", "w-2"):
            secrets[name], record = await hub.create_token(Role.AGENT, "somebody", instance_id=name)
            assert record.instance_id == name
        await hub.end_leases(["w-1"])
        assert await hub.check_token(secrets["w-1"]) is None
        assert await hub.check_token(secrets["w-2"]) is not None
        await hub.update_lease("w-2", status=InstanceStatus.TERMINATED)
        assert await hub.check_token(secrets["w-2"]) is None
        assert await hub.tokens() == ()

    async def test_a_token_that_makes_no_sense_is_refused(self, hub: Hub) -> None:
        with pytest.raises(ConfigError):
            await hub.create_token(Role.AGENT, "somebody")
        with pytest.raises(ConfigError):
            await hub.create_token(Role.ADMIN, "somebody", instance_id="w-1")
        for ttl_s in (0, -1, float("nan")):
            with pytest.raises(ConfigError):
                await hub.create_token(Role.ADMIN, "somebody", ttl_s=ttl_s)
        assert await hub.tokens() == ()

    # --- the rest ---------------------------------------------------------------------------

    async def test_the_first_value_under_a_key_is_everybodys(self, hub: Hub) -> None:
        assert await hub.remember("k", "first", 60) == "first"
        assert await hub.remember("k", "second", 60) == "first"
        assert await hub.remember("k2", "second", 60) == "second"

    async def test_documents_are_kept_by_kind_and_name(self, hub: Hub) -> None:
        document = {"a": [1.5, {}, None], "ü": "\0"}
        await hub.put_document("service", "s", {"old": 1})
        await hub.put_document("service", "s", document)
        await hub.put_document("pool", "s", {})
        assert await hub.documents("service") == {"s": document}
        await hub.delete_document("service", "s")
        await hub.delete_document("service", "s")
        assert await hub.documents("service") == {}
        assert await hub.documents("pool") == {"s": {}}

    async def test_it_tells_facts_about_itself(self, hub: Hub) -> None:
        await hub.push(entry())
        status = await hub.status()
        assert status["environment_versions"] == 1
        assert status["redis_version"]
