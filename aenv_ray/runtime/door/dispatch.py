"""Runs calls. Both doors use this, so that they give the same results.

A call arrives as a method with parameters and leaves as an *outcome*: the bytes of a JSON-RPC
``"result":…`` or ``"error":…`` member. Every call has an id, and a repeated id runs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from aenv_ray.runtime.api.registry import Registered, Registry
from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.door import caller_link, ports, workspace
from aenv_ray.runtime.door.answers import (
    LOST,
    EncodedOutcome,
    fault_outcome,
    never_ran,
    raised,
    result_outcome,
    returned,
    stopped,
    words,
)
from aenv_ray.runtime.door.caller import DEFAULT_TIMEOUT_S
from aenv_ray.runtime.door.calls import CallInterrupted, RunningCall, Watchdog, current_call
from aenv_ray.runtime.door.host.link import (
    AFTER_REWARD_METHOD,
    AFTER_TOOLS,
    END_PROCESSES_METHOD,
    HELD_S,
    HOST,
    OUTER_REWARDS,
)
from aenv_ray.runtime.door.host.requests import end_processes_elsewhere, tell_of_end
from aenv_ray.runtime.door.outcomes import Outcomes, key_of
from aenv_ray.runtime.door.reset.agent_processes import AgentProcesses
from aenv_ray.runtime.door.reset.agent_tasks import AgentTasks
from aenv_ray.runtime.door.reset.call_gate import CallGate, CallRefused
from aenv_ray.runtime.door.subscriptions import SESSION, SUBSCRIBE, SUBSCRIPTIONS, UNSUBSCRIBE
from aenv_ray.runtime.door.task_pages import TaskPages
from aenv_ray.runtime.faults import METHOD_NOT_FOUND, Fault

if TYPE_CHECKING:
    import asyncio

    from aenv_ray.runtime.door.caller import Caller
    from aenv_ray.runtime.door.reset.reset import Reset

OnOutcome = Callable[[EncodedOutcome], object]
OnToolProgress = Callable[[float, float | None, str | None], None]

HEALTHY: Final = frozenset({"healthy", "success", "ok"})
"""Values of ``status`` with which a health check says that the environment is healthy."""
MAX_TIMEOUT_S: Final = 86_400.0
"""A longer timeout counts as this one."""
_MIN_TIMEOUT_S: Final = 0.001
"""Timeout of a call that begins at its deadline."""
_ITEM_GRACE_S: Final = 1.0
"""How much longer than its timeout a batch waits for the outcome of an item."""
_TOOL_METHODS: Final = frozenset(
    {"tools/call", "aenv/call_tools", "resources/read", "prompts/get", "completion/complete"}
)
"""What an agent may call."""
_WRITE_FILE: Final = "aenv/write_file"
_COMMANDS: Final = frozenset({"aenv/exec", _WRITE_FILE})
"""What a policy may also do."""
_REWARD: Final = "aenv/reward"
_LEAVE_S: Final = 2.0
"""How long a reward waits for cancelled calls of the agent to end, and for its tasks."""
_RESET: Final = "aenv/reset"
_OF_ENVIRONMENT: Final = _TOOL_METHODS | {"aenv/function", _REWARD}
"""What only a clean instance answers after a reset."""
SEED_VARIABLE: Final = "AENV_SEED"
"""Variable of an instance with the seed of its first episode."""
SEED_METHOD: Final = "aenv/seed"
"""Sets the seed of an episode that does not begin with a reset."""
REHEARSAL_METHOD: Final = "aenv/rehearsal"
"""Runs a function of the runtime's own as it would run a tool, and returns the text it is given.

