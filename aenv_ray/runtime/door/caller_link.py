"""The caller of a call over the fast door: log messages and requests to it, and its answers.

A caller that offers something names it in ``_meta`` under `OFFERS`. It then gets `NOTE`
notifications with the call's progress token, whose ``note`` is a message of MCP: a log message, a
request, or the withdrawal of one. A request has a ``question``, which the caller passes to the
method `ANSWER` together with the result or the error.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from aenv_ray.runtime.door.caller import unsupported
from aenv_ray.runtime.door.calls import current_call
from aenv_ray.runtime.faults import Fault

OFFERS: Final = "aenv/caller"
"""In ``_meta``: a list of ``logging``, ``elicitation`` and ``sampling``."""
NOTE: Final = "notifications/aenv/caller"
ANSWER: Final = "aenv/answer"
LOG: Final = "notifications/message"
ELICIT: Final = "elicitation/create"
SAMPLE: Final = "sampling/createMessage"
WITHDRAWN: Final = "notifications/cancelled"
_CAPABILITIES: Final = {ELICIT: "elicitation", SAMPLE: "sampling"}

Note = dict[str, Any]
CallerAnswer = Mapping[str, Any]
"""``result`` or ``error``, as in JSON-RPC."""


class Questions:
    """Requests of this process that wait for an answer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Callable[[CallerAnswer], None]] = {}

    def open(self, on_answer: Callable[[CallerAnswer], None]) -> str:
        """Return the id of a new question, which nobody can guess."""
        question = secrets.token_urlsafe(16)
        with self._lock:
            self._waiting[question] = on_answer
        return question

    def close(self, question: str) -> bool:
        """Stop waiting; return whether there was no answer yet."""
        with self._lock:
            return self._waiting.pop(question, None) is not None

    def answer(self, question: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Pass on an answer; the first one counts, and late ones are ignored.

        Raises:
            Fault: ``tool_input_invalid``: it has neither a result nor an error.
        """
        if not isinstance(answer.get("result"), dict) and not isinstance(answer.get("error"), dict):
            raise Fault(
                "tool_input_invalid", "an answer needs an object as its `result` or `error`"
            )
        with self._lock:
            on_answer = self._waiting.pop(question, None)
        if on_answer is not None:
            on_answer(answer)
        return {"accepted": on_answer is not None}


QUESTIONS: Final = Questions()

METHODS: Final[dict[str, Callable[..., dict[str, Any]]]] = {ANSWER: QUESTIONS.answer}
"""Fast-door methods served by this module."""


class LinkedCaller:
    """The caller of one call, a `Caller`.

    Args:
        send: Sends a note. Thread-safe.
        offers: What the caller offers, see `OFFERS`.
    """

    def __init__(self, send: Callable[[Note], None], offers: Collection[Any]) -> None:
        self._send = send
        self._offers = frozenset(offer for offer in offers if isinstance(offer, str))

    def log(self, level: str, message: str, data: Any) -> None:
        """Send a log message, if the caller wants them."""
        if "logging" not in self._offers:
            return
        extra = data if data is None or isinstance(data, Mapping) else {"data": data}
        self._send(
            {"method": LOG, "params": {"level": level, "data": {"msg": message, "extra": extra}}}
        )

    def ask(self, method: str, params: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and block until its answer; see `Caller.ask`."""
        what = _CAPABILITIES[method]
        if what not in self._offers:
            raise unsupported(what)
        answers: list[CallerAnswer] = []
        done, call = threading.Event(), current_call()

        def on_answer(answer: CallerAnswer) -> None:
            answers.append(answer)
            done.set()

        question = QUESTIONS.open(on_answer)
        try:
            self._send({"method": method, "params": dict(params), "question": question})
            call.bind_stop(done.set)  # a waiting thread is interrupted when it wakes
            done.wait(timeout_s)
        finally:
            if QUESTIONS.close(question):
                self._send({"method": WITHDRAWN, "params": {}, "question": question})
            call.unbind_stop(done.set)
        if call.is_cancelled:
            text = f"the call was stopped while it waited for {method}"
            raise Fault("call_cancelled", text)
        if not answers:
            raise Fault("tool_timeout", f"the caller did not answer {method} in time")
        error = answers[0].get("error")
        if error is not None:
            raise Fault("function_failed", f"the caller refused {method}: {error.get('message')}")
        return _checked(method, answers[0]["result"])


def _checked(method: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a request.

    Raises:
        Fault: ``function_failed``: it is none of this method.
    """
    is_valid = (
        result.get("action") in ("accept", "decline", "cancel")
        if method == ELICIT
        else isinstance(result.get("content"), dict)
    )
    if not is_valid:
        raise Fault("function_failed", f"the caller's answer to {method} is malformed")
    return dict(result)
