"""Creates that wait for room: what happens to them while a turn is under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from aenv_ray.actors.controller import admission
from aenv_ray.actors.controller.admission import Admission, Reservation, by_node
from aenv_ray.actors.controller.admission_queue import AdmissionQueue, Ticket, explain_wait
from aenv_ray.actors.controller.host_directory import HostDirectory
from aenv_ray.actors.controller.placement import HostLoad, Need
from aenv_ray.actors.host.host_capacity import HostCapacity
from aenv_ray.actors.ray_shell.nodes import NodeFacts, SlotDemand
from aenv_ray.clock import SystemClock
from aenv_ray.errors import CapacityExceeded, FabricUnavailable, InstanceReleased
from aenv_ray.ids import HostId, InstanceId

PATIENT_S = 60.0


class FakeCluster:
    """Nodes without Ray."""

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots
        self.demands: list[list[SlotDemand]] = []

    def alive_nodes(self) -> dict[str, NodeFacts]:
        return {"node": NodeFacts(cores=4, slots=self.slots)}

    def actor_names(self) -> list[str]:
        return ["aenv-host-node-0"]

    def demand_slots(self, bundles: Sequence[SlotDemand]) -> None:
        self.demands.append(list(bundles))

    def has_autoscaler(self) -> bool:
        return False


class Remote:
    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.remote = function


class FakeHostActor:
    """A host whose capacity is real; `before_reserve` runs before each reservation."""

    def __init__(self, capacity: int) -> None:
        self.used = 0
        self.capacity = HostCapacity(HostId("h"), capacity, lambda: self.used, SystemClock())
        self.before_reserve: Callable[[list[InstanceId]], Awaitable[None]] | None = None
        self.hold = Remote(self._hold)
        self.reserve = Remote(self._reserve)

    async def _hold(self, seconds: float) -> None:
        self.capacity.hold(seconds)

    async def _reserve(self, ids: list[InstanceId], seconds: float, places: int) -> bool:
        if seconds and self.before_reserve is not None:
            await self.before_reserve(ids)
        return self.capacity.reserve(ids, seconds, places)


class FakeHosts(HostDirectory):
    def __init__(self, *hosts: FakeHostActor) -> None:
        super().__init__()
        self.hosts = {f"h{n}": host for n, host in enumerate(hosts)}
        self.nodes = dict.fromkeys(self.hosts, "node")

    async def loads(
        self, nodes: Mapping[str, NodeFacts], *, patience_s: float
    ) -> list[tuple[HostLoad, Any]]:
        return [
            (HostLoad(name, "node", host.capacity.taken(), host.capacity.capacity), host)
            for name, host in self.hosts.items()
        ]


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TURN_S", 0.001)
    monkeypatch.setattr(admission, "SOON_S", 0.001)


@pytest.fixture
async def waiting() -> AsyncIterator[Callable[..., asyncio.Task[list[Reservation]]]]:
    """Start waits; those that still wait at the end are cancelled."""
    tasks: list[asyncio.Task[list[Reservation]]] = []

    def wait(
        queue: Admission, *ids: str, wait_s: float = PATIENT_S, job: str | None = None
    ) -> asyncio.Task[list[Reservation]]:
        named = [InstanceId(name) for name in ids]
        tasks.append(asyncio.create_task(queue.wait(named, ids[0], job, wait_s)))
        return tasks[-1]

    yield wait
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def until(is_so: Callable[[], bool]) -> None:
    turns = 0
    while not is_so():  # the code under test has no event for it
        turns += 1
        await asyncio.sleep(0 if turns < 100 else 0.001)  # then it waits for time to pass


def ids_of(reservations: list[Reservation]) -> list[str]:
    return [i for one in reservations for i in one.instance_ids]


class Turnstile:
    """Stops the first reservation until the test lets it go on."""

    def __init__(self, *, fails: bool = False) -> None:
        self.reached: asyncio.Future[list[InstanceId]] = asyncio.get_running_loop().create_future()
        self.go_on = asyncio.Event()
        self._fails = fails

    async def __call__(self, ids: list[InstanceId]) -> None:
        if self.reached.done():
            return
        self.reached.set_result(ids)
        await self.go_on.wait()
        if self._fails:
            raise RuntimeError("the host has a bug")


@pytest.mark.parametrize("ending", ["timeout", "cancelled"])
@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_waiter_that_is_gone_in_the_middle_of_a_turn_costs_nobody_else_its_grant(
    waiting: Callable[..., asyncio.Task[list[Reservation]]], ending: str, is_refused: bool
) -> None:
    """The first waiter leaves while its place is being reserved; the second gets its own place."""
    host = FakeHostActor(2)
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    turnstile = host.before_reserve = Turnstile(fails=is_refused)
    first = waiting(queue, "first", wait_s=0.5 if ending == "timeout" else PATIENT_S)
    second = waiting(queue, "second")
    assert await turnstile.reached == ["first"]
    if ending == "cancelled":
        first.cancel()
    with pytest.raises(CapacityExceeded if ending == "timeout" else asyncio.CancelledError):
        await first
    turnstile.go_on.set()
    assert ids_of(await second) == ["second"]
    assert host.capacity.taken() == 1, "the place of the one that is gone is free again"


async def test_a_host_that_fails_costs_one_grant_and_not_the_whole_turn(
    waiting: Callable[..., asyncio.Task[list[Reservation]]],
) -> None:
    host = FakeHostActor(4)
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    turnstile = host.before_reserve = Turnstile(fails=True)
    all_waiters = [waiting(queue, name) for name in ("a", "b", "c")]
    await turnstile.reached
    turnstile.go_on.set()
    assert [ids_of(await one) for one in all_waiters] == [["a"], ["b"], ["c"]], "a in a later turn"


async def test_a_group_that_one_host_refuses_keeps_no_place_on_another(
    waiting: Callable[..., asyncio.Task[list[Reservation]]],
) -> None:
    """Both hosts have one place; somebody takes the second one while the first is reserved."""
    one, other = FakeHostActor(1), FakeHostActor(1)
    queue = Admission(FakeHosts(one, other), dict, FakeCluster())
    turnstile = one.before_reserve = Turnstile()
    group = waiting(queue, "g1", "g2")
    await turnstile.reached
    other.used = 1
    turnstile.go_on.set()
    small = waiting(queue, "small")
    assert ids_of(await small) == ["small"]
    assert not group.done()


async def test_the_creates_of_a_job_that_ended_stop_waiting(
    waiting: Callable[..., asyncio.Task[list[Reservation]]],
) -> None:
    host = FakeHostActor(1)
    host.used = 1
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    ended, lives = waiting(queue, "ended", job="01"), waiting(queue, "lives", job="02")
    await until(lambda: queue.reason() != "")
    queue.forget_jobs({"01"})
    with pytest.raises(CapacityExceeded, match="the Ray job that waited for slots has ended"):
        await ended
    host.used = 0
    assert ids_of(await lives) == ["lives"]


async def test_waiting_creates_become_demand_that_ends_with_them(
    waiting: Callable[..., asyncio.Task[list[Reservation]]],
) -> None:
    host, cluster = FakeHostActor(2), FakeCluster(slots=2)
    host.used = 2
    queue = Admission(FakeHosts(host), dict, cluster)
    task = waiting(queue, "a", "b", "c")
    await until(lambda: cluster.demands != [])
    assert cluster.demands == [[SlotDemand(2), SlotDemand(1)]]
    await until(lambda: "env_slot" in queue.reason())
    assert "no autoscaler runs in this cluster" in queue.reason()
    task.cancel()
    await until(lambda: cluster.demands[-1] == [])
    assert queue.reason() == ""


def accepts(host: FakeHostActor, name: str) -> bool:
    try:
        host.capacity.admit({InstanceId(name): 1})
    except CapacityExceeded:
        return False
    return True


async def test_hosts_accept_all_instances_again_once_no_create_waits(
    waiting: Callable[..., asyncio.Task[list[Reservation]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each create that comes meanwhile has to wait, and so the next ones too."""
    monkeypatch.setattr(admission, "HOLD_S", PATIENT_S)
    host = FakeHostActor(2)
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    host.used = 2
    task = waiting(queue, "a")
    await until(lambda: "1 create for" in queue.reason())
    host.used = 0
    assert not accepts(host, "b")
    await task
    assert accepts(host, "a")
    async with asyncio.timeout(PATIENT_S / 6):
        await until(lambda: accepts(host, "b"))


