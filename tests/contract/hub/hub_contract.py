"""The contract of `aenv_ray.hub.api.Hub` as a test class; the hub over Redis and its actor pass it.

    class TestMyHub(HubContract):
        @pytest.fixture
        async def hub(self):
            yield MyHub(...)

The hub is empty, and `clock` is what it reads the time from. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aenv_ray.errors import (
    ArtifactQuotaExceeded,
    CatalogConflict,
    ConfigError,
    EnvironmentNotFound,
    Forbidden,
    InstanceNotFound,
    QuotaExceeded,
    QuotaTooSmall,
)
from aenv_ray.hub import catalog, core, environments
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import (
    AuditRecord,
    EnvironmentQuery,
    KeyGroup,
    LeaseQuery,
    Quota,
    Right,
    Role,
    TokenRecord,
)
from aenv_ray.models import InstanceStatus
from tests.contract.hub.hub_contract_environments import (
    START_S,
    EnvironmentsContract,
    entry,
    lease,
)
from tests.fake_clock import FakeClock

__all__ = ["START_S", "HubContract", "entry", "lease"]


class HubContract(EnvironmentsContract):
    """Every guarantee of the hub but what faults do; subclass it for a hub."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        """Return the clock of the hub."""
        return FakeClock(START_S)

    @pytest.fixture
    def hub(self) -> Hub:
        """Return an empty hub that reads `clock`."""
        raise NotImplementedError

    # --- leases -----------------------------------------------------------------------------

    async def test_a_lease_is_read_back_unchanged(self, hub: Hub) -> None:
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

    async def test_an_update_of_a_lease_changes_only_the_given_fields(self, hub: Hub) -> None:
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

    async def test_an_ended_lease_is_removed_from_every_index(self, hub: Hub) -> None:
        await hub.admit([lease(), lease("weather-b")])
        for _ in range(2):
            await hub.end_leases(["weather-aaaa"])
            with pytest.raises(InstanceNotFound):
                await hub.lease("weather-aaaa")
            with pytest.raises(InstanceNotFound):
                await hub.lease_of_capability("cap-weather-aaaa")
            assert [item.id for item in (await hub.leases(LeaseQuery())).items] == ["weather-b"]

    # --- quotas -----------------------------------------------------------------------------

    async def test_a_quota_admits_all_of_a_group_or_none(self, hub: Hub) -> None:
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
        with pytest.raises(QuotaTooSmall, match="were requested at once"):
            await hub.admit([lease(f"x-{number}") for number in range(4)])

    async def test_a_repeated_id_is_counted_once(self, hub: Hub) -> None:
        await hub.set_quota(Quota(subject="owner:somebody", max_instances=2))
        for _ in range(3):
            await hub.admit([lease("w-1"), lease("w-1")])
        await hub.admit([lease("w-1"), lease("w-2")])
        assert (await hub.quotas()) == {"owner:somebody": (2, 2)}

    async def test_an_instance_reserves_the_places_of_its_inner_instances(self, hub: Hub) -> None:
        """Invariant 14: an agent that opens inner instances uses up no quota."""
        await hub.set_quota(Quota(subject="owner:somebody", max_instances=4))
        await hub.admit([lease("w-1", places=3)])
        with pytest.raises(QuotaExceeded, match=r"3 of 4 .* for 3 more, inner instances"):
            await hub.admit([lease("w-2", places=3)])
        with pytest.raises(QuotaTooSmall, match="5 were requested at once, inner instances"):
            await hub.admit([lease("w-3", places=5)])
        await hub.admit([lease("w-4")])
        await hub.admit([lease(f"i-{number}", places=0) for number in range(9)])
        assert (await hub.quotas()) == {"owner:somebody": (4, 4)}
        assert (await hub.lease("i-0")).places == 0
        await hub.update_lease("w-1", status=InstanceStatus.RUNNING)
        await hub.exchange(["w-1"], [lease("w-5", places=3)])
        assert (await hub.quotas()) == {"owner:somebody": (4, 4)}
        await hub.update_lease("w-5", status=InstanceStatus.TERMINATED)
        await hub.end_leases(["i-0", "w-5"])
        assert (await hub.quotas()) == {"owner:somebody": (1, 4)}

    @pytest.mark.parametrize("status", [InstanceStatus.FAILED, InstanceStatus.TERMINATED, None])
    async def test_an_ended_instance_is_no_longer_counted(
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

    async def test_an_overdue_instance_is_no_longer_counted(
        self, hub: Hub, clock: FakeClock
    ) -> None:
        await hub.set_quota(Quota(subject="owner:somebody", max_instances=1))
        await hub.admit([lease("w-1")])
        clock.advance(69)  # its deadline passed; its sandbox may still be ending
        with pytest.raises(QuotaExceeded):
            await hub.admit([lease("w-2")])
        clock.advance(2)
        await hub.admit([lease("w-2", deadline=START_S + 200)])
        assert (await hub.lease("w-1")).status is InstanceStatus.TERMINATED
        assert (await hub.lease("w-1")).reason == "its deadline passed"

    async def test_a_new_quota_counts_existing_instances(self, hub: Hub) -> None:
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
    async def test_an_invalid_subject_is_refused(self, hub: Hub, subject: str) -> None:
        with pytest.raises(ConfigError, match="subject"):
            await hub.set_quota(Quota(subject=subject, max_instances=1))

    async def test_refused_creates_are_admitted_in_order(self, hub: Hub, clock: FakeClock) -> None:
        """Several owners share a quota: small groups do not starve a large one."""
        await hub.set_quota(Quota(subject="label:experiment=a", max_instances=4))
        await hub.admit([lease(f"w-{number}", owner="many") for number in range(4)])
        group = [lease(f"g-{number}", owner="group") for number in range(3)]
        with pytest.raises(QuotaExceeded):
            await hub.admit(group)
        clock.advance(0.5)
        await hub.end_leases(["w-0"])
        with pytest.raises(QuotaExceeded, match="1 owners wait ahead") as caught:
            await hub.admit([lease("w-9", owner="many")])
        assert caught.value.retry_after_s > 1
        await hub.end_leases(["w-1", "w-2"])
        await hub.admit(group)
        await hub.end_leases(["w-3"])
        await hub.admit([lease("w-9", owner="many")])

    async def test_a_refused_create_that_is_not_repeated_loses_its_turn(
        self, hub: Hub, clock: FakeClock
    ) -> None:
        await hub.set_quota(Quota(subject="label:experiment=a", max_instances=2))
        await hub.admit([lease("w-1", owner="many")])
        with pytest.raises(QuotaExceeded):
            await hub.admit([lease(f"g-{number}", owner="group") for number in range(2)])
        with pytest.raises(QuotaExceeded):
            await hub.admit([lease("w-2", owner="many")])
        clock.advance(10)
        await hub.admit([lease("w-2", owner="many")])

    # --- names, artifacts, audit log --------------------------------------------------------

    async def test_a_name_belongs_to_its_first_publisher(self, hub: Hub) -> None:
        """Invariant 15."""
        assert (await hub.name("weather")).owner is None
        with pytest.raises(EnvironmentNotFound):
            await hub.grant("weather", "bob", Right.USE)
        await hub.push(entry(owner="ann"))
        with pytest.raises(Forbidden):
            await hub.push(entry(version="2.0.0", owner="bob"))
        await hub.push(entry(version="2.0.0", owner="root"), is_admin=True)
        record = await hub.name("weather")
        assert (record.owner, record.grants) == ("ann", {})
        assert [record.may(o, Right.USE) for o in ("ann", "bob", "")] == [True, False, False]
        await hub.grant("weather", "bob", Right.USE)
        await hub.grant("weather", "ca rl", Right.PUBLISH)
        record = await hub.name("weather")
        assert record.may("bob", Right.USE)
        assert not record.may("bob", Right.PUBLISH)
        assert record.may("ca rl", Right.PUBLISH)
        for owner, total in (("ann", 2), ("bob", 2), ("ca rl", 2), ("eve", 0)):
            query = EnvironmentQuery(visible_to=owner, limit=1)
            page = await hub.environments(query)
            assert (page.total, len(page.items)) == (total, min(total, 1))
            found = [e.version async for e in hub.all_environments(query)]
            assert found == ["2.0.0", "1.0.0"][:total]
        await hub.grant("weather", "bob", None)
        assert not (await hub.name("weather")).may("bob", Right.USE)

    async def test_the_versions_of_an_owner_have_a_limit(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Invariant 7: one owner cannot fill the memory of Redis."""
        monkeypatch.setattr(environments, "MAX_OWNER_BYTES", 6_500)
        big = {"x": "y" * 2_000}
        for version in ("1.0.0", "2.0.0"):
            await hub.push(entry(version=version, config=big))
        with pytest.raises(ArtifactQuotaExceeded, match=r"no room for weather@3\.0\.0"):
            await hub.push(entry(version="3.0.0", config=big))
        await hub.push(entry(version="2.0.0", config=big))  # again: nothing changes
        await hub.push(entry(name="other", config=big, owner="bob"))
        await hub.delete_environment("weather", "1.0.0")
        await hub.push(entry(version="3.0.0", config=big))

    async def test_artifacts_are_accounted_for_until_nobody_has_them(
        self, hub: Hub, clock: FakeClock
    ) -> None:
        await hub.keep_artifact("ann", "a" * 64, 60, quota_bytes=100)
        await hub.keep_artifact("ann", "a" * 64, 60, quota_bytes=100)
        with pytest.raises(ArtifactQuotaExceeded, match="ann"):
            await hub.keep_artifact("ann", "b" * 64, 41, quota_bytes=100)
        assert await hub.artifacts_held("ann") == (60, 1)
        clock.advance(10)
        await hub.keep_artifact("bob", "a" * 64, 60)
        await hub.keep_artifact("bob", "c" * 64, 1)
        assert await hub.artifacts_before(START_S + 5) == {"a" * 64}
        assert not await hub.forget_artifact("a" * 64, before=START_S + 5)  # Bob's is younger
        assert await hub.forget_artifact("c" * 64, before=0.0, owner="bob")
        await hub.artifact_deleted("c" * 64)
        assert not await hub.forget_artifact("a" * 64, before=0.0, owner="ann")
        assert await hub.artifacts_held("bob") == (60, 1)
        assert await hub.forget_artifact("a" * 64, before=START_S + 60)
        assert await hub.artifacts_held("bob") == (60, 1)  # until it is deleted
        for owner in ("ann", "bob"):
            with pytest.raises(CatalogConflict, match="is being deleted"):
                await hub.keep_artifact(owner, "a" * 64, 60)
        with pytest.raises(CatalogConflict, match="is being deleted"):
            await hub.push(entry(archive="a" * 64))
        await hub.artifact_deleted("a" * 64)
        assert await hub.artifacts_held("bob") == (0, 0)
        await hub.keep_artifact("ann", "a" * 64, 60)
        await hub.artifact_deleted("a" * 64)  # once more, after a lost answer
        assert await hub.artifacts_held("ann") == (60, 1)

    async def test_the_archive_of_a_version_stays_accounted_for(self, hub: Hub) -> None:
        """Invariant 6: it is not deleted, and it is when its versions are."""
        archive = "a" * 64
        for owner in ("ann", "bob", "cy"):
            await hub.keep_artifact(owner, archive, 60)
        await hub.push(entry(owner="ann", archive=archive))
        assert await hub.artifacts_before(START_S + 1) == frozenset()
        assert not await hub.forget_artifact(archive, before=START_S + 1)
        for owner in ("ann", "bob", "cy"):
            assert not await hub.forget_artifact(archive, before=0.0, owner=owner)
        held = [(await hub.artifacts_held(owner)).number for owner in ("ann", "bob", "cy")]
        assert held == [1, 0, 0]
        await hub.grant("weather", "bob", Right.PUBLISH)
        await hub.push(entry(version="2.0.0", owner="bob", archive="b" * 64))
        await hub.keep_artifact("bob", "b" * 64, 60)
        assert not await hub.forget_artifact("b" * 64, before=0.0, owner="bob")
        assert await hub.artifacts_held("bob") == (60, 1)
        await hub.delete_environment("weather", "1.0.0")
        assert await hub.artifacts_before(START_S + 1) == {archive}
        assert await hub.forget_artifact(archive, before=START_S + 1)

    async def test_an_artifact_that_cannot_be_deleted_can_be_used_again(self, hub: Hub) -> None:
        digest = "a" * 64
        await hub.keep_artifact("ann", digest, 60)
        assert await hub.forget_artifact(digest, before=0.0, owner="ann")
        for _ in range(2):
            await hub.artifact_stays(digest)
        await hub.keep_artifact("ann", digest, 60)
        assert await hub.artifacts_held("ann") == (60, 1)

    async def test_the_number_of_an_owners_artifacts_has_a_limit(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalog, "MAX_ARTIFACTS", 2)
        for digest in ("a", "b", "a"):
            await hub.keep_artifact("ann", digest * 64, 1)
        with pytest.raises(ArtifactQuotaExceeded, match="2 artifacts"):
            await hub.keep_artifact("ann", "c" * 64, 1)
        assert not await hub.has_artifact("ann", "c" * 64)
        await hub.keep_artifact("bob", "c" * 64, 1)
        assert await hub.forget_artifact("b" * 64, before=0.0, owner="ann")
        await hub.artifact_deleted("b" * 64)
        await hub.keep_artifact("ann", "c" * 64, 1)
        assert not await hub.forget_artifact("c" * 64, before=0.0, owner="ann")  # Bob has it
        assert await hub.artifacts_held("ann") == (1, 1)

    async def test_the_versions_of_an_archive_are_found(self, hub: Hub) -> None:
        archive, other = "a" * 64, "b" * 64
        await hub.push(entry(archive=archive))
        await hub.push(entry(version="2.0.0", archive=archive))
        await hub.push(entry("desk", archive=other))
        await hub.push(entry("config-alone", archive=""))
        assert await hub.versions_of_archive(archive) == ("weather@1.0.0", "weather@2.0.0")
        await hub.delete_environment("weather", "1.0.0")
        assert await hub.versions_of_archive(archive) == ("weather@2.0.0",)
        assert await hub.versions_of_archive(other) == ("desk@1.0.0",)
        assert await hub.versions_of_archive("c" * 64) == ()

    async def test_pages_of_the_audit_log_show_attempts_among_what_was_done(self, hub: Hub) -> None:
        """No record is skipped or repeated, even if all are made within a millisecond."""
        for number in range(40):
            outcome = "forbidden" if number % 3 else "ok"
            role = ("", *Role)[number % 5]
            entry_ = AuditRecord(
                actor="a", role=role, action="b", subject=str(number), outcome=outcome
            )
            await hub.record(entry_)
        seen: list[AuditRecord] = []
        while page := await hub.audit_log(7, before=seen[-1].id if seen else None):
            seen += page
        assert len({one.id for one in seen}) == 40
        assert {one.subject for one in seen} == {str(number) for number in range(40)}

    async def test_a_record_is_kept_once_however_often_it_is_sent(
        self, hub: Hub, clock: FakeClock
    ) -> None:
        """A client whose connection broke cannot know whether it arrived."""
        record = AuditRecord(actor="ann", action="publish")
        for nonce in ("a", "a", "b", "a"):
            await hub.keep_record(record, nonce)
            clock.advance(1)
        assert [one.at for one in await hub.audit_log(9)] == [START_S + 2, START_S]
        for _ in range(2):
            await hub.record(record)
        assert len(await hub.audit_log(9)) == 4

    async def test_the_audit_log_is_read_from_its_end(self, hub: Hub, clock: FakeClock) -> None:
        for number in range(3):
            await hub.record(AuditRecord(actor="ann", action="publish", subject=str(number)))
            clock.advance(1)
        log = await hub.audit_log(2)
        assert [(one.subject, one.at) for one in log] == [("2", START_S + 2), ("1", START_S + 1)]
        assert [one.subject for one in await hub.audit_log(9, before=log[-1].id)] == ["0"]
        with pytest.raises(ConfigError, match="audit"):
            await hub.audit_log(1, before="yesterday")

    async def test_the_audit_log_keeps_the_beginning_of_long_texts(self, hub: Hub) -> None:
        """They come from clients, and the log is in the memory of Redis."""
        long = "x" * 60_000
        detail = {"owner": long}
        await hub.record(AuditRecord(actor="ann", action="b", subject=long, detail=detail))
        (found,) = await hub.audit_log(1)
        assert (found.subject, found.detail["owner"]) == (long[:300], long[:300])

    # --- tokens -----------------------------------------------------------------------------

    async def test_a_token_is_known_by_its_secret_alone(self, hub: Hub, clock: FakeClock) -> None:
        secret, record = await hub.create_token(Role.PUBLISHER, "somebody", note="laptop")
        other, _ = await hub.create_token(Role.ADMIN, "admin")
        assert secret != other
        assert len(secret) > 40
        assert (record.role, record.owner, record.note) == (Role.PUBLISHER, "somebody", "laptop")
        assert await hub.check_token(secret) == record
        for wrong in ("", secret[:-1], secret + "x", record.id, "ü\0", "\udcff"):
            assert await hub.check_token(wrong) is None
        assert await hub.token(record.id) == record
        assert await hub.token(secret) is None
        assert [t.id for t in await hub.tokens("somebody")] == [record.id]
        assert len(await hub.tokens()) == 2
        assert secret not in str(await hub.tokens())
        await hub.revoke_token(record.id)
        await hub.revoke_token(record.id)
        assert await hub.check_token(secret) is None
        assert await hub.token(record.id) is None
        assert await hub.tokens("somebody") == ()
        assert await hub.check_token(other) is not None

    async def test_a_token_expires(self, hub: Hub, clock: FakeClock) -> None:
        secret, record = await hub.create_token(Role.PUBLISHER, "somebody", ttl_s=5)
        assert record.expires_at == START_S + 5
        clock.advance(4)
        assert await hub.check_token(secret) == record
        clock.advance(1)
        assert await hub.check_token(secret) is None
        assert await hub.token(record.id) is None
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

    async def test_the_number_of_tokens_of_an_instance_is_limited(
        self, hub: Hub, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(core, "MAX_AGENT_TOKENS", 2)
        await hub.admit([lease("w-1"), lease("w-2")])

        async def create(instance_id: str, ttl_s: float | None = None) -> TokenRecord:
            made = await hub.create_token(
                Role.AGENT, "somebody", instance_id=instance_id, ttl_s=ttl_s
            )
            return made[1]

        first = await create("w-1")
        await hub.keep_token("0" * 64, first)  # once more, after a lost answer
        await create("w-1")
        with pytest.raises(CatalogConflict, match="2 tokens"):
            await create("w-1")
        await create("w-2")
        await hub.revoke_token(first.id)
        await create("w-1")

    async def test_the_number_of_an_owners_grants_is_limited(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Invariant 7: they are in the memory of Redis."""
        monkeypatch.setattr(environments, "MAX_GRANTS", 2)
        for name, owner in (("weather", "ann"), ("desk", "ann"), ("other", "bob")):
            await hub.push(entry(name, owner=owner))
        await hub.grant("weather", "bob", Right.USE)
        await hub.grant("desk", "bob", Right.USE)
        await hub.grant("desk", "bob", Right.PUBLISH)
        with pytest.raises(CatalogConflict, match="2 grants"):
            await hub.grant("desk", "cy", Right.USE)
        await hub.grant("other", "cy", Right.USE)
        await hub.grant("weather", "bob", None)
        await hub.grant("desk", "cy", Right.USE)
        with pytest.raises(ConfigError, match="201 characters"):
            await hub.grant("other", "x" * 201, Right.USE)
        assert (await hub.name("desk")).grants == {"bob": Right.PUBLISH, "cy": Right.USE}

    async def test_records_of_deleted_versions_count_towards_the_limit(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Their references are kept permanently, so their number needs a limit."""
        monkeypatch.setattr(environments, "MAX_OWNER_BYTES", 4_000)

        async def publish_and_delete(*versions: str) -> None:
            for version in versions:
                await hub.push(entry(version=version))
                await hub.delete_environment("weather", version)

        await publish_and_delete(*["1.0.0"] * 20, "2.0.0", "3.0.0", "4.0.0")
        with pytest.raises(ArtifactQuotaExceeded):
            await publish_and_delete(*(f"{number}.0.0" for number in range(5, 20)))

    async def test_an_invalid_token_request_is_refused(self, hub: Hub) -> None:
        with pytest.raises(ConfigError):
            await hub.create_token(Role.AGENT, "somebody")
        with pytest.raises(ConfigError):
            await hub.create_token(Role.ADMIN, "somebody", instance_id="w-1")
        for ttl_s in (0, -1, float("nan")):
            with pytest.raises(ConfigError):
                await hub.create_token(Role.ADMIN, "somebody", ttl_s=ttl_s)
        assert await hub.tokens() == ()

    # --- the rest ---------------------------------------------------------------------------

    async def test_the_first_value_of_a_key_wins(self, hub: Hub) -> None:
        assert await hub.remember("k", "first", 60) == "first"
        assert await hub.remember("k", "second", 60) == "first"
        assert await hub.remember("k2", "second", 60) == "second"
        values = {"k3": "third", "k": "third", "k4": "fourth"}
        stored = {"k3": "third", "k": "first", "k4": "fourth"}
        assert await hub.remember_all(values, 60) == stored
        assert await hub.remember_all({}, 60) == {}

    async def test_the_lifetime_of_a_value_can_only_be_shortened(self, hub: Hub) -> None:
        for key in ("soon", "stays"):
            await hub.remember(key, "first", 60)
        await hub.remember("sooner", "first", 0.001)
        await hub.shorten(["soon", "sooner", "unknown"], 0.05)
        await hub.shorten(["soon", "stays"], 3600)
        async with asyncio.timeout(10):
            while await hub.remember("soon", "b", 0.001) == "first":  # noqa: ASYNC110  # Redis forgets it
                await asyncio.sleep(0.01)
        assert await hub.remember("stays", "second", 60) == "first"

    async def test_the_number_of_keys_of_a_group_is_limited(self, hub: Hub) -> None:
        """Invariant 7: Redis refuses to write when it is full, so the hub would stop for all."""
        few, other = KeyGroup(name="few", most=2), KeyGroup(name="other", most=1)
        values = {"a": "1", "b": "2", "c": "3"}
        assert await hub.remember_all(values, 60, few) == {"a": "1", "b": "2", "c": ""}
        assert await hub.remember("a", "4", 60, few) == "1", "it is stored already"
        assert await hub.remember("c", "3", 60, other) == "3"
        await hub.shorten(["a"], 0.001, few)
        async with asyncio.timeout(10):
            while not await hub.remember("d", "5", 60, few):  # noqa: ASYNC110  # Redis forgets it
                await asyncio.sleep(0.01)
        assert await hub.remember("e", "6", 60, few) == ""

    async def test_a_value_is_replaced_only_if_it_is_unchanged(self, hub: Hub) -> None:
        await hub.remember("k", "first", 60)
        assert await hub.replace_remembered("k", "other", "second", 60) == "first"
        for _ in range(2):  # the second time after a lost answer
            assert await hub.replace_remembered("k", "first", "second", 60) == "second"
        assert await hub.remember("k", "third", 60) == "second"
        assert await hub.replace_remembered("unknown", "first", "second", 60) == "second"
        assert await hub.replace_remembered("k", "second", "second", 0.001) == "second"
        async with asyncio.timeout(10):
            while await hub.remember("k", "b", 0.001) == "second":  # noqa: ASYNC110  # Redis forgets it
                await asyncio.sleep(0.01)

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

    async def test_a_document_is_replaced_only_if_it_is_unchanged(self, hub: Hub) -> None:
        await hub.put_document("service", "s", {"n": 1, "ü": [0.1]})
        assert not await hub.replace_document("service", "s", None, {"n": 2})
        for _ in range(2):  # the second time after a lost answer
            assert await hub.replace_document("service", "new", None, {"n": 2})
        await hub.delete_document("service", "new")
        (read,) = (await hub.documents("service")).values()
        assert await hub.replace_document("service", "s", read, {"n": 2})
        assert await hub.replace_document("service", "s", read, {"n": 2})  # the answer was lost
        assert not await hub.replace_document("service", "s", read, {"n": 3})
        assert await hub.documents("service") == {"s": {"n": 2}}
        await hub.delete_document("service", "s")
        assert not await hub.replace_document("service", "s", {"n": 2}, {"n": 4})
        assert await hub.documents("service") == {}

    async def test_a_document_is_deleted_only_if_it_is_unchanged(self, hub: Hub) -> None:
        await hub.put_document("service", "s", {"n": 1, "ü": [0.1]})
        (read,) = (await hub.documents("service")).values()
        assert not await hub.delete_document("service", "s", {"n": 1})
        assert await hub.documents("service") == {"s": read}
        assert await hub.delete_document("service", "s", read)
        assert not await hub.delete_document("service", "s", read)
        assert await hub.documents("service") == {}

    async def test_it_reports_facts_about_itself(self, hub: Hub) -> None:
        await hub.push(entry())
        status = await hub.status()
        assert status["environment_versions"] == 1
        assert status["redis_version"]
