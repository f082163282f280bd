"""FastMCP: a server process for each environment, and its client over standard input and output."""

from __future__ import annotations

import sys
from typing import Any

from fastmcp import Client, FastMCP
from fastmcp.client.transports import StdioTransport
from protocol import Peer, python, run


class FastMCPServer(Peer):
    """See `Peer`."""

    async def create(self) -> Any:
        client = Client(StdioTransport(python(), [__file__, "serve"]))
        await client.__aenter__()
        return client

    async def call(self, env: Any) -> None:
        result = await env.call_tool("echo", {"text": "hi"})
        assert result.data == "hi"

    async def release(self, env: Any) -> None:
        await env.close()


def _serve() -> None:
    server = FastMCP("echo")

    @server.tool
    def echo(text: str) -> str:
        return text

    server.run(transport="stdio", show_banner=False)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        _serve()
    else:
        run(FastMCPServer())
