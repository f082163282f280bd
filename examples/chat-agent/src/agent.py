"""An agent as an environment: one tool, `chat`, with a history for each conversation.

With MODEL_URL, the address of an OpenAI-compatible server, a model answers; MODEL and MODEL_KEY
name it and let it in. Without, a few rules do, so that it runs anywhere.

A model needs a network: set `network` in `config.json` to `host`, and start the gateway with
AENV_ALLOW_NETWORKS=none,internet,allowlist,host, since its default policy refuses `host`.

    aenv push examples/chat-agent
    aenv service create chat-agent --service-name helpdesk --replicas 2

A client keeps to one replica by an MCP session or the header x-session-id. A replica serves several
clients, so each names its conversation.
"""

import os

from aenv_ray.runtime import ChatEndpoint, register_health, serve_agent


@register_health
def health() -> dict[str, str]:
    """Say that it is ready."""
    return {"status": "healthy"}


def by_rules(messages: list[dict[str, str]]) -> str:
    """Answer the last message of a conversation."""
    said = [one["content"] for one in messages if one["role"] == "user"]
    if "what did i say" in said[-1].lower():
        return "You said: " + "; ".join(said[:-1])
    return f"Noted, that is message {len(said)}."


def _agent():
    url = os.environ.get("MODEL_URL")
    return ChatEndpoint(url, os.environ.get("MODEL", "default")) if url else by_rules


serve_agent(_agent())
