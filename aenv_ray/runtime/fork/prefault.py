"""One call in a process that waits for its instance, so that the instance's first is not slow.

A forked process shares its template's pages until it writes to them; each first write copies one.
CPython writes wherever it looks, for it counts references in the objects themselves: a first call
through the fast door touches some 300 pages, which costs as much as five later calls. A spare
process has the time to touch them before anybody waits.
"""

from __future__ import annotations

import socket
from typing import Final

from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.door import Connection

_CALL: Final = (
    b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"rehearse","arguments":'
    b'{"text":""},"_meta":{"aenv/call_id":"rehearsal","aenv/timeout_s":60}}}\n'
)
_DEADLINE_S: Final = 10.0


class Rehearsal:
    """Made once in a template, before it forks; nothing of the environment's own runs in it."""

    def __init__(self) -> None:
        registry = Registry()
        registry.add_tool(_rehearse, name="rehearse")
        registry.compile()
        self._dispatcher = Dispatcher(registry)

    def run(self) -> None:
        """Make the call and wait for its answer.

        Raises:
            OSError: This process gets no thread or descriptor, or no answer came: it is of no use.
        """
        self._dispatcher.begin()
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(_DEADLINE_S)
            connection = Connection(theirs, self._dispatcher)
            connection.start()
            ours.sendall(_CALL)
            answer = ours.recv(4096)
        if b'"result"' not in answer:
            raise OSError(f"a call that rehearses got {answer!r}")


def _rehearse(text: str) -> str:
    return text
