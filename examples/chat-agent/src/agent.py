"""An agent as an environment: one tool, `chat`, with a history for each conversation.

With MODEL_URL, the address of an OpenAI-compatible server, a model answers; MODEL and MODEL_KEY
name it and let it in. Without, a few rules do, so that it runs anywhere.

    aenv push examples/chat-agent
    aenv service create chat-agent --service-name helpdesk --replicas 2

A client keeps to one replica by an MCP session or the header x-session-id. A replica serves several
clients, so each names its conversation.
"""

import json
import os
import urllib.request
from collections import defaultdict

from aenv_ray.runtime import register_function, register_health, register_tool

Message = dict[str, str]
_histories: dict[str, list[Message]] = defaultdict(list)
_MODEL_TIMEOUT_S = 50.0


@register_tool
def chat(message: str, conversation: str = "") -> str:
    """Answer a message.

    Args:
        message: What the user says.
        conversation: Which conversation it belongs to.
    """
    history = _histories[conversation]
    asked = [*history, {"role": "user", "content": message}]
    answer = _by_model(asked) if os.environ.get("MODEL_URL") else _by_rules(asked)
    history[:] = [*asked, {"role": "assistant", "content": answer}]
    return answer


@register_function
def forget(conversation: str = "") -> int:
    """Forget a conversation; returns how many messages it had."""
    return len(_histories.pop(conversation, []))


@register_health
def health() -> dict[str, str]:
    """Say that it is ready."""
    return {"status": "healthy"}


def _by_rules(history: list[Message]) -> str:
    said = [one["content"] for one in history if one["role"] == "user"]
    if "what did i say" in said[-1].lower():
        return "You said: " + "; ".join(said[:-1])
    return f"Noted, that is message {len(said)}."


def _by_model(history: list[Message]) -> str:
    body = json.dumps({"model": os.environ.get("MODEL", "default"), "messages": history})
    request = urllib.request.Request(
        os.environ["MODEL_URL"].rstrip("/") + "/chat/completions",
        data=body.encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ.get('MODEL_KEY', '')}",
        },
    )
    with urllib.request.urlopen(request, timeout=_MODEL_TIMEOUT_S) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])
