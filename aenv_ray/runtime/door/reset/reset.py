"""Resets a used instance for its next episode, and checks that nothing of the last one is left.

The steps: end all calls, and the tasks that tools have started, end all processes that were started
since the start, remove the files that were created, run the environment's function, check its
declared state, and forget the outcomes of earlier calls. If anything is left, or the function
fails, no tool, reward or function runs any more until a later reset succeeds: a caller cannot use
an unclean instance by mistake.
"""

from __future__ import annotations

import os
from typing import Any, Final, Protocol

from aenv_ray.runtime.api.module_state import ModuleState
from aenv_ray.runtime.api.registry import Registered
from aenv_ray.runtime.door.calls import current_call
from aenv_ray.runtime.door.host.inner_environments import release_all
from aenv_ray.runtime.door.host.link import HOST, SIDECAR_METHOD
from aenv_ray.runtime.door.reset.agent_processes import AgentProcesses
from aenv_ray.runtime.door.reset.call_gate import CallGate
from aenv_ray.runtime.door.reset.leftovers import Leftovers
from aenv_ray.runtime.faults import Fault

_END_CALLS_S: Final = 5.0
"""How long a cancelled function may take to end, and tasks of earlier ones."""


class EpisodeCalls(Protocol):
    """What a reset changes in the dispatcher."""

    def end_calls(self, reason: str) -> None:
        """Cancel all calls but the reset."""

    def end_tasks(self, within_s: float) -> int:
        """End what calls of agents have left on the event loop; return how many do not end."""

    def begin_episode(self, seed: int | None) -> None:
        """Forget the outcomes of earlier calls, and set the seed of the next ones."""


class Reset:
    """The reset of one instance; create it right after the instance has started.

    Args:
        entry: The environment's function.
        state: The initial values of the variables that the environment declares.
        episode: The dispatcher's state of the current episode.
        gate: Lets no other call run during a reset.
        processes: The processes of the agent. None: they cannot be ended here.
        directory: The work directory of one of several sandboxes in this process, see
            `Leftovers`. None: this process has only one.
    """

    def __init__(
        self,
        entry: Registered,
        state: ModuleState,
        episode: EpisodeCalls,
        gate: CallGate,
        processes: AgentProcesses | None,
        directory: str | None = None,
    ) -> None:
        self._entry = entry
        self._state = state
        self._episode = episode
        self._gate = gate
        self._processes = processes
        self._shares_process = directory is not None
        self._directory = os.getcwd()
        self._environ = dict(os.environ)
        self._leftovers = Leftovers(entry.kept_files, directory)
        self.method = Registered(
            entry.name,
            self._run_async if entry.is_async else self._run,
            "reset",
            timeout_s=entry.timeout_s,
        )
        """The entry that the door calls."""

    def _run(self, task: Any = None, seed: int | None = None) -> dict[str, Any]:
        self._enter()
        try:
            reasons = self._end_episode(seed)
            if not reasons:
                self._entry.runnable(**self._arguments(task, seed))
                reasons = self._check()
        except BaseException:
            self._gate.refusal = "its reset failed"
            raise
        finally:
            self._gate.open()
        return self._result(reasons)

    async def _run_async(self, task: Any = None, seed: int | None = None) -> dict[str, Any]:
        import asyncio

        self._enter()
        try:
            # The loop has to run on, so that the cancelled functions on it can end.
            reasons = await asyncio.to_thread(self._end_episode, seed)
            if not reasons:
                await self._entry.runnable(**self._arguments(task, seed))
                reasons = await asyncio.to_thread(self._check)
        except BaseException:
            self._gate.refusal = "its reset failed"
            raise
        finally:
            self._gate.open()
        return self._result(reasons)

    def _result(self, reasons: list[str]) -> dict[str, Any]:
        self._gate.refusal = "; ".join(reasons)
        return {"clean": not reasons, "reasons": reasons}

    def _arguments(self, task: Any, seed: int | None) -> dict[str, Any]:
        signature = self._entry.signature
        given = {"task": task, "seed": seed}
        if not signature.accepts_any:
            given = {name: given[name] for name in signature.names}
        return signature.bind(self._entry.name, given)

    # --- before and after the function ----------------------------------------------------------

    def _enter(self) -> None:
        """Let no other call begin.

        Raises:
            Fault: ``call_cancelled``: another reset is under way.
        """
        if not self._gate.close():
            raise Fault("call_cancelled", "another reset of the instance is under way")
        self._gate.refusal = "its reset has not ended"

    def _end_episode(self, seed: int | None) -> list[str]:
        """End calls, tasks and processes, remove files; return what cannot be ended or restored."""
        self._episode.end_calls("the instance is reset")
        reasons = [
            f"a call of {name!r} does not end" for name in self._gate.wait_empty(_END_CALLS_S)
        ]
        if left := self._episode.end_tasks(_END_CALLS_S):
            reasons.append(f"{left} tasks of tools do not end")
        reasons += self._end_processes()
        reasons += _release_inner()
        if not reasons:
            reasons += self._leftovers.remove()
        self._episode.begin_episode(seed)
        return reasons

    def _end_processes(self) -> list[str]:
        if self._processes is not None:
            count = self._processes.end_episode()
            return [f"{count} processes do not end"] if count else []
        if self._shares_process or not self._gate.was_used:
            return []
        return ["without namespaces the processes of an episode cannot be ended"]

    def _check(self) -> list[str]:
        """Return what the function should have restored, and has not."""
        reasons = self._state.changed()
        if self._shares_process:
            return reasons
        reasons += self._leftovers.open_descriptors()
        reasons += self._leftovers.scheduling()
        if os.getcwd() != self._directory:
            reasons.append(f"the working directory is {os.getcwd()}")
        if dict(os.environ) != self._environ:
            reasons.append("environment variables differ from those at the start")
        if HOST.has_sent(SIDECAR_METHOD):
            reasons.append("the sidecar was used, and cannot be checked")
        return reasons


def _release_inner() -> list[str]:
    """End the inner instances of the episode; return why they do not end."""
    try:
        release_all(current_call)
    except Fault as fault:
        return [f"its inner instances do not end: {fault.message}"]
    return []
