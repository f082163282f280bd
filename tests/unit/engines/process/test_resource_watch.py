"""Which sandboxes end because they use too much of the node, and when processes are scanned."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_ray.engines.process import resource_watch
from aenv_ray.engines.process.resource_watch import (
    Measured,
    Node,
    ResourceWatch,
    SandboxUsage,
    Watched,
    _KernelBuffers,
    count_watches,
    measure,
    offences,
    read_node,
)
from aenv_ray.errors import InsideCause

GIB = 1 << 30
CALM = Node(16 * GIB, 12 * GIB, 0, 500, 32_768)


def usage(name: str, used: int, limit: int = 8 * GIB, processes: int = 1) -> SandboxUsage:
    return SandboxUsage(name, used, limit, processes)


def test_a_sandbox_ends_beyond_its_own_limit_whatever_the_node_has_left() -> None:
    (offence,) = offences([usage("a", GIB + 1, GIB), usage("b", 2 * GIB)], CALM)
    assert (offence.id, offence.inside) == ("a", InsideCause.MEMORY)
    assert "1024 MiB (deployConfig.memory)" in offence.cause


def test_a_node_without_memory_ends_the_largest_and_blames_nobody() -> None:
    short = CALM._replace(available_bytes=GIB)
    (offence,) = offences([usage("a", GIB), usage("b", 2 * GIB)], short)
    assert (offence.id, offence.inside) == ("b", None)


def test_a_node_that_others_filled_ends_no_small_sandbox() -> None:
    assert offences([usage("a", GIB // 2)], CALM._replace(available_bytes=GIB)) == []


def test_a_node_without_process_ids_ends_the_sandbox_with_most() -> None:
    short = CALM._replace(process_ids=30_000)
    (offence,) = offences([usage("a", 1, processes=900), usage("b", 1, processes=1000)], short)
    assert (offence.id, offence.inside) == ("b", InsideCause.PROCESSES)
    assert "kernel.pid_max" in offence.cause
    assert offences([usage("a", 1, processes=200)], short) == []


def test_the_sandbox_with_most_watches_of_epoll_ends_when_all_have_their_share() -> None:
    node = CALM._replace(max_watches=1_000)
    few = [SandboxUsage(name, 1, GIB, 1, watches) for name, watches in (("a", 100), ("b", 150))]
    assert offences(few, node) == []
    (offence,) = offences([*few, SandboxUsage("c", 1, GIB, 1, 1)], node)
    assert (offence.id, offence.inside) == ("b", InsideCause.PROCESSES)
    assert "150 watches" in offence.cause
    assert "251 of the user's 1000 (fs.epoll.max_user_watches)" in offence.cause


def test_a_template_ends_beyond_its_own_limits_only_while_instances_depend_on_it() -> None:
    """Invariant 14: an agent that makes the node run short voids no other episode."""
    short = CALM._replace(available_bytes=GIB, process_ids=30_000)
    idle = SandboxUsage("template", 4 * GIB, 8 * GIB, 1000, 0, 1024)
    used = replace(idle, has_instances=True)
    assert [offence.id for offence in offences([idle], short)] == ["template"]
    assert offences([used], short) == []
    (offence,) = offences([replace(used, processes=1025)], CALM)
    assert (offence.id, offence.inside) == ("template", InsideCause.PROCESSES)
    (offence,) = offences([replace(used, bytes=9 * GIB)], CALM)
    assert (offence.id, offence.inside) == ("template", InsideCause.MEMORY)


def test_watches_of_epoll_are_counted_up_to_a_limit() -> None:
    before = count_watches([os.getpid()], sys.maxsize)
    with select.epoll() as first, select.epoll() as second, socket.socket() as one:
        for instance in (first, second):
            instance.register(one)
        grown = count_watches([os.getpid()], sys.maxsize) - before
        assert grown == 2 * (resource_watch._EPOLL_WATCHES + 1)
        assert before < count_watches([os.getpid()], before) <= before + grown


def test_watches_of_epoll_are_counted_once_the_kernel_could_hold_that_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = CALM._replace(kernel_bytes=GIB, max_watches=1 << 20)
    counted: list[list[int]] = []
    monkeypatch.setattr(resource_watch, "read_node", lambda: node)
    monkeypatch.setattr(
        resource_watch, "count_watches", lambda pids, most: counted.append([most, *pids]) or most
    )
    watch = ResourceWatch(lambda: [Watched("a", os.getpid(), None, is_isolated=False)])
    monkeypatch.setattr(watch, "_is_due", lambda *_: True)
    monkeypatch.setattr(watch, "_is_urgent", lambda *_: True)
    watch.check()
    node = node._replace(kernel_bytes=GIB + (32 << 20))
    watch.check()
    assert counted == []
    node = node._replace(kernel_bytes=GIB + (32 << 20) + 1)
    watch.check()
    assert [most for most, *_ in counted] == [1 << 18]


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="needs /proc")
def test_processes_are_read_only_when_the_nodes_memory_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 7 at no cost: a thousand idle sandboxes cost a check two reads."""
    asked = []
    nodes = [CALM, CALM, CALM._replace(available_bytes=CALM.available_bytes - GIB)]
    monkeypatch.setattr(resource_watch, "read_node", lambda: nodes.pop(0))
    monkeypatch.setattr(resource_watch, "MAX_CPU_SHARE", 1e9)
    watch = ResourceWatch(lambda: asked.append(1) or [])  # type: ignore[func-returns-value]
    counts = []
    while nodes:
        watch.check()
        counts.append(len(asked))
    assert counts == [1, 1, 2]


