"""Several tool calls that are one call: its items, their order, and what its deadline leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from aenv_ray.runtime.door.answers import Outcome, fault_outcome, result_outcome
from aenv_ray.runtime.door.calls import Call
from aenv_ray.runtime.faults import Fault

SHORTEST_S: Final = 0.001
"""What a call gets that began in the moment of its deadline."""

RunItem = Callable[[int, Mapping[str, Any], float, Callable[[Outcome], object]], float]
"""Runs ``(index, item, its timeout in seconds, told its outcome)``; returns the timeout it has."""


class Batch:
    """The items of a batch and their outcomes; what is missing at its deadline is said so.

    Args:
        call_id: Of the batch.
        params: With ``calls``, and ``parallel``.
        timeout_s: For all of them together.
        on_outcome: Told the call id and the one outcome; again, if it ends again.

    Raises:
        Fault: ``calls`` is no list of calls.
    """

    def __init__(
        self,
        call_id: str,
        params: Mapping[str, Any],
        timeout_s: float,
        on_outcome: Callable[[str, Outcome], object],
    ) -> None:
        calls = params.get("calls")
        if not isinstance(calls, list) or not all(isinstance(item, dict) for item in calls):
            raise Fault("tool_input_invalid", "calls is not a list of objects with a name")
        self.call = Call(call_id, "call_tools", time.monotonic() + timeout_s)
        self._calls = calls
        self._parallel = bool(params.get("parallel"))
        self._timeout_s = timeout_s
        self._on_outcome = on_outcome
        self._items: list[Outcome | None] = [None] * len(calls)

    def item_ids(self) -> list[str]:
        """Return the call ids of the items."""
        return [f"{self.call.call_id}.{index}" for index in range(len(self._calls))]

    def run(self, run_item: RunItem) -> None:
        """Run the items, in order or in parallel, and return when all have ended or been left.

        An item that is refused, raises or times out does not stop the others.
        """

        def run_one(index: int) -> None:
            if self.call.is_cancelled:
                return
            finished = threading.Event()

            def done(outcome: Outcome) -> None:
                self._items[index] = outcome
                finished.set()

            timeout_s = min(self._timeout_s, self.call.remaining_s or SHORTEST_S)
            finished.wait(run_item(index, self._calls[index], timeout_s, done) + 1.0)

        if not self._parallel:
            for index in range(len(self._calls)):
                run_one(index)
            return
        threads = [
            threading.Thread(target=run_one, args=(index,), daemon=True)
            for index in range(len(self._calls))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def finish(self) -> None:
        """Tell the outcome, with what there is."""
        missing = fault_outcome(
            Fault("tool_timeout", "the batch reached its deadline before this call had a result")
        )
        body = b",".join(b"{" + (item or missing) + b"}" for item in self._items)
        self._on_outcome(self.call.call_id, result_outcome(b'{"results":[' + body + b"]}"))