A forked process copies the pages that it writes to, so that its first call is slower than others.
"""
_WITHOUT_TRACE: Final = frozenset(
    {_RESET, SEED_METHOD, REHEARSAL_METHOD, "aenv/health", "aenv/tasks"}
)
"""Calls after which an instance counts as unused."""
_MCP_LISTINGS: Final = {
    "tools/list": "tools",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "prompts/list": "prompts",
}
"""Listings of MCP, and the key of the list in the result."""
PENDING_METHOD: Final = "aenv/pending"
"""Returns how many calls are under way: ``{"calls": …}``."""
_LISTINGS: Final = frozenset({*_MCP_LISTINGS, "aenv/functions", PENDING_METHOD, "ping"})
_SUBSCRIPTIONS: Final = {
    SUBSCRIBE: SUBSCRIPTIONS.subscribe,
    UNSUBSCRIBE: SUBSCRIPTIONS.unsubscribe,
}
COMPLETE: Final = "completion/complete"


def _rehearse(text: str) -> str:
    return text


def _acknowledge() -> dict[str, Any]:
    return {}


_BUILTINS: Final = {
    REHEARSAL_METHOD: Registered("rehearsal", _rehearse, "tool"),
} | {
    method: Registered(method, function, "builtin")
    for method, function in {**workspace.METHODS, **ports.METHODS, **caller_link.METHODS}.items()
}
_NOT_AWAITABLE: Final = (str, dict, list, int, float, bytes, type(None))
"""Types that functions usually return; checking them first is cheaper than `inspect`."""


class Dispatcher:
    """Runs the registered functions of one environment.

    Args:
        registry: The functions.
        load_error: The traceback if the environment's code did not load: the error of every call.

    Thread-safe. A sync function runs in the thread that calls `submit`; all async ones run on one
    event loop, in a thread that the first of them starts.
    """

    def __init__(self, registry: Registry, *, load_error: str | None = None) -> None:
        self.registry = registry
        self.load_error = load_error
        self._outcomes = Outcomes()
        self._watchdog = Watchdog(self._expire, self._outcomes.expire)
        self._calls: dict[str, RunningCall] = {}
        self._batches: dict[str, _Batch] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self._pid = os.getpid()
        self._agent: AgentProcesses | None = None
        self._gate = CallGate()
        self._tasks = AgentTasks(self._gate)
        self._ending = threading.Lock()
        self._ended_for = 0
        """The generation of the gate for which what the agent has started was ended."""
        self._reset: Reset | None = None
        self._seed: int | None = None
        self._task_pages = TaskPages(registry)
        self._last_active = time.time()
        own: dict[str, Callable[..., Any]] = {
            END_PROCESSES_METHOD: self._end_processes,
            AFTER_REWARD_METHOD: _acknowledge,
            SEED_METHOD: self._set_seed,
        }
        self._builtins = _BUILTINS | {
            method: Registered(method, function, "builtin") for method, function in own.items()
        }

    def begin(
        self,
        *,
        owns_sandbox: bool = False,
        owns_namespace: bool = False,
        directory: str | None = None,
        variables: Mapping[str, str] = os.environ,
    ) -> None:
        """Prepare for calls in this process; to be called after a fork.

        Args:
            owns_sandbox: The other processes here are those of tools and of the environment; before
                a reward runs, those of tools are ended.
            owns_namespace: This is so for all of its pid namespace, although it is not process 1.
            directory: The work directory of one of several sandboxes in this process. None: this
                process has only one, which may change the process.
            variables: The variables of the instance.
        """
        self._pid = os.getpid()
        entry, state = self.registry.reset, self.registry.reset_state
        self._agent = None
        if owns_sandbox:
            self._agent = AgentProcesses(
                may_be_reset=entry is not None, owns_namespace=owns_namespace
            )
        with contextlib.suppress(ValueError):  # a variable that is not a seed
            self._seed = int(variables.get(SEED_VARIABLE, ""))
        if entry is not None and state is not None:
            # Imported only for environments with a reset: templates of others are smaller.
            from aenv_ray.runtime.door.reset.reset import Reset

            self._reset = Reset(entry, state, self, self._gate, self._agent, directory)
        self._last_active = time.time()

    def end_calls(self, reason: str) -> None:
        """Stop all calls but resets."""
        for key in list(self._calls):
            if key.partition(" ")[0] != _RESET:
                self.cancel(key, reason)

    def end_tasks(self, within_s: float) -> int:
        """End the tasks that tools have started; return how many did not end in this time."""
        return self._tasks.end_episode(within_s)

    def begin_episode(self, seed: int | None) -> None:
        """Begin the next episode: ids of earlier calls get no results any more."""
        self._outcomes.drop_all()
        self._seed = seed

    def submit(
        self,
        method: str,
        params: Mapping[str, Any],
        on_outcome: OnOutcome,
        on_progress: OnToolProgress | None = None,
        caller: Caller | None = None,
    ) -> None:
        """Run one call. A sync function runs before this returns, an async one afterwards.

        Args:
            method: ``tools/call`` or another method of MCP, ``aenv/function``, ``aenv/reward``,
                ``aenv/health``, ``aenv/reset``, ``aenv/seed``, ``aenv/tasks``, ``aenv/call_tools``,
                a listing, or a workspace method.
            params: MCP parameters; ``_meta`` may carry ``aenv/call_id`` and ``aenv/timeout_s``.
            on_outcome: Called once, in any thread, with the outcome; must not raise.
            on_progress: Called with the function's progress reports.
            caller: Receives the function's log messages and requests.
        """
        key = self._admit(method, params, on_outcome)
        if key is not None:
            self._run_admitted(
                key, method, params, params.get("_meta") or {}, on_progress, caller=caller
            )

    def accept(
        self,
        method: str,
        params: Mapping[str, Any],
        on_outcome: OnOutcome,
        on_progress: OnToolProgress | None = None,
        caller: Caller | None = None,
    ) -> Callable[[], None] | None:
        """Accept a call that has to wait for a thread; its timeout starts now.

        Args:
            method: As for `submit`.
            params: As for `submit`; must not change any more.
            on_outcome: As for `submit`; also called if the call is cancelled or times out while it
                waits.
            on_progress: As for `submit`.
            caller: As for `submit`.

        Returns:
            A function that runs the call, unless it has an outcome by then. None when there is
            nothing to run.
        """
        key = self._admit(method, params, on_outcome)
        if key is None:
            return None
        meta = params.get("_meta") or {}
        try:
            timeout_s = _timeout_of(meta)
        except Fault as fault:
            self._outcomes.finish(key, fault_outcome(fault))
            return None
        name = str(params.get("name") or method)
        call = RunningCall(key, name, time.monotonic() + timeout_s, waiting=True)
        self._calls[key] = call
        self._watchdog.add(call)

        def run() -> None:
            if not call.remaining_s:
                self._expire(call)
            begins = call.begin()
            self._forget(call)
            if begins:
                left = {**meta, "aenv/timeout_s": call.remaining_s or _MIN_TIMEOUT_S}
                self._run_admitted(key, method, params, left, on_progress, call.deadline, caller)

        return run

    def _admit(self, method: str, params: Mapping[str, Any], on_outcome: OnOutcome) -> str | None:
        """Return the key of a call that must run; None for a listing or a repeated call."""
        if method in _LISTINGS:
            on_outcome(self._listing(method))
            return None
        meta = params.get("_meta") or {}
        call_id = meta.get("aenv/call_id") or f"local-{id(params)}-{time.monotonic_ns()}"
        key = key_of(method, call_id)
        if method == _REWARD:
            on_outcome = functools.partial(self._end_reward, key, on_outcome)
        return key if self._outcomes.begin(key, on_outcome, LOST) else None

    def _run_admitted(
        self,
        key: str,
        method: str,
        params: Mapping[str, Any],
        meta: Mapping[str, Any],
        on_progress: OnToolProgress | None,
        latest_deadline: float = math.inf,
        caller: Caller | None = None,
    ) -> None:
        self._last_active = time.time()
        try:
            if self.load_error is not None:
                raise Fault("sandbox_start_failed", self.load_error)
            generation: int | None = None
            if method in _TOOL_METHODS or _is_of_agent(method, meta):
                name = str(params.get("name") or method)
                generation = self._gate.admit(name, meta, is_reward=method == _REWARD)
            if method not in _WITHOUT_TRACE:
                self._gate.was_used = True
            if self._gate.refusal and method in _OF_ENVIRONMENT:
                raise Fault(
                    "reset_failed",
                    f"the instance cannot be used after a reset: {self._gate.refusal}",
                    "release it and create another",
                )
            if method == "aenv/call_tools":
                self._prepare(method, meta, generation)
                self._run_batch(key, params, meta, generation)
                return
            done = functools.partial(self._outcomes.finish, key)
            entry = self._entry(method, params)
            timeout_s = _timeout_of(meta)
            if method == _REWARD and not entry.keeps_processes:
                latest_deadline = min(latest_deadline, time.monotonic() + timeout_s)
                if generation is not None:
                    self._note_agent()
                begun = self._begin_reward(key, timeout_s)
                if generation is not None:  # only a reward of the outer instance may refuse it now
                    generation = begun
            elif method == END_PROCESSES_METHOD:
                self._gate.hold(int(meta.get(OUTER_REWARDS, 0)), float(meta.get(HELD_S, 0.0)))
            elif method == AFTER_REWARD_METHOD:
                _open_inner(self._gate.release(int(meta.get(OUTER_REWARDS, 0))))
            else:
                self._prepare(method, meta, generation)
            self._run(
                key, entry, params, timeout_s, done, on_progress, latest_deadline, caller,
                generation,
            )  # fmt: skip
        except CallRefused as fault:
            self._outcomes.refuse(key, fault_outcome(fault))
        except Fault as fault:
            self._outcomes.finish(key, fault_outcome(fault))
        except BaseException as exc:  # noqa: BLE001  # every call gets an outcome
            text = f"the runtime failed on this call: {words(exc)}"
            self._outcomes.finish(key, fault_outcome(Fault("function_failed", text)))

    def _prepare(self, method: str, meta: Mapping[str, Any], generation: int | None) -> None:
        """Before a call that may start processes of the agent: reserve room for the reward."""
        # By a tool of the outer instance, an agent calls functions and rewards too.
        is_of_agent = generation is not None and method != _WRITE_FILE
        if is_of_agent:
            HOST.agent_has_acted = True
        if self._agent is None:
            return
        # A command in a sidecar is one of the environment, which says whether the agent has acted.
        if is_of_agent or meta.get(AFTER_TOOLS):
            self._agent.expect()
        if generation is not None and generation != self._gate.generation:
            self._agent.give_room()  # a reward has begun meanwhile, and the call will be refused

    # --- rewards and the agent ------------------------------------------------------------------

    def _note_agent(self) -> None:
        """Before a reward for which a tool of the outer instance asks: it may start processes."""
        HOST.agent_has_acted = True
        if self._agent is not None:
            self._agent.note()

    def _begin_reward(self, key: str, within_s: float) -> int:
        """Refuse calls of the agent until the reward has its outcome; end what they have started.

        Returns:
            The generation of the gate, which the reward has begun.

        Raises:
            Fault: What they have started in the sidecar or in an inner instance did not end.
        """
        generation = self._gate.begin_reward(key)
        if not self._outcomes.is_pending(key):  # it reached its deadline, so no outcome will follow
            self._gate.end_reward(key)
            raise Fault("tool_timeout", "the reward did not run: its deadline has passed")
        self._end_agent_processes(within_s, within_s)
        return generation

    def _end_reward(self, key: str, on_outcome: OnOutcome, outcome: EncodedOutcome) -> None:
        """Let the agent act again, before the caller has the reward."""
        _open_inner(self._gate.end_reward(key))
        on_outcome(outcome)

    def _end_agent_processes(self, within_s: float, held_s: float) -> None:
        """End calls of the agent, and the tasks and processes that they have started anywhere.

        Room that is reserved for the reward becomes free. Of several rewards at once, only the
        first does this: otherwise it would end the processes of the others.

        Args:
            within_s: The time of the call that needs it.
            held_s: How long the gate stays closed for it.

        Raises:
            Fault: What they have started in the sidecar or in an inner instance did not end within
                this time.
        """
        ends_at = time.monotonic() + within_s
        if not self._ending.acquire(timeout=within_s):
            raise Fault("tool_timeout", f"another reward did not begin within {within_s:.3g} s")
        try:
            generation = self._gate.generation
            if self._ended_for != generation:
                self._end_here(ends_at)
                left_s = ends_at - time.monotonic()
                end_processes_elsewhere(left_s, current_call(), generation, held_s)
                self._ended_for = generation
        finally:
            self._ending.release()

    def _end_here(self, ends_at: float) -> None:
        for key, call in list(self._calls.items()):
            if call.generation is not None or key.partition(" ")[0] in _TOOL_METHODS:
                self.cancel(key, "a reward ends what tools have started")
        if self._agent is not None:
            self._agent.end()  # a call may wait for a process that an earlier one has started
        ran = self._gate.wait_for_agent(_share_of(ends_at))
        had_tasks = self._tasks.end(_share_of(ends_at))
        if self._agent is not None and (ran or had_tasks):
            self._agent.end()  # what they have started meanwhile

    def _set_seed(self, seed: int) -> dict[str, Any]:
        self._seed = seed
        return {}

    def _end_processes(self) -> dict[str, Any]:
        """Serve a reward of the outer instance, or of the instance of which this is the sidecar."""
        self._end_agent_processes(current_call().remaining_s, self._gate.held_s)
        return {}

    def cancel(self, key: str, reason: str = "the caller cancelled") -> bool:
        """Stop a call by its `key_of`; False when no such call is under way."""
        call = self._calls.get(key)
        if call is None:
            return False
        fault = Fault(
            "call_cancelled", f"{call.name!r} was cancelled: {reason}", tool_name=call.name
        )
        is_first = self._outcomes.finish(key, fault_outcome(fault))
        call.stop("cancelled")
        return is_first

    def cancel_all(self, reason: str) -> None:
        """Stop all calls."""
        for key in list(self._calls):
            self.cancel(key, reason)

    @property
    def pending(self) -> int:
        """How many calls are under way."""
        return self._outcomes.pending

    # --- parsing ----------------------------------------------------------------------------

    def _listing(self, method: str) -> EncodedOutcome:
        if method in _MCP_LISTINGS:
            if self.load_error is not None:
                return fault_outcome(Fault("sandbox_start_failed", self.load_error))
            return result_outcome(to_json({_MCP_LISTINGS[method]: self._listed(method)}))
        if method == "aenv/functions":
            return result_outcome(to_json(self.registry.listing()))
        if method == PENDING_METHOD:
            return result_outcome(to_json({"calls": self.pending}))
        return result_outcome(b"{}")

    def _listed(self, method: str) -> list[dict[str, Any]]:
        if method == "tools/list":
            return [tool.mcp_tool() for tool in self.registry.tools.values()]
        if method == "prompts/list":
            return [prompt.mcp_prompt() for prompt in self.registry.prompts.values()]
        wants_templates = method == "resources/templates/list"
        return [
            resource.mcp_resource()
            for resource in self.registry.resources.values()
            if resource.is_template == wants_templates
        ]

    def _entry(self, method: str, params: Mapping[str, Any]) -> Registered:
        if method == "tools/call":
            return self.registry.tool(_name_of(params))
        if method == "resources/read":
            return self.registry.resource(_name_of(params, "uri"))
        if method == "prompts/get":
            return self.registry.prompt(_name_of(params))
        if method == COMPLETE:
            return self.registry.completion(params)
        if method in _SUBSCRIPTIONS:
            return self._subscription(method, params)
        if method == "aenv/function":
            return self.registry.function(_name_of(params))
        if method == "aenv/reward":
            return self.registry.reward(params.get("name"))
        if method == "aenv/health":
            return self.registry.health or Registered("health", self._default_health, "health")
        if method == _RESET:
            return self._reset_entry()
        if method == "aenv/tasks":
            return self._task_pages.entry()
        if method in self._builtins:
            return self._builtins[method]
        raise Fault("config_error", f"unknown method {method!r}", rpc_code=METHOD_NOT_FOUND)

    def _subscription(self, method: str, params: Mapping[str, Any]) -> Registered:
        """Return what follows a resource for a session, or stops to.

        Raises:
            Fault: ``tool_not_found``: the resource is unknown. ``caller_unsupported``: the
                caller has no session.
        """
        uri, session = _name_of(params, "uri"), (params.get("_meta") or {}).get(SESSION)
        if method == SUBSCRIBE:
            self.registry.resource(uri)
        if not isinstance(session, str) or not session:
            raise Fault(
                "caller_unsupported",
                f"{method} needs a session, since updates are sent to one",
                "open a session with initialize, and send its id",
            )
        arguments = {"session": session, "uri": uri}
        return Registered(method, _SUBSCRIPTIONS[method], "empty", uri_arguments=arguments)

    def _reset_entry(self) -> Registered:
        if self._reset is not None:
            return self._reset.method
        raise Fault(
            "tool_not_found",
            self.registry.absence or "the environment registers no reset",
            "decorate a function with @register_reset, or create another instance",
        )

    def _default_health(self) -> dict[str, Any]:
        return {
            "status": "success",
            "message": "the environment is healthy",
            "details": {"tool_count": len(self.registry.tools)},
            "last_active": self._last_active,
        }

    # --- running ----------------------------------------------------------------------------

    def _run(
        self,
        key: str,
        entry: Registered,
        params: Mapping[str, Any],
        timeout_s: float,
        done: OnOutcome,
        on_progress: OnToolProgress | None = None,
        latest_deadline: float = math.inf,
        caller: Caller | None = None,
        generation: int | None = None,
    ) -> None:
        """Run a function, or start an async one.

        Raises:
            Fault: ``tool_input_invalid``: the arguments do not fit; nothing ran.
        """
        arguments = entry.signature.bind(entry.name, _arguments_of(entry, params))
        timeout_s = min(timeout_s, entry.timeout_s or timeout_s)
        deadline = min(time.monotonic() + timeout_s, latest_deadline)
        call = RunningCall(
            key, entry.name, deadline, on_progress,
            seed=self._seed, caller=caller, generation=generation,
        )  # fmt: skip
        self._calls[key] = call
        self._watchdog.add(call)
        if entry.is_async:
            self._run_on_loop(call, entry, entry.runnable, arguments, done)
            return
        if not self._enter(call, entry, done):
            return
        try:
            value = call.run_sync(entry.runnable, arguments)
        except CallInterrupted:
            outcome = stopped(call, entry, timeout_s)
        except BaseException as exc:  # noqa: BLE001  # what a tool raises is its result
            self._exit_if_forked()
            outcome = raised(entry, exc)
        else:
            self._exit_if_forked()
            if not isinstance(value, _NOT_AWAITABLE) and inspect.isawaitable(value):
                self._run_on_loop(call, entry, _awaiter(value), {}, done)
                return
            outcome = returned(entry, value)
        self._forget(call)
        done(outcome)

    def _enter(self, call: RunningCall, entry: Registered, done: OnOutcome) -> bool:
        """Note that a function is about to run; if it must not, answer its call."""
        try:
            if entry.kind != "reset":
                self._gate.enter(call)
        except Fault as fault:
            self._forget(call)
            outcome = fault_outcome(fault)
            is_forgotten = isinstance(fault, CallRefused) and self._outcomes.refuse(
                call.key, outcome
            )
            if not is_forgotten:
                done(outcome)
            return False
        return True

    def _run_on_loop(
        self,
        call: RunningCall,
        entry: Registered,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        done: OnOutcome,
    ) -> None:
        # Imported at the first async function: a template without any is a third smaller, and its
        # forks are faster.
        import asyncio

        async def run() -> None:
            if not self._enter(call, entry, done):
                return
            try:
                outcome = returned(entry, await call.run_async(function, arguments))
            except asyncio.CancelledError:
                outcome = stopped(call, entry, None)
            except BaseException as exc:  # noqa: BLE001  # what a tool raises is its result
                outcome = raised(entry, exc)
            self._forget(call)
            done(outcome)

        try:
            loop = self._ensure_loop()
        except BaseException:
            self._forget(call)
            raise
        future = asyncio.run_coroutine_threadsafe(run(), loop)
        call.bind_stop(future.cancel)

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        import asyncio

        with self._loop_lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._tasks.watch(loop)
                try:
                    threading.Thread(target=loop.run_forever, name="aenv-loop", daemon=True).start()
                except BaseException:  # the sandbox's limits allow no thread now
                    loop.close()
                    raise
                self._loop = loop  # only now: no call may wait for a loop that does not run
            return self._loop

    def _forget(self, call: RunningCall) -> None:
        self._gate.leave(call)
        self._watchdog.remove(call)
        self._calls.pop(call.key, None)

    def _expire(self, call: RunningCall) -> None:
        """Answer a call whose deadline has passed, and tell its function to stop."""
        if call.stop_waiting("timeout"):
            self._outcomes.finish(call.key, fault_outcome(never_ran(call)))
            self._forget(call)
            return
        if call.is_waiting:
            return  # it was stopped already; the thread that did so answers it
        fault = Fault(
            "tool_timeout",
            f"{call.name!r} reached its deadline and was stopped",
            "give the call a longer timeout, or the tool a shorter task",
            tool_name=call.name,
        )
        batch = self._batches.get(call.key)
        if batch is not None:
            batch.finish()  # with the results so far
        else:
            self._outcomes.finish(call.key, fault_outcome(fault))
        call.stop("timeout")
        self._calls.pop(call.key, None)

    def _exit_if_forked(self) -> None:
        """End a process that a tool forked and that returned from the tool: it must not answer."""
        if os.getpid() != self._pid:
            os._exit(0)

    # --- batches ----------------------------------------------------------------------------

    def _run_batch(
        self,
        key: str,
        params: Mapping[str, Any],
        meta: Mapping[str, Any],
        generation: int | None,
    ) -> None:
        """Run a batch in this thread, and return when its items have ended or were abandoned."""
        batch = _Batch(key, params, _timeout_of(meta), self._outcomes.finish, generation)
        batch.call.bind_stop(lambda: self._stop_items(batch))
        self._calls[key] = batch.call
        self._batches[key] = batch
        self._watchdog.add(batch.call)
        indexes = range(len(batch.items))
        if batch.is_parallel:
            threads = []
            for index in indexes:
                thread = threading.Thread(target=self._run_item, args=(batch, index), daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the sandbox's limits allow no thread now
                    self._run_item(batch, index)
                else:
                    threads.append(thread)
            for thread in threads:
                thread.join()
        else:
            for index in indexes:
                self._run_item(batch, index)
        self._forget(batch.call)
        self._batches.pop(key, None)
        batch.finish()

    def _run_item(self, batch: _Batch, index: int) -> None:
        """Run one item; one that is refused, raises or times out does not stop the others."""
        if batch.call.is_cancelled:
            return
        ended = threading.Event()

        def done(outcome: EncodedOutcome) -> None:
            batch.outcomes[index] = outcome
            ended.set()

        timeout_s = min(batch.timeout_s, batch.call.remaining_s or _MIN_TIMEOUT_S)
        try:
            entry = self._entry("tools/call", batch.items[index])
            self._run(
                batch.item_key(index), entry, batch.items[index], timeout_s, done,
                generation=batch.generation,
            )  # fmt: skip
        except Fault as fault:
            done(fault_outcome(fault))
            return
        ended.wait(timeout_s + _ITEM_GRACE_S)

    def _stop_items(self, batch: _Batch) -> None:
        for index in range(len(batch.items)):
            item = self._calls.get(batch.item_key(index))
            if item is not None:
                item.stop(batch.call.stop_reason or "cancelled")


class _Batch:
    """Several tool calls that are one call.

    Args:
        key: The key of the batch.
        params: ``calls``, each with ``name`` and ``arguments``, and ``parallel``.
        timeout_s: Timeout of all calls together.
        on_outcome: Called with the key and the outcome, by every `finish`.
        generation: From `CallGate.admit`.

    Raises:
        Fault: ``tool_input_invalid``: ``calls`` is not a list of objects.
    """

    def __init__(
        self,
        key: str,
        params: Mapping[str, Any],
        timeout_s: float,
        on_outcome: Callable[[str, EncodedOutcome], object],
        generation: int | None,
    ) -> None:
        items = params.get("calls")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise Fault("tool_input_invalid", "calls is not a list of objects with a name")
        self.call = RunningCall(key, "call_tools", time.monotonic() + timeout_s)
        self.items = items
        self.is_parallel = bool(params.get("parallel"))
        self.timeout_s = timeout_s
        self.outcomes: list[EncodedOutcome | None] = [None] * len(items)
        self.generation = generation
        self._on_outcome = on_outcome

    def item_key(self, index: int) -> str:
        """Return the key of an item."""
        return f"{self.call.key}.{index}"

    def finish(self) -> None:
        """Report the outcomes so far; an item without one has timed out."""
        missing = fault_outcome(
            Fault("tool_timeout", "the batch reached its deadline before this call had a result")
        )
        body = b",".join(b"{" + (outcome or missing) + b"}" for outcome in self.outcomes)
        self._on_outcome(self.call.key, result_outcome(b'{"results":[' + body + b"]}"))


def _is_of_agent(method: str, meta: Mapping[str, Any]) -> bool:
    """Whether a call, not of a tool, is a policy's, or one of code that a tool runs elsewhere."""
    if method in (END_PROCESSES_METHOD, AFTER_REWARD_METHOD):
        return False
    is_of_policy = method in _COMMANDS and AFTER_TOOLS not in meta
    return is_of_policy or meta.get(OUTER_REWARDS, -1) >= 0


