"""Whether a daemon can limit what containers write to their image's directories: by trying."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.engines.node.docker_labels import DEADLINE_LABEL

_ABLE: Final = ("overlay2", "xfs")
"""Storage driver and file system that can, where that is mounted with project quotas; the limits of
other drivers count the image as well."""
_TRIAL_BYTES: Final = 1 << 30
_TRIAL_S: Final = 60.0


class StorageDriver:
    """The storage driver of one daemon.

    Args:
        client: Of the daemon.
        own_labels: Of a container that is made to try it, and never started.
        clock: For that container's deadline.
    """

    def __init__(
        self, client: DockerClient, own_labels: Mapping[str, str], clock: Clock | None = None
    ) -> None:
        self._client = client
        self._labels = own_labels
        self._now = (clock or SystemClock()).now
        self._has_quota: bool | None = None

    def learn(self, info: Mapping[str, Any]) -> None:
        """Take in what the daemon says of itself; rules out those that cannot."""
        backing = dict(row for row in info.get("DriverStatus") or () if len(row) == 2)
        is_able = (info.get("Driver"), backing.get("Backing Filesystem")) == _ABLE
        self._has_quota = None if is_able else False

    async def has_quota(self, image_id: str) -> bool:
        """Whether containers can be given a limit; asks the daemon once.

        Args:
            image_id: Any image.

        Raises:
            FabricUnavailable: The daemon does not answer.
        """
        if self._has_quota is None:
            self._has_quota = await self._try(image_id)
        return self._has_quota

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