def test_a_busy_node_or_fast_growth_delays_no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: a sandbox that keeps the cores busy would take the memory of its node unseen."""
    scans: list[int] = []
    now = [0.0, 0.0]  # of the wall, and of the processor

    def scan() -> list[Watched]:
        scans.append(1)
        now[0] += 10.0  # a long wait for a core
        now[1] += cost
        return []

    gone = 0

    def node_with_less() -> Node:
        return CALM._replace(available_bytes=CALM.available_bytes - gone)

    monkeypatch.setattr(resource_watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(resource_watch.time, "process_time", lambda: now[1])
    monkeypatch.setattr(resource_watch, "read_node", node_with_less)
    watch = ResourceWatch(scan)
    cost = 0.001
    watch.check()
    now[0] += 0.5
    gone += 64 << 20
    watch.check()
    assert len(scans) == 2, "the first scan waited for a core, and took little of it"
    cost = 10.0
    now[0] += 0.5
    gone += 64 << 20
    watch.check()
    now[0] += 0.5
    gone += 64 << 20
    watch.check()
    assert len(scans) == 3, "that scan was expensive"
    gone += 2 * GIB
    watch.check()
    assert len(scans) == 4, "this much may be a sandbox that fills the node"


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="needs /proc")
def test_a_memory_file_counts_once_whoever_has_it_open() -> None:
    own = Watched("a", os.getpid(), None, is_isolated=False)
    before = measure([os.getpid()], own).bytes
    kept = os.memfd_create("kept")
    again = os.dup(kept)
    try:
        os.write(kept, bytes(32 << 20))
        grown = measure([os.getpid()], own).bytes - before
        assert 32 << 20 <= grown < 60 << 20
    finally:
        os.close(kept)
        os.close(again)
    assert read_node() is not None


def test_idle_sockets_and_pipes_count_with_what_the_kernel_keeps_for_them() -> None:
    """Invariant 7: a sandbox with a million of them takes gigabytes, and a neighbour would end."""
    own = Watched("a", os.getpid(), None, is_isolated=False)
    before = measure([os.getpid()], own).bytes
    pairs = [socket.socketpair() for _ in range(1000)]
    try:
        grown = measure([os.getpid()], own).bytes - before
    finally:
        for pair in pairs:
            for sock in pair:
                sock.close()
    assert grown >= 2000 * resource_watch._OBJECT_BYTES


def test_unread_data_counts_once_whether_its_sender_is_open_or_not() -> None:
    """Invariant 7: the kernel keeps it, and it appears in no process."""
    own = Watched("a", os.getpid(), None, is_isolated=False)
    before = measure([os.getpid()], own).bytes
    reader, writer = os.pipe()
    pairs = [socket.socketpair() for _ in range(40)]
    try:
        os.write(writer, b"x")
        for sender, _ in pairs:
            sender.setblocking(False)
            while _sends(sender):
                pass
        unread = len(pairs) * 150_000
        both_open = measure([os.getpid()], own).bytes - before
        for sender, _ in pairs:
            sender.close()
        half_open = measure([os.getpid()], own).bytes - before
    finally:
        os.close(reader)
        os.close(writer)
        for pair in pairs:
            for sock in pair:
                sock.close()
    assert unread < half_open <= both_open + (1 << 20)
    assert both_open < 3 * unread


def _sends(sender: socket.socket) -> bool:
    try:
        return sender.send(bytes(65_536)) > 0
    except BlockingIOError:
        return False


def test_a_descriptor_that_changed_meanwhile_is_closed(tmp_path: Path) -> None:
    """Invariant 7: a sandbox that races with the launcher does not use up its descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    with (tmp_path / "file").open("w") as file, pytest.raises(OSError, match="non-socket"):
        _KernelBuffers().add(os.getpid(), file.fileno(), "socket:[1]")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_socket_that_lingers_does_not_stop_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 3: a sandbox that closes it while it is measured leaves the last close to us."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    sender.setblocking(False)
    while _sends(sender):
        pass
    name = os.readlink(f"/proc/self/fd/{sender.fileno()}")
    add_socket = _KernelBuffers._add_socket

    def closed_meanwhile(buffers: _KernelBuffers, descriptor: int) -> None:
        add_socket(buffers, descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}") == name:
            sender.close()

    monkeypatch.setattr(_KernelBuffers, "_add_socket", closed_meanwhile)
    with receiver:
        measure([os.getpid()], Watched("a", os.getpid(), None, is_isolated=False))
    assert sender.fileno() == -1