def _open_inner(ended: int | None) -> None:
    """Tell inner instances of the end of a generation in which a reward kept the gate closed."""
    if ended is not None:
        tell_of_end(ended)


def _share_of(ends_at: float) -> float:
    """Return how much of the time until `ends_at` to wait for what was cancelled."""
    return max(0.0, min(_LEAVE_S, (ends_at - time.monotonic()) / 4))


def _name_of(params: Mapping[str, Any], key: str = "name") -> str:
    """Return the name of the tool or function that is called, or the URI that is read.

    Raises:
        Fault: ``tool_input_invalid``: the name is missing.
    """
    name = params.get(key)
    if not isinstance(name, str) or not name:
        raise Fault("tool_input_invalid", f"the call has no {key}")
    return name


def _arguments_of(entry: Registered, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call.

    Raises:
        Fault: ``tool_input_invalid``: they are not a JSON object.
    """
    if entry.uri_arguments is not None:
        return dict(entry.uri_arguments)
    arguments = params.get("arguments")
    if arguments is None:
        return {}
    if isinstance(arguments, dict):
        return arguments
    raise Fault(
        "tool_input_invalid",
        f"the arguments of {entry.name!r} must be a JSON object, not {type(arguments).__name__}",
        'write them as {"name": value}',
        tool_name=entry.name,
    )


def _timeout_of(meta: Mapping[str, Any]) -> float:
    """Return the timeout in seconds that ``_meta`` asks for, or the default.

    Raises:
        Fault: ``tool_input_invalid``: it is not a number above zero.
    """
    value = meta.get("aenv/timeout_s")
    if value is None:
        return DEFAULT_TIMEOUT_S
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise Fault("tool_input_invalid", f"timeout {value!r} is not a number of seconds above 0")
    return min(float(value), MAX_TIMEOUT_S)


def _awaiter(value: Any) -> Callable[[], Any]:
    async def wait() -> Any:
        return await value

    return wait
