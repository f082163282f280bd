"""A process forked from a template: first a spare, then an instance.

A spare is isolated and waits for its assignment. None of the environment's functions has run in it.
While it waits it makes a call that does nothing, so that the instance's first call is fast. A
forked process shares each page of its template until it writes to the page, and CPython counts
references in the objects themselves: a first call through the fast door copies about 300 pages,
which costs as much as five later calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import pydantic_core

from aenv_ray.runtime.api.loader import load_project
from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.door import Connection, serve
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.fork import jail
from aenv_ray.runtime.fork.jail_spec import STORAGE, WORK, JailSpec
from aenv_ray.runtime.fork.preload import OpenedFile
from aenv_ray.runtime.system import linux, storage_lock
from aenv_ray.runtime.system.reaper import Acceptor
from aenv_ray.runtime.system.signals import ignore_signals_from_inside
from aenv_ray.runtime.system.threads import no_threads

PACKET_BYTES: Final = 1 << 20
SPARE_NAME: Final = "aenv-spare"
"""Name of a spare in the process table."""
INSTANCE_NAME: Final = "aenv-instance"
_OOM_SCORE: Final = 1000
"""The score of Ray's workers, too; among equal scores, the kernel kills the largest process."""
_BOOT_FAILED_EXIT: Final = 70  # EX_SOFTWARE
_ERROR_CHARACTERS: Final = 60_000
_LAST_FD: Final = 1 << 20
_MOST_DESCRIPTORS: Final = 64
"""Maximum number of descriptors in a packet; the launcher sends fewer."""


@dataclass(frozen=True)
class Spare:
    """What a template gives its forks; `run` is called in the forked process."""

    spec: JailSpec
    jailed: bool
    project: str
    dispatcher: Dispatcher | None
    """Dispatcher of the loaded project. None: every instance loads the project itself."""
    hides_source_late: bool
    """The instance hides the project after it has loaded it."""
    first_call: FirstCall
    kept: tuple[int, ...]
    """Descriptors of the files and devices that the project opened when it was loaded."""
    files: tuple[OpenedFile, ...]
    """The files that each instance opens for itself."""

    def run(self, channel_fd: int, *, prefaults: bool) -> NoReturn:
        """Wait for an assignment on a channel to the launcher, and be that instance until its end.

        Args:
            channel_fd: The channel.
            prefaults: Whether to make the first call, unless the assignment is there already.
        """
        assignment: dict[str, Any] | None = None
        channel = socket.socket(fileno=channel_fd)
        try:
            channel.send(b'{"waits":true}')
            # No descriptor of the template may stay open, such as its socket to the launcher.
            _close_all_but([0, 1, 2, *self.kept, channel_fd])
            for file in self.files:
                file.reopen()
            cover = jail.SourceCover() if self.hides_source_late else None
            linux.set_process_name(SPARE_NAME)
            self._isolate()
            if prefaults and not _is_readable(channel):
                self.first_call.run()
            assignment, (listener_fd, log_fd) = _receive_assignment(channel)
            self._boot(assignment, listener_fd, log_fd, cover, channel)
        except BaseException as exc:  # noqa: BLE001  # the launcher must hear of every failure
            text = str(exc) if isinstance(exc, ProjectLoadError) else traceback.format_exc()
            if assignment is None:
                print(text, file=sys.stderr, flush=True)  # noqa: T201  # the template's log
            else:
                report = {"boot_failed": text[-_ERROR_CHARACTERS:]}
                with contextlib.suppress(OSError):
                    # Escaped characters could make it too large for a packet.
                    packet = json.dumps(report, ensure_ascii=False).encode(errors="replace")
                    channel.send(packet)
            os._exit(_BOOT_FAILED_EXIT)
        os._exit(0)

    def _isolate(self) -> None:
        """Enter the jail, and give up all privileges."""
        linux.set_oom_score(_OOM_SCORE)
        if self.jailed:
            jail.enter(self.spec)
        else:
            linux.die_with_parent()
            os.setsid()
            linux.become_subreaper()
            jail.lock(self.spec, jailed=False)
            linux.die_with_parent()  # set again, because changing credentials clears it

    def _boot(
        self,
        assignment: dict[str, Any],
        listener_fd: int,
        log_fd: int,
        cover: jail.SourceCover | None,
        channel: socket.socket,
    ) -> None:
        linux.set_process_name(INSTANCE_NAME)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        home = WORK
        if not self.jailed:
            home = assignment["work_dir"]
            os.chdir(home)
        # Only variables that differ: each page that this process writes to is copied first.
        for name, value in {"HOME": home, **assignment["env"]}.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        sys.argv[1:] = assignment["arguments"]
        if self.spec.storage:
            storage_lock.lock_storage(f"{STORAGE}/lock", is_shared=self.spec.storage_is_shared)
        dispatcher = self.dispatcher
        if dispatcher is None:
            dispatcher = Dispatcher(load_project(self.project))
            if self.jailed:
                ignore_signals_from_inside()
        if cover is not None:
            cover.hide()
        dispatcher.begin(owns_sandbox=self.jailed)
        listener = socket.socket(fileno=listener_fd)
        with channel:
            channel.send(b'{"booted":true}')
        serve(Acceptor(listener).accept, dispatcher)


