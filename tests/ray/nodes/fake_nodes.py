"""A provider of nodes for Ray's autoscaler: each node is a raylet on this machine.

Ray's own fake provider counts its nodes' ids, which then begin alike, as no real ones do.
"""

from __future__ import annotations

import uuid

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class FakeNodes(FakeMultiNodeProvider):  # type: ignore[misc]  # Ray's is not typed
    """Starts and ends raylets on this machine."""

    def _next_hex_node_id(self) -> str:
        return (uuid.uuid4().hex * 2)[:56]
