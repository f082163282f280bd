"""Whether a daemon can limit what containers write to their image's directories."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.engines.node.docker_labels import DEADLINE_LABEL

_CANDIDATE: Final = ("overlay2", "xfs")
"""The storage driver and file system that may have quotas, depending on mount options. The limits
of other drivers include the image."""
_TRIAL_BYTES: Final = 1 << 30
_TRIAL_S: Final = 60.0


class DiskQuota:
    """The disk quotas of one daemon.

    Args:
        client: Of the daemon.
        own_labels: Of a container that is created to try a quota, and never started.
        clock: For that container's deadline.
    """

    def __init__(
        self, client: DockerClient, own_labels: Mapping[str, str], clock: Clock | None = None
    ) -> None:
        self._client = client
        self._labels = own_labels
        self._now = (clock or SystemClock()).now
        self._works: bool | None = None

    def learn(self, info: Mapping[str, Any]) -> None:
        """Rule out daemons without quotas, by their answer to ``/info``."""
        backing = dict(row for row in info.get("DriverStatus") or () if len(row) == 2)
        is_candidate = (info.get("Driver"), backing.get("Backing Filesystem")) == _CANDIDATE
        self._works = None if is_candidate else False

    async def works(self, image_id: str) -> bool:
        """Return whether containers can have a quota; tries it once.

        Args:
            image_id: Any image of the daemon.

        Raises:
            FabricUnavailable: The daemon does not answer.
        """
        if self._works is None:
            self._works = await self._try(image_id)
        return self._works

    async def _try(self, image_id: str) -> bool:
        name = f"aenv-try-{uuid.uuid4().hex[:12]}"
        body = {
            "Image": image_id,
            "Cmd": ["true"],
            "Labels": {**self._labels, DEADLINE_LABEL: repr(self._now() + _TRIAL_S)},
            "HostConfig": {"NetworkMode": "none", "StorageOpt": {"size": str(_TRIAL_BYTES)}},
        }
        try:
            await self._client.request(
                "POST", "/containers/create", params={"name": name}, body=body
            )
        except DaemonRefused:
            return False
        await self._client.request("DELETE", f"/containers/{name}", params={"force": 1})
        return True
