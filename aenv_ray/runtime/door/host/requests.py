"""Waiting for the host's answer to a request of the runtime."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from aenv_ray.runtime.door.host.link import (
    AFTER_REWARD_METHOD,
    END_PROCESSES_METHOD,
    ENVIRONMENT_METHOD,
    HELD_S,
    HOST,
    OUTER_REWARDS,
    SIDECAR_METHOD,
)
from aenv_ray.runtime.faults import Fault

_END_PROCESSES_S: Final = 30.0
_LEAST_S: Final = 0.001


class Stoppable(Protocol):
    """A call that may be stopped while it waits."""

    def bind_stop(self, stop: Callable[[], Any]) -> None:
        """See `RunningCall.bind_stop`."""
        ...

    def unbind_stop(self, stop: Callable[[], Any]) -> None:
        """See `RunningCall.unbind_stop`."""
        ...


def ask_host(
    method: str, params: dict[str, Any], wait_s: float, call: Stoppable
) -> dict[str, Any] | None:
    """Send a request and block until its answer, which has ``result`` or ``error``.

    Returns None if there is no answer within `wait_s`. Then, and if the `call` that runs this is
    stopped, the host is told to stop the request.
    """
    answers: list[dict[str, Any]] = []
    done = threading.Event()

    def on_answer(answer: dict[str, Any]) -> None:
        answers.append(answer)
        done.set()

    request_id = HOST.new_id()
    try:  # an interrupt may come as soon as the request is sent
        HOST.ask(request_id, method, params, on_answer)
        call.bind_stop(done.set)  # a waiting thread is interrupted when it wakes
        done.wait(wait_s)
    finally:
        HOST.cancel(request_id)  # does nothing after the answer
        call.unbind_stop(done.set)
    return answers[0] if answers else None


async def ask_host_async(
    method: str, params: dict[str, Any], wait_s: float
) -> dict[str, Any] | None:
    """Send a request and return its answer, as `ask_host` does; cancelling it tells the host."""
    import asyncio  # imported here, to keep sandboxes without async code small

    loop = asyncio.get_running_loop()
    future: asyncio.Future[dict[str, Any]] = loop.create_future()

    def settle(answer: dict[str, Any]) -> None:
        if not future.done():
            future.set_result(answer)

    request_id = HOST.new_id()
    HOST.ask(request_id, method, params, lambda a: loop.call_soon_threadsafe(settle, a))
    try:
        await asyncio.wait((future,), timeout=wait_s)
    finally:
        HOST.cancel(request_id)
    return future.result() if future.done() else None


def end_processes_elsewhere(within_s: float, call: Stoppable, rewards: int, held_s: float) -> None:
    """End the processes that tools have started in the sidecar and in inner instances.

    Calls of tools that began before are refused there from then on.

    Args:
        within_s: The time of the call that needs it.
        call: That call.
        rewards: How many rewards have begun here.
        held_s: How long inner instances refuse callers from elsewhere, at most: until
            `tell_of_end`.

    Raises:
        Fault: There was no answer in time, or the sidecar or an inner instance has failed.
    """
    if not HOST.agent_has_acted:
        return
    ends_at = time.monotonic() + min(within_s, _END_PROCESSES_S)
    request: dict[str, Any]
    if HOST.has_sent(SIDECAR_METHOD):
        left_s = max(_LEAST_S, ends_at - time.monotonic())
        meta = {"aenv/call_id": _new_call_id(), "aenv/timeout_s": left_s}
        meta |= {OUTER_REWARDS: rewards, HELD_S: held_s}
        request = {"method": END_PROCESSES_METHOD, "params": {"_meta": meta}}
        _end_processes("the sidecar", SIDECAR_METHOD, request, left_s, call)
    if HOST.has_sent(ENVIRONMENT_METHOD):
        left_s = max(_LEAST_S, ends_at - time.monotonic())
        request = _for_all_inner(END_PROCESSES_METHOD, left_s, rewards) | {"held_s": held_s}
        _end_processes("inner instances", ENVIRONMENT_METHOD, request, left_s, call)


def tell_of_end(rewards: int) -> None:
    """Tell inner instances that a reward here has ended; does not wait for an answer.

    Args:
        rewards: How many rewards have begun here.
    """
    if HOST.agent_has_acted and HOST.has_sent(ENVIRONMENT_METHOD):
        request = _for_all_inner(AFTER_REWARD_METHOD, _END_PROCESSES_S, rewards)
        HOST.ask(HOST.new_id(), ENVIRONMENT_METHOD, request, lambda _: None)


def _for_all_inner(method: str, timeout_s: float, rewards: int) -> dict[str, Any]:
    return {
        "environment": "",  # all of them
        "key": "",
        "method": method,
        "params": {},
        "timeout_s": timeout_s,
        "call_id": _new_call_id(),
        "rewards": rewards,
    }


def _new_call_id() -> str:
    return f"end-{os.urandom(16).hex()}"


def _end_processes(
    where: str, method: str, request: dict[str, Any], wait_s: float, call: Stoppable
) -> None:
    silent = {"error": {"message": f"no answer within {wait_s:.3g} s"}}
    answer = ask_host(method, request, wait_s, call) or silent
    error: dict[str, Any] | None = answer.get("error")
    if error is not None:
        data = error.get("data") or {}
        raise Fault(
            str(data.get("code", "call_outcome_unknown")),
            f"the processes of the agent in {where} were not ended: {error.get('message')}",
            data.get("hint"),
        )