def _close_all_but(kept: Sequence[int]) -> None:
    """Close all descriptors but some, with few system calls."""
    first = 0
    for fd in sorted(kept):
        if fd > first:  # an empty range would close all descriptors
            os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, _LAST_FD)


def _is_readable(channel: socket.socket) -> bool:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(0))


def _receive_assignment(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for the assignment; end this process when the launcher closes the channel."""
    data, fds = receive(channel)
    if not data:
        os._exit(0)
    assignment: dict[str, Any] = pydantic_core.from_json(data)
    return assignment, fds


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors, which child processes do not inherit."""
    data, fds, _, _ = socket.recv_fds(sock, PACKET_BYTES, _MOST_DESCRIPTORS)
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, list(fds)


_HELLO: Final = b'{"jsonrpc":"2.0","id":0,"method":"aenv/hello","params":{"role":"owner"}}\n'
"""Not the host: the code of a project that is imported later must not find one."""
_REHEARSALS: Final = 32
"""CPython specialises a function after 8 calls, and its instructions after some more."""
_CALL_DEADLINE_S: Final = 10.0


def _call(method: str, name: str, arguments: str, number: int) -> bytes:
    """Return a request as hosts send it."""
    meta = f'{{"aenv/call_id":"prefault-{number}","aenv/timeout_s":60}}'
    params = f'{{"name":"{name}","arguments":{arguments},"_meta":{meta}}}'
    head = f'{{"jsonrpc":"2.0","id":{number + 1},"method":"{method}"'
    return f'{head},"params":{params}}}\n'.encode()


class FirstCall:
    """A call of a tool of our own, made in a spare to copy pages; see the module.

    Created in the template, so that its forks share it.
    """

    def __init__(self) -> None:
        registry = Registry()
        registry.add_tool(_echo, name="echo")
        registry.add_function(_ready, endpoint="ready")
        registry.add_reward(_score, name="score")
        registry.compile()
        self._registry = registry
        self._dispatcher = Dispatcher(registry)

    def rehearse(self) -> None:
        """Make calls in the template, without a thread, so that its forks copy fewer pages.

        CPython 3.11 and later count the calls of a function in its code, and rewrite the code as
        they specialise it. A fork that runs code which is specialised already leaves it unchanged.
        """
        dispatcher = Dispatcher(self._registry)
        dispatcher.begin()
        requests = [_HELLO]
        for number in range(0, 3 * _REHEARSALS, 3):
            requests += [
                _call("aenv/function", "ready", "{}", number),
                _call("tools/call", "echo", '{"text":""}', number + 1),
                _call("aenv/reward", "score", "{}", number + 2),
            ]
        # Packets, so that requests are read one at a time, as in an instance.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, no_threads():
            for request in requests:
                ours.send(request)
            ours.shutdown(socket.SHUT_WR)
            Connection(theirs, dispatcher).serve()

    def run(self) -> None:
        """Make the call and wait for its answer.

        Raises:
            OSError: This process gets no thread or descriptor, or no answer: it is unusable.
        """
        self._dispatcher.begin()
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(_CALL_DEADLINE_S)
            connection = Connection(theirs, self._dispatcher)
            connection.start()
            ours.sendall(_HELLO + _call("tools/call", "echo", '{"text":""}', 0))
            answer = b""
            while answer.count(b"\n") < 2:
                answer += ours.recv(4096)
        if b'"content"' not in answer:
            raise OSError(f"the first call of a spare failed: {answer!r}")


def _echo(text: str) -> str:
    return text


def _ready() -> bool:
    return True


def _score() -> float:
    return 0.0
