"""What an operator sets of the gateway, handed from whoever deploys it to every replica."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

CONTROL_PORT: Final = 8080
"""Where AEnvironment's clients look for the control routes."""
MCP_PORT: Final = 8081
"""Where AEnvironment's clients look for the routes of one instance."""


class GatewaySettings(BaseModel):
    """How the gateway listens and what it allows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` for every network of the node."""
    port: int = Field(default=CONTROL_PORT, ge=1, le=65535)
    """Control port. Both ports serve the same routes."""
    mcp_port: int = Field(default=MCP_PORT, ge=1, le=65535)
    public_url: str | None = None
    """How clients reach `port`, for the addresses in answers. None: as the request came."""
    public_mcp_url: str | None = None
    """How clients reach `mcp_port`. None: as the request came, with `mcp_port`."""
    replicas: int = Field(default=1, ge=1, le=100)
    """Processes that answer; on one node they share the ports."""
    on_head: bool = False
    """Keep all of them on Ray's head, where a cluster that scales has its one fixed address."""
    max_ongoing_requests: int = Field(default=4096, ge=1)
    """Requests that one replica works on at once; more get 503 and try again."""
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Largest body of a request, but for uploads of artifacts."""
    max_artifact_bytes: int = Field(default=1024 * 1024 * 1024, ge=1)
    """Largest artifact."""
    requests_per_s: float = Field(default=500.0, gt=0)
    """Control requests of one token at one replica, in the long run."""
    burst: int = Field(default=1000, ge=1)
    """Control requests of one token at one replica that may come at once."""
    create_wait_s: float = Field(default=20.0, ge=0)
    """An AEnvironment client's create is answered after this long, started or not."""
    token_cache_s: float = Field(default=2.0, ge=0)
    """A revoked token is refused after this time at the latest."""
    sweep_s: float = Field(default=5.0, gt=0)
    """How often leases are compared with what runs."""
