"""The operator's chat model, for the code of environments that simulate or judge with one.

In a tool, reward, function or reset: ``from aenv_ray.runtime import chat_model`` and
``chat_model.complete(messages)``. The instance's host sends the request: it knows the endpoint, the
model and the key, and none of them is in the sandbox. Only environments with
``deployConfig.chatModel`` may ask, if the operator allows it, and each instance has a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aenv_ray.runtime.door.calls import current_call
from aenv_ray.runtime.door.host.link import HOST
from aenv_ray.runtime.door.host.requests import ask_host
from aenv_ray.runtime.faults import Fault

METHOD: Final = "aenv/chat"
TIMEOUT_S: Final = 120.0
_GRACE_S: Final = 15.0
"""How much longer than the timeout, which the host enforces, this side waits. After a timeout the
host looks whether the endpoint works."""
_QUESTION_S: Final = 10.0


def is_available() -> bool:
    """Return whether `complete` can be called: the operator has a model and allows it here.

    False while the code is imported, and outside of a sandbox.
    """
    if not HOST.was_open:
        return False
    answer = ask_host(METHOD, {}, _QUESTION_S, current_call())
    return answer is not None and "result" in answer


def complete(
    messages: Sequence[Mapping[str, Any]], *, timeout_s: float = TIMEOUT_S, **options: Any
) -> dict[str, Any]:
    """Return the model's answer to a conversation, as OpenAI's API returns a chat completion.

    Args:
        messages: The conversation, in OpenAI's format.
        timeout_s: Limit for the answer in seconds, at most 300; it includes repeated attempts.
        options: Further fields: ``tools``, ``tool_choice``, ``temperature``, ``top_p``,
            ``max_tokens``, ``seed``, ``stop`` and ``response_format``.

    Returns:
        ``choices`` with one ``message``, ``usage`` and ``model``.

    Raises:
        RuntimeError: The instance is not up: this was called while its code was imported.
        Fault: The environment may not ask, has reached its limit, or the endpoint gave no answer.
            The caller of the tool, reward or reset gets this error.

    Stopping the call that runs this cancels the request.
    """
    if not HOST.was_open:
        raise RuntimeError(
            "the chat model is not available while the code is imported: ask it in a tool, a "
            "reward, a function or a reset"
        )
    body = {"messages": [dict(message) for message in messages], **options}
    params = {"body": body, "timeout_s": timeout_s}
    answer = ask_host(METHOD, params, timeout_s + _GRACE_S, current_call())
    if answer is None:
        raise Fault(
            "endpoint_unavailable", f"the host did not answer a chat request in {timeout_s:g} s"
        )
    error = answer.get("error")
    if error is None:
        return dict(answer["result"])
    data = error.get("data") or {}
    raise Fault(str(data.get("code", "internal_error")), str(error["message"]), data.get("hint"))
