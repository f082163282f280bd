"""Waiting for the host's answer to a request of the runtime."""

from __future__ import annotations

import os
import threading
from typing import Any, Final

from aenv_ray.runtime.door.calls import current_call
from aenv_ray.runtime.door.host_link import END_PROCESSES_METHOD, HOST, SIDECAR_METHOD
from aenv_ray.runtime.faults import Fault

_END_PROCESSES_S: Final = 30.0


def ask_host(method: str, params: dict[str, Any], wait_s: float) -> dict[str, Any] | None:
    """Send a request and block until its answer, which has ``result`` or ``error``.

    Returns None if there is no answer within `wait_s`. Then, and if the call that runs this is
    stopped, the host is told to stop the request.
    """
    answers: list[dict[str, Any]] = []
    done = threading.Event()

    def on_answer(answer: dict[str, Any]) -> None:
        answers.append(answer)
        done.set()

    request_id, call = HOST.new_id(), current_call()
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


def end_sidecar_processes() -> None:
    """End the processes that tools have started in the sidecar, if there are any.

    Raises:
        Fault: The sidecar did not answer, or has ended.
    """
    if not (HOST.has_sent(SIDECAR_METHOD) and HOST.agent_has_acted):
        return
    meta = {"aenv/call_id": f"second-{os.urandom(16).hex()}", "aenv/timeout_s": _END_PROCESSES_S}
    request = {"method": END_PROCESSES_METHOD, "params": {"_meta": meta}}
    answer = ask_host(SIDECAR_METHOD, request, 2 * _END_PROCESSES_S)
    silent = {"error": {"message": "it did not answer"}}
    error: dict[str, Any] | None = (answer or silent).get("error")
    if error is not None:
        data = error.get("data") or {}
        raise Fault(
            str(data.get("code", "call_outcome_unknown")),
            f"the processes of the agent in the sidecar were not ended: {error.get('message')}",
            data.get("hint"),
        )