def test_memory_in_no_process_has_sandboxes_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: measuring is dear, so it takes a reason."""
    limit = 8 * GIB  # more than this process uses
    watched = [Watched("a", os.getpid(), limit, is_isolated=False)]
    nodes = [CALM._replace(kernel_bytes=GIB), CALM._replace(kernel_bytes=10 * GIB)]
    monkeypatch.setattr(resource_watch, "read_node", lambda: nodes[0])
    monkeypatch.setattr(resource_watch, "SCAN_EVERY_S", 0.0)
    monkeypatch.setattr(resource_watch, "MAX_CPU_SHARE", 1e9)
    monkeypatch.setattr(resource_watch, "measure", lambda *_: Measured(2 * limit, 0, 0))
    watch = ResourceWatch(lambda: watched)
    assert watch.check() == []
    nodes.pop(0)
    assert [offence.id for offence in watch.check()] == ["a"]


def test_hidden_memory_is_charged_to_who_keeps_descriptors_in_transit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 14: not to a sandbox that passes a descriptor just then, nor to one without."""
    found = {
        "keeps": Measured(1, 1, 1),
        "passes": Measured(1, 1, 9),
        "owns": Measured(4 * GIB, 4 * GIB, 0),
    }
    node = CALM
    monkeypatch.setattr(resource_watch, "read_node", lambda: node)
    monkeypatch.setattr(resource_watch, "_tmpfs_of_node", lambda: GIB)
    monkeypatch.setattr(resource_watch, "MAX_CPU_SHARE", 1e9)
    watch = ResourceWatch(lambda: [Watched(name, 0, 5 * GIB, is_isolated=False) for name in found])
    monkeypatch.setattr(watch, "_is_due", lambda *_: True)
    monkeypatch.setattr(watch, "_is_urgent", lambda *_: True)
    monkeypatch.setattr(watch, "_measure", lambda one, *_: _noted(watch, one.id, found[one.id]))
    node = CALM._replace(shared_bytes=10 * GIB)  # 1 of the node, 4 of a sandbox, 5 hidden
    watch._others_bytes = 0
    assert watch.check() == []
    found["passes"] = Measured(1, 1, 0)
    assert watch.check() == [], "5 GiB are its limit"
    node = CALM._replace(shared_bytes=11 * GIB)
    (offence,) = watch.check()
    assert (offence.id, offence.inside) == ("keeps", InsideCause.MEMORY)


def _noted(watch: ResourceWatch, name: str, measured: Measured) -> Measured:
    watch._measured[name] = 0, measured
    return measured