async def test_hosts_accept_all_instances_again_once_the_last_create_gives_up(
    waiting: Callable[..., asyncio.Task[list[Reservation]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "HOLD_S", PATIENT_S)
    host = FakeHostActor(2)
    host.used = 2
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    task = waiting(queue, "a")
    await until(lambda: "1 create for" in queue.reason())
    host.used = 1
    assert not accepts(host, "b")
    task.cancel()
    await until(lambda: accepts(host, "b"))


async def test_hosts_seem_full_to_others_while_creates_wait(
    waiting: Callable[..., asyncio.Task[list[Reservation]]],
) -> None:
    """They would refuse: a create that asked them would lose time before it queues."""
    host = FakeHostActor(4)
    host.used = 3
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    waiting(queue, "a", "b")
    await until(lambda: "1 of 4 slots" in queue.reason())
    ((load, _),) = await queue.shared_hosts(1.0, 1)
    assert (load.free, load.room(1)) == (1, 0)
    host.used = 0
    async with asyncio.timeout(PATIENT_S / 2):
        while not load.room(1):
            ((load, _),) = await queue.shared_hosts(1.0, 1)


async def test_slots_that_become_free_one_by_one_are_handed_out_soon(
    waiting: Callable[..., asyncio.Task[list[Reservation]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "TURN_S", PATIENT_S)
    host = FakeHostActor(2)
    host.used = 1
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    tasks = [waiting(queue, str(number)) for number in range(20)]
    async with asyncio.timeout(PATIENT_S / 2):
        for number, task in enumerate(tasks):
            await task
            host.capacity.forget([InstanceId(str(number))])


async def test_the_demand_changes_once_in_a_turn_of_the_longest_kind(
    waiting: Callable[..., asyncio.Task[list[Reservation]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray makes a placement group of each; a workload with short creates would flood it."""
    host, cluster = FakeHostActor(2), FakeCluster(slots=2)
    host.used = 2
    queue = Admission(FakeHosts(host), dict, cluster)
    waiting(queue, "a")
    await until(lambda: cluster.demands != [])
    monkeypatch.setattr(admission, "TURN_S", PATIENT_S)
    waiting(queue, "b")
    await until(lambda: "2 creates for" in queue.reason())
    assert cluster.demands == [[SlotDemand(1)]]
    monkeypatch.setattr(admission, "TURN_S", 0.001)
    await until(lambda: cluster.demands[-1] == [SlotDemand(2)])


async def test_hosts_that_suit_no_waiting_create_accept_all_instances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "HOLD_S", PATIENT_S)
    queue, _ = mixed(1)
    pods, other = (cast("MixedHosts", queue._hosts).hosts[n] for n in ("kubernetes", "process"))
    pods.used = other.used = 2
    waits = [
        asyncio.create_task(queue.wait([InstanceId(e)], e, None, PATIENT_S, need=Need((e,))))
        for e in ("kubernetes", "process")
    ]
    await until(lambda: "2 creates for" in queue.reason())
    other.used = 1
    await waits[1]
    assert accepts(other, "process")
    other.used = 0
    async with asyncio.timeout(PATIENT_S / 6):
        await until(lambda: accepts(other, "another"))
    loads = {load.name: load.is_held for load, _ in await queue.shared_hosts(1.0, 1)}
    assert loads == {"kubernetes": True, "process": False}
    waits[0].cancel()
    await asyncio.wait(waits)


async def test_a_create_that_fits_makes_hosts_refuse_no_other(
    waiting: Callable[..., asyncio.Task[list[Reservation]]],
) -> None:
    host = FakeHostActor(4)
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    accepted: list[bool] = []

    async def note(_: list[InstanceId]) -> None:
        accepted.append(accepts(host, "other"))

    host.before_reserve = note
    await waiting(queue, "a")
    assert accepted == [True]


async def test_a_create_that_others_overtake_again_and_again_gets_the_slots(
    waiting: Callable[..., asyncio.Task[list[Reservation]]],
) -> None:
    host = FakeHostActor(1)
    queue = Admission(FakeHosts(host), dict, FakeCluster())

    async def overtake(_: list[InstanceId]) -> None:
        host.used = 1 if accepts(host, "other") else 0

    host.before_reserve = overtake
    task = waiting(queue, "a")
    while not task.done():
        await asyncio.sleep(0)
        host.used = 0
    assert ids_of(await task) == ["a"]


async def test_a_create_ends_when_its_only_nodes_are_gone() -> None:
    """A service's machine that returns has another id; the service must learn of it."""
    host = FakeHostActor(1)
    host.used = 1
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    need = Need(node_ids=("gone",))
    with pytest.raises(FabricUnavailable, match="no host on node gone answers"):
        await queue.wait([InstanceId("a")], "a", None, PATIENT_S, need=need)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_create_that_is_released_while_it_gets_its_slots_does_not_wait_again(
    waiting: Callable[..., asyncio.Task[list[Reservation]]], is_refused: bool
) -> None:
    host = FakeHostActor(2)
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    turnstile = host.before_reserve = Turnstile(fails=is_refused)
    gone = waiting(queue, "gone")
    assert await turnstile.reached == ["gone"]
    queue.forget([InstanceId("gone")])
    with pytest.raises(InstanceReleased):
        await gone
    turnstile.go_on.set()
    stays = waiting(queue, "stays")
    assert ids_of(await stays) == ["stays"]
    assert (host.capacity.taken(), queue.reason()) == (1, "")


async def test_a_create_whose_instances_are_released_stops_waiting(
    waiting: Callable[..., asyncio.Task[list[Reservation]]],
) -> None:
    """Its caller has gone; Ray does not cancel the call of an actor for it."""
    host = FakeHostActor(1)
    host.used = 1
    queue = Admission(FakeHosts(host), dict, FakeCluster())
    gone, stays = waiting(queue, "gone"), waiting(queue, "stays")
    await until(lambda: "2 creates for" in queue.reason())
    assert queue.is_waiting([InstanceId("unknown"), InstanceId("gone")])
    queue.forget([InstanceId("gone"), InstanceId("unknown")])
    with pytest.raises(InstanceReleased, match="released while it waited"):
        await gone
    assert not queue.is_waiting([InstanceId("unknown"), InstanceId("gone")])
    host.used = 0
    assert ids_of(await stays) == ["stays"]


async def test_the_nodes_are_looked_up_again_once_they_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "SEEN_S", PATIENT_S)
    cluster = FakeCluster()
    queue = Admission(FakeHosts(FakeHostActor(1)), dict, cluster)
    looks: list[int] = []
    nodes = cluster.alive_nodes()

    def look() -> dict[str, NodeFacts]:
        looks.append(1)
        return nodes

    cluster.alive_nodes = look  # type: ignore[method-assign]
    for _ in range(3):
        await queue.shared_hosts(1.0, 1)
    assert len(looks) == 1
    queue.forget_nodes()
    await queue.shared_hosts(1.0, 1)
    assert len(looks) == 2


def counted_looks(monkeypatch: pytest.MonkeyPatch, cluster: FakeCluster) -> list[int]:
    """Let one host run, and return a list that grows each time the queue looks at the hosts."""
    looks: list[int] = []

    def names() -> list[str]:
        looks.append(1)
        return ["aenv-host-process-0"]

    monkeypatch.setattr(cluster, "actor_names", names)
    return looks


async def test_a_demand_outlives_an_idle_node_that_cannot_run_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, cluster = mixed(2, joining=("process", "kubernetes"))
    looks = counted_looks(monkeypatch, cluster)
    del cast("MixedHosts", queue._hosts).hosts["kubernetes"]
    need = Need(("process",))
    task = asyncio.create_task(queue.wait([InstanceId("a")], "a", None, PATIENT_S, need=need))
    await until(lambda: cluster.demands != [])
    reasons, seen = queue.reason(), len(looks)
    await until(lambda: len(looks) >= seen + 3)
    assert cluster.demands == [[SlotDemand(1, ("process",))]], reasons
    task.cancel()
    await asyncio.wait([task])


async def test_a_create_that_comes_while_the_demand_is_withdrawn_is_served(
    waiting: Callable[..., asyncio.Task[list[Reservation]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, cluster = FakeHostActor(2), FakeCluster(slots=2)
    host.used = 2
    queue = Admission(FakeHosts(host), dict, cluster)
    gone = waiting(queue, "gone")
    await until(lambda: cluster.demands != [])
    loop = asyncio.get_running_loop()
    late: asyncio.Future[asyncio.Task[list[Reservation]]] = loop.create_future()

    def come() -> None:
        host.used = 0
        late.set_result(waiting(queue, "late"))

    def withdraw(_: Sequence[SlotDemand]) -> None:
        if not late.done():
            loop.call_soon_threadsafe(come)
            while not len(queue._queue):
                time.sleep(0.001)

    monkeypatch.setattr(cluster, "demand_slots", withdraw)
    gone.cancel()
    assert ids_of(await (await late)) == ["late"]


async def test_a_restarted_controller_keeps_the_demand_of_creates_that_wait_already(
    waiting: Callable[..., asyncio.Task[list[Reservation]]],
) -> None:
    """Ray repeats their calls before the controller has taken over."""
    host, cluster = FakeHostActor(2), FakeCluster(slots=2)
    host.used = 2
    queue = Admission(FakeHosts(host), dict, cluster)
    waiting(queue, "a")
    await until(lambda: "env_slot" in queue.reason())
    await queue.open()
    assert cluster.demands == [[SlotDemand(1)]]


async def test_no_worker_is_asked_for_where_only_certain_nodes_will_do() -> None:
    host, cluster = FakeHostActor(2), FakeCluster(slots=2)
    host.used = 2
    queue = Admission(FakeHosts(host), dict, cluster)
    need = Need(node_ids=("node",))
    task = asyncio.create_task(queue.wait([InstanceId("a")], "a", None, PATIENT_S, need=need))
    await until(lambda: " for " in queue.reason())
    assert cluster.demands == []
    host.used = 1
    assert ids_of(await task) == ["a"]


def explained(**facts: Any) -> str:
    queue = AdmissionQueue()
    queue.add(Ticket((InstanceId("a"), InstanceId("b")), "o", None, 0.0))
    given = {
        "draining": 0,
        "demanded_slots": 0,
        "demanded_for_s": 0.0,
        "has_autoscaler": False,
    } | facts
    return explain_wait(queue, free=1, capacity=4, hosts=2, **given)


def test_the_reason_says_what_is_missing_and_why_no_worker_comes() -> None:
    assert explained() == "1 of 4 slots on 2 hosts are free; 1 create for 2 instances waits"
    assert "no autoscaler runs" in explained(demanded_slots=3)
    assert "1 of the cluster's nodes take none because they are draining" in explained(draining=1)
    slow = explained(demanded_slots=3, demanded_for_s=40.0, has_autoscaler=True)
    assert "asked for 3 more env_slot resources 40 s ago and no worker has joined" in slow


class Mixed(FakeCluster):
    """A cluster whose nodes declare their engines."""

    def alive_nodes(self) -> dict[str, NodeFacts]:
        return {
            name: NodeFacts(cores=4, slots=2, engine=name) for name in ("process", "kubernetes")
        }

    def actor_names(self) -> list[str]:
        return [f"aenv-host-{name}-0" for name in self.alive_nodes()]


class MixedHosts(FakeHosts):
    async def loads(
        self, nodes: Mapping[str, NodeFacts], *, patience_s: float
    ) -> list[tuple[HostLoad, Any]]:
        return [
            (HostLoad(name, name, host.capacity.taken(), host.capacity.capacity, (name,)), host)
            for name, host in self.hosts.items()
        ]


def mixed(used: int, joining: Sequence[str] = ()) -> tuple[Admission, Mixed]:
    hosts = MixedHosts()
    hosts.hosts = {name: FakeHostActor(2) for name in ("process", "kubernetes")}
    for host in hosts.hosts.values():
        host.used = used
    cluster = Mixed(slots=2)
    return Admission(hosts, dict, cluster, joining), cluster


async def test_an_engine_that_no_node_has_is_refused_with_those_that_they_have() -> None:
    queue, _ = mixed(0, joining=("process", "kubernetes"))
    with pytest.raises(FabricUnavailable, match=r"engine docker; .*1 with kubernetes; 1 with proc"):
        await queue.shared_hosts(1.0, 1, Need(("docker",)))
    assert len(await queue.shared_hosts(1.0, 1, Need(("docker", "process")))) == 2
    with pytest.raises(FabricUnavailable, match="engine docker"):
        await queue.wait([InstanceId("a")], "a", None, PATIENT_S, need=Need(("docker",)))
    queue, _ = mixed(0, joining=("docker",))
    assert len(await queue.shared_hosts(1.0, 1, Need(("docker",)))) == 2, "such a worker may join"


async def test_a_worker_that_leaves_holds_up_no_create_of_another_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, cluster = mixed(2)
    only = {"process": cluster.alive_nodes()["process"]}
    waits = [
        asyncio.create_task(queue.wait([InstanceId(e)], e, None, PATIENT_S, need=Need((e,))))
        for e in ("kubernetes", "process")
    ]
    await until(lambda: cluster.demands != [])
    monkeypatch.setattr(cluster, "alive_nodes", lambda: only)
    cast("MixedHosts", queue._hosts).hosts["process"].used = 0
    assert [one.host_name for one in await waits[1]] == ["process"]
    waits[0].cancel()
    await asyncio.wait(waits)


async def test_a_reservation_is_on_a_host_of_the_engine() -> None:
    queue, _ = mixed(0)
    need = Need(("kubernetes",))
    reserved = await queue.wait([InstanceId("a")], "a", None, PATIENT_S, need=need)
    assert [one.host_name for one in reserved] == ["kubernetes"]


@pytest.mark.parametrize(
    ("engines", "selected"), [(("process",), ("process",)), (("kubernetes", "process"), ())]
)
async def test_demand_selects_an_engine_only_where_not_every_worker_will_do(
    engines: tuple[str, ...], selected: tuple[str, ...]
) -> None:
    queue, cluster = mixed(2)
    need = Need(engines)
    task = asyncio.create_task(queue.wait([InstanceId("a")], "a", None, PATIENT_S, need=need))
    await until(lambda: cluster.demands != [])
    assert cluster.demands[0] == [SlotDemand(1, selected)]
    task.cancel()
    await asyncio.wait([task])


async def test_an_instance_waits_for_room_for_its_inner_ones_too() -> None:
    """Invariant 14: they take no slots later, when an agent has them created."""
    host, cluster = FakeHostActor(4), FakeCluster(slots=4)
    host.used = 2
    queue = Admission(FakeHosts(host), dict, cluster)
    ids = [InstanceId("a"), InstanceId("b")]
    task = asyncio.create_task(queue.wait(ids, "a", None, PATIENT_S, True, Need(places=3)))
    await until(lambda: cluster.demands != [])
    assert cluster.demands == [[SlotDemand(3), SlotDemand(3)]], "each on one node"
    host.used = 0
    assert ids_of(await task) == ["a"]
    assert host.capacity.taken() == 3


def test_dedicated_instances_count_with_their_inner_ones() -> None:
    nodes = {"one": "n", "two": "n", "three": "m", "unknown": None}
    assert by_node(nodes, {"one": 3, "unknown": 4}) == {"n": 4, "m": 1}


class Slow(MixedHosts):
    """One node's host does not start, or not soon."""

    def __init__(self, error: FabricUnavailable | None) -> None:
        super().__init__()
        self.error = error
        self.asked = 0

    async def loads(
        self, nodes: Mapping[str, NodeFacts], *, patience_s: float
    ) -> list[tuple[HostLoad, Any]]:
        if "slow" not in nodes:
            return await super().loads(nodes, patience_s=patience_s)
        self.asked += 1
        if self.error is None:
            await asyncio.sleep(PATIENT_S)
        self._refused["slow"] = (asyncio.get_running_loop().time() + PATIENT_S, self.error)
        raise self.error or FabricUnavailable("too late")


@pytest.mark.parametrize("error", [None, FabricUnavailable("its host does not start")])
async def test_a_node_whose_host_does_not_start_holds_up_no_create(
    monkeypatch: pytest.MonkeyPatch, error: FabricUnavailable | None
) -> None:
    """The demand remains, too: the node may never come up."""
    monkeypatch.setattr(admission, "PATIENCE_S", 0.01)
    hosts, cluster = Slow(error), Mixed(slots=2)
    hosts.hosts = {"process": FakeHostActor(2)}
    hosts.hosts["process"].used = 2
    nodes = {name: NodeFacts(cores=4, slots=2, engine="process") for name in ("process", "slow")}
    monkeypatch.setattr(cluster, "alive_nodes", lambda: nodes)
    looks = counted_looks(monkeypatch, cluster)
    queue = Admission(hosts, dict, cluster)
    need = Need(("process",))
    waits = [
        asyncio.create_task(queue.wait([InstanceId(i)], "o", None, PATIENT_S, need=need))
        for i in ("first", "second")
    ]
    await until(lambda: hosts.asked > 0 and "2 creates for" in queue.reason())
    hosts.hosts["process"].used = 1
    assert ids_of(await waits[0]) == ["first"]
    if error is not None:
        await until(lambda: cluster.demands[-1:] == [[SlotDemand(1)]])
        told, asked, seen = len(cluster.demands), hosts.asked, len(looks)
        await until(lambda: len(looks) >= seen + 3)
        assert (len(cluster.demands), hosts.asked) == (told, asked), "it is refused for a while"
    waits[1].cancel()
    await asyncio.wait(waits)
