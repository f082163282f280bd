"""The gateway's settings, passed to every replica when it is deployed."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.project.archive import MAX_ARCHIVE_BYTES

CONTROL_PORT: Final = 8080
"""Where AEnvironment's clients expect the control routes."""
MCP_PORT: Final = 8081
"""Where AEnvironment's clients expect the routes of an instance."""


class GatewaySettings(BaseModel):
    """Addresses and limits of the gateway."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` for every network of the node."""
    port: int = Field(default=CONTROL_PORT, ge=1, le=65535)
    """Control port; both ports serve the same routes."""
    mcp_port: int = Field(default=MCP_PORT, ge=1, le=65535)
    public_url: str | None = None
    """URL by which clients reach `port`, for URLs in answers. None: that of the request."""
    public_mcp_url: str | None = None
    """URL by which clients reach `mcp_port`. None: that of the request, with `mcp_port`."""
    replicas: int = Field(default=1, ge=1, le=100)
    """Processes that serve requests; they share the ports."""
    on_head: bool = False
    """Run all replicas on the head node, the one fixed address of a cluster that scales. Otherwise
    they run on the node that deploys them."""
    max_ongoing_requests: int = Field(default=4096, ge=1)
    """Concurrent requests of one replica; further ones get 503, which clients retry."""
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Largest request body, except for uploads of artifacts."""
    max_bodies_bytes: int = Field(default=256 * 1024 * 1024, ge=1)
    """Request bodies that one replica holds in memory at a time, together; while there are more,
    requests with bodies over 64 KiB get 429, which clients retry."""
    max_artifact_bytes: int = Field(default=MAX_ARCHIVE_BYTES, ge=1)
    """Largest artifact: as large as a project may be."""
    requests_per_s: float = Field(default=500.0, gt=0)
    """Control requests per second of one token at one replica, on average."""
    burst: int = Field(default=1000, ge=1)
    """Control requests of one token that one replica accepts in a burst."""
    create_wait_s: float = Field(default=20.0, ge=0)
    """A create of AEnvironment's client is answered after this time, started or not."""
    token_cache_s: float = Field(default=2.0, ge=0)
    """A revoked token may work for this long."""
    sweep_s: float = Field(default=5.0, gt=0)
    """How often leases are compared with the running instances."""
