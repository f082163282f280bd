"""Runs calls: the one path behind both doors, so that they cannot differ.

A call arrives as a method and its parameters and leaves as an *outcome*: the bytes of a JSON-RPC
``"result":…`` or ``"error":…`` member. Every call has an id; a repeated id never runs anything
again (design D6).
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aenv_ray.runtime.api.registry import Registered, Registry
from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.door import ports, workspace
from aenv_ray.runtime.door.answers import (
    LOST,
    Outcome,
    fault_outcome,
    never_ran,
    raised,
    result_outcome,
    returned,
    stopped,
    words,
)
from aenv_ray.runtime.door.calls import Call, CallInterrupted, Watchdog
from aenv_ray.runtime.door.outcomes import Outcomes
from aenv_ray.runtime.door.parameters import name_of, timeout_of
from aenv_ray.runtime.door.tool_batches import SHORTEST_S, Batch
from aenv_ray.runtime.faults import METHOD_NOT_FOUND, Fault

if TYPE_CHECKING:
    import asyncio

OnOutcome = Callable[[Outcome], object]
OnProgress = Callable[[float, float | None, str | None], None]

HEALTHY: Final = frozenset({"healthy", "success", "ok"})
_LISTINGS: Final = frozenset({"tools/list", "aenv/functions", "ping"})
_PLAIN: Final = (str, dict, list, int, float, bytes, type(None))
"""What functions usually return, of which none is awaitable."""


@dataclass
class _Request:
    """One call, parsed."""

    call_id: str
    entry: Registered
    arguments: Mapping[str, Any]
    timeout_s: float
    deadline: float
    on_progress: OnProgress | None


class Dispatcher:
    """Runs the registered functions of one environment.

    Args:
        registry: What the environment registered.
        load_error: The traceback when its code did not load; every call is then refused with it.

    Thread-safe. A sync function runs in the thread that calls `submit`; an async one on a loop
    thread of its own, started at the first use.
    """

    def __init__(self, registry: Registry, *, load_error: str | None = None) -> None:
        self.registry = registry
        self.load_error = load_error
        self._outcomes = Outcomes()
        self._watchdog = Watchdog(self._expire, self._outcomes.expire)
        self._calls: dict[str, Call] = {}
        self._batches: dict[str, Batch] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self._pid = os.getpid()
        self._last_active = time.time()
        self._builtins = {
            method: Registered(name=method, function=function, kind="builtin")
            for method, function in {**workspace.METHODS, **ports.METHODS}.items()
        }

    def begin(self) -> None:
        """Note that this process, perhaps freshly forked, is the one that answers."""
        self._pid = os.getpid()
        self._last_active = time.time()

    def submit(
        self,
        method: str,
        params: Mapping[str, Any],
        on_outcome: OnOutcome,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Run one call; `on_outcome` is told once, in whatever thread knows it first.

        Args:
            method: ``tools/call``, ``aenv/function``, ``aenv/reward``, ``aenv/health``,
                ``aenv/call_tools``, a listing, or a workspace method.
            params: MCP parameters; ``_meta`` may carry ``aenv/call_id`` and ``aenv/timeout_s``.
            on_outcome: Must not raise.
            on_progress: Told of the function's progress.

        A sync function runs before this returns; an async one afterwards.
        """
        call_id = self._admit(method, params, on_outcome)
        if call_id is not None:
            self._run_admitted(call_id, method, params, params.get("_meta") or {}, on_progress)

    def accept(
        self,
        method: str,
        params: Mapping[str, Any],
        on_outcome: OnOutcome,
        on_progress: OnProgress | None = None,
    ) -> Callable[[], None] | None:
        """Take a call that has to wait for its turn; its deadline counts from now.

        Args:
            method: As for `submit`, like the others.
            params: Must not change any more.
            on_outcome: Told also of a call that is cancelled, or reaches its deadline, as it waits.
            on_progress: Told of the function's progress.

        Returns:
            What runs the call, like `submit`; one that has an outcome by then it leaves alone. None
            when there is nothing to run.
        """
        call_id = self._admit(method, params, on_outcome)
        if call_id is None:
            return None
        meta = params.get("_meta") or {}
        try:
            timeout_s = timeout_of(meta)
        except Fault as fault:
            self._outcomes.finish(call_id, fault_outcome(fault))
            return None
        name = str(params.get("name") or method)
        call = Call(call_id, name, time.monotonic() + timeout_s, waiting=True)
        self._calls[call_id] = call
        self._watchdog.add(call)

        def run() -> None:
            if not call.remaining_s:
                self._expire(call)
            begins = call.begin()
            self._forget(call)
            if begins:
                own = {**meta, "aenv/timeout_s": call.remaining_s or SHORTEST_S}
                self._run_admitted(call_id, method, params, own, on_progress, call.deadline)

        return run

    def _admit(self, method: str, params: Mapping[str, Any], on_outcome: OnOutcome) -> str | None:
        """Return the id of a call that is to be run; None for one that is answered otherwise."""
        if method in _LISTINGS:
            on_outcome(self._listing(method))
            return None
        meta = params.get("_meta") or {}
        call_id = str(meta.get("aenv/call_id") or f"local-{id(params)}-{time.monotonic_ns()}")
        return call_id if self._outcomes.begin(call_id, on_outcome, LOST) else None

    def _run_admitted(
        self,
        call_id: str,
        method: str,
        params: Mapping[str, Any],
        meta: Mapping[str, Any],
        on_progress: OnProgress | None,
        latest: float | None = None,
    ) -> None:
        self._last_active = time.time()
        try:
            if self.load_error is not None:
                raise Fault("sandbox_start_failed", self.load_error)
            if method == "aenv/call_tools":
                self._run_batch(call_id, params, meta)
                return
            request = self._parse(call_id, method, params, meta, on_progress)
            if latest is not None:
                request.deadline = min(request.deadline, latest)
            arguments = request.entry.signature.bind(request.entry.name, request.arguments)
            self._run(request, arguments, functools.partial(self._outcomes.finish, call_id))
        except Fault as fault:
            self._outcomes.finish(call_id, fault_outcome(fault))
        except BaseException as exc:  # noqa: BLE001  # every call gets an outcome, whatever breaks
            text = f"the runtime failed on this call: {words(exc)}"
            self._outcomes.finish(call_id, fault_outcome(Fault("function_failed", text)))

    def cancel(self, call_id: str, reason: str = "the caller cancelled") -> bool:
        """Stop a call that is under way; False when there is none of that id."""
        call = self._calls.get(call_id)
        if call is None:
            return False
        fault = Fault(
            "call_cancelled", f"{call.name!r} was cancelled: {reason}", tool_name=call.name
        )
        is_first = self._outcomes.finish(call_id, fault_outcome(fault))
        call.stop("cancelled")
        return is_first

    def cancel_all(self, reason: str) -> None:
        """Stop every call that is under way."""
        for call_id in list(self._calls):
            self.cancel(call_id, reason)

    @property
    def pending(self) -> int:
        """How many calls are under way."""
        return self._outcomes.pending

    # --- parsing ----------------------------------------------------------------------------

    def _listing(self, method: str) -> Outcome:
        if method == "tools/list":
            if self.load_error is not None:
                return fault_outcome(Fault("sandbox_start_failed", self.load_error))
            tools = [tool.mcp_tool() for tool in self.registry.tools.values()]
            return result_outcome(to_json({"tools": tools}))
        if method == "aenv/functions":
            return result_outcome(to_json(self.registry.listing()))
        return result_outcome(b"{}")

    def _parse(
        self,
        call_id: str,
        method: str,
        params: Mapping[str, Any],
        meta: Mapping[str, Any],
        on_progress: OnProgress | None,
    ) -> _Request:
        if method == "tools/call":
            entry = self.registry.tool(name_of(params))
        elif method == "aenv/function":
            entry = self.registry.function(name_of(params))
        elif method == "aenv/reward":
            entry = self.registry.reward(params.get("name"))
        elif method == "aenv/health":
            entry = self.registry.health or Registered("health", self._default_health, "health")
        elif method in self._builtins:
            entry = self._builtins[method]
        else:
            raise Fault("config_error", f"there is no method {method!r}", rpc_code=METHOD_NOT_FOUND)
        arguments = {} if (given := params.get("arguments")) is None else given
        if not isinstance(arguments, dict):
            raise Fault(
                "tool_input_invalid",
                f"arguments of {entry.name!r} are {type(arguments).__name__}, not an object",
                'write them as {"name": value}',
                tool_name=entry.name,
            )
        wanted = timeout_of(meta)
        timeout_s = min(wanted, entry.timeout_s) if entry.timeout_s else wanted
        deadline = time.monotonic() + timeout_s
        return _Request(call_id, entry, arguments, timeout_s, deadline, on_progress)

    def _default_health(self) -> dict[str, Any]:
        return {
            "status": "success",
            "message": "the environment is healthy",
            "details": {"tool_count": len(self.registry.tools)},
            "last_active": self._last_active,
        }

    # --- running ----------------------------------------------------------------------------

    def _run(self, request: _Request, arguments: dict[str, Any], done: OnOutcome) -> None:
        entry = request.entry
        call = Call(request.call_id, entry.name, request.deadline, request.on_progress)
        self._calls[request.call_id] = call
        self._watchdog.add(call)
        if entry.is_async:
            self._run_on_loop(call, entry, entry.runnable, arguments, done)
            return
        try:
            value = call.run_sync(entry.runnable, arguments)
        except CallInterrupted:
            outcome = stopped(call, entry, request.timeout_s)
        except BaseException as exc:  # noqa: BLE001  # whatever a tool raises is its result
            self._leave_if_forked()
            outcome = raised(entry, exc)
        else:
            self._leave_if_forked()
            if not isinstance(value, _PLAIN) and inspect.isawaitable(value):
                self._run_on_loop(call, entry, _awaiting(value), {}, done)
                return
            outcome = returned(entry, value)
        self._forget(call)
        done(outcome)

    def _run_on_loop(
        self,
        call: Call,
        entry: Registered,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        done: OnOutcome,
    ) -> None:
        # Imported at the first async function: a template that has none stays a third smaller, and
        # its forks that much faster.
        import asyncio

        async def run() -> None:
            try:
                outcome = returned(entry, await call.run_async(function, arguments))
            except asyncio.CancelledError:
                outcome = stopped(call, entry, None)
            except BaseException as exc:  # noqa: BLE001  # whatever a tool raises is its result
                outcome = raised(entry, exc)
            self._forget(call)
            done(outcome)

        future = asyncio.run_coroutine_threadsafe(run(), self._ensure_loop())
        call.bind_stop(future.cancel)

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        import asyncio

        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="aenv-loop", daemon=True
                ).start()
            return self._loop

    def _forget(self, call: Call) -> None:
        self._watchdog.remove(call)
        self._calls.pop(call.call_id, None)

    def _expire(self, call: Call) -> None:
        """Stop a call whose deadline has passed; its function may not notice, its caller must."""
        if call.stop_waiting("timeout"):
            self._outcomes.finish(call.call_id, fault_outcome(never_ran(call)))
            self._forget(call)
            return
        fault = Fault(
            "tool_timeout",
            f"{call.name!r} reached its deadline and was stopped",
            "give the call a longer timeout, or the tool a shorter task",
            tool_name=call.name,
        )
        batch = self._batches.get(call.call_id)
        if batch is not None:
            batch.finish()  # with the results that it has
        else:
            self._outcomes.finish(call.call_id, fault_outcome(fault))
        call.stop("timeout")
        self._calls.pop(call.call_id, None)

    def _leave_if_forked(self) -> None:
        """End a process that a tool forked and let return: only the runtime answers calls."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _run_batch(self, call_id: str, params: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        timeout_s = timeout_of(meta)
        batch = Batch(call_id, params, timeout_s, self._outcomes.finish)
        batch.call.bind_stop(lambda: self._stop_items(batch))
        self._calls[call_id] = batch.call
        self._batches[call_id] = batch
        self._watchdog.add(batch.call)

        def run_item(
            index: int, item: Mapping[str, Any], timeout_s: float, done: OnOutcome
        ) -> float:
            meta = {"aenv/timeout_s": timeout_s}
            try:
                request = self._parse(f"{call_id}.{index}", "tools/call", item, meta, None)
                arguments = request.entry.signature.bind(request.entry.name, request.arguments)
            except Fault as fault:
                done(fault_outcome(fault))
                return timeout_s
            self._run(request, arguments, done)
            return request.timeout_s

        batch.run(run_item)
        self._forget(batch.call)
        self._batches.pop(call_id, None)
        batch.finish()

    def _stop_items(self, batch: Batch) -> None:
        for item_id in batch.item_ids():
            item = self._calls.get(item_id)
            if item is not None:
                item.stop(batch.call.stop_reason or "cancelled")


def _awaiting(value: Any) -> Callable[[], Any]:
    async def wait() -> Any:
        return await value

    return wait
