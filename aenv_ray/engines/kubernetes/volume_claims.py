"""Storage that outlives pods: PersistentVolumeClaims without an owner.

A claim is for one pod at a time (``ReadWriteOncePod``): Kubernetes makes a second pod wait. A
shared claim is ``ReadWriteMany``, which its storage class must support.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from aenv_ray.engines.kubernetes import names, pod_status
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.project.storage import StorageMount, parse_size, shown_size

_EXCLUSIVE: Final = "ReadWriteOncePod"
_SHARED: Final = "ReadWriteMany"
_GONE_S: Final = 240.0
"""How long the deletion of a claim may take: its pod may finish calls for two minutes."""
_POLL_S: Final = 0.5


class VolumeClaims:
    """The claims of one namespace.

    Requests raise `ApiRefused` when the API refuses, and `FabricUnavailable` when it does not
    answer, unless their docstring says otherwise.
    """

    def __init__(self, client: KubernetesClient, storage_class: str | None) -> None:
        self._client = client
        self._class = storage_class

    async def ensure(self, storage: StorageMount) -> None:
        """Ensure that a storage volume's claim exists and is large enough.

        Raises:
            ConfigError: The existing claim has another access mode.
            FabricUnavailable: The claim existed and is gone, or belongs to another storage volume.
        """
        found = await self._client.find(Access.GET_CLAIM, storage.name)
        if found is None:
            if storage.is_made:
                raise FabricUnavailable(
                    f"claim {storage.name} is gone, with its files",
                    hint="it was deleted outside aenv; delete the service and create it again",
                )
            try:
                found = await self._client.request(Access.CREATE_CLAIM, body=self._body(storage))
            except ApiRefused as exc:
                if exc.reason != "AlreadyExists":
                    raise
                found = await self._client.request(Access.GET_CLAIM, storage.name)
        _check(found, storage)
        requests = found["spec"]["resources"]["requests"]
        if parse_size(requests["storage"]) < storage.size_bytes:
            grown = {"spec": {"resources": {"requests": {"storage": _size(storage)}}}}
            await self._client.request(Access.PATCH_CLAIM, storage.name, body=grown)

    async def delete(self, storage: StorageMount) -> None:
        """Delete a storage volume's claim, and return when it is gone.

        Raises:
            AenvError: The API refuses.
            FabricUnavailable: A pod still uses it.
        """
        with pod_status.api_errors(self._client):
            await self._delete(storage)

    async def _delete(self, storage: StorageMount) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _GONE_S
        found = await self._client.find(Access.GET_CLAIM, storage.name)
        if found is None or not _is_of(found, storage):
            return
        uid = found["metadata"]["uid"]
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self._client.request(Access.DELETE_CLAIM, storage.name, body=body)
        except ApiRefused as exc:
            if exc.status not in (404, 409):  # 409: another claim has the name
                raise
        while found is not None and found["metadata"]["uid"] == uid:
            if loop.time() > until:
                raise FabricUnavailable(
                    f"claim {storage.name} still exists {_GONE_S:g} s after it was deleted",
                    hint="a pod still uses it: Kubernetes deletes it after the last such pod",
                )
            await asyncio.sleep(_POLL_S)
            found = await self._client.find(Access.GET_CLAIM, storage.name)

    def _body(self, storage: StorageMount) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": storage.name,
                "labels": {
                    names.PART_OF: "aenv-ray",
                    names.COMPONENT: names.STORAGE,
                    names.STORAGE_LABEL: storage.uid,
                },
            },
            "spec": {
                "accessModes": [_SHARED if storage.is_shared else _EXCLUSIVE],
                "resources": {"requests": {"storage": _size(storage)}},
                **({"storageClassName": self._class} if self._class else {}),
            },
        }


def _size(storage: StorageMount) -> str:
    return shown_size(storage.size_bytes)


def _is_of(claim: Mapping[str, Any], storage: StorageMount) -> bool:
    labels = claim["metadata"].get("labels") or {}
    return bool(labels.get(names.STORAGE_LABEL) == storage.uid)


def _check(claim: Mapping[str, Any], storage: StorageMount) -> None:
    if not _is_of(claim, storage):
        raise FabricUnavailable(
            f"claim {storage.name} is not the one that was created for this storage volume",
            hint=f"its label {names.STORAGE_LABEL} differs; rename or delete that claim",
        )
    if "deletionTimestamp" in claim["metadata"]:
        raise FabricUnavailable(
            f"claim {storage.name} is being deleted", hint="try again when it is gone"
        )
    wanted = _SHARED if storage.is_shared else _EXCLUSIVE
    modes = claim["spec"]["accessModes"]
    if wanted not in modes:
        raise ConfigError(
            f"claim {storage.name} was created with access {', '.join(modes)}, not {wanted}",
            hint="Kubernetes cannot change that: restore AENV_STORAGE_ACCESS, or delete the "
            "storage",
        )
