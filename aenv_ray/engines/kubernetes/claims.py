"""Storage that outlives pods: PersistentVolumeClaims, which no pod owns and nothing collects.

A claim is for one pod at a time, and Kubernetes itself keeps a second one waiting
(``ReadWriteOncePod``); a shared one is ``ReadWriteMany``, which its storage class must offer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from aenv_ray.engines.kubernetes import causes, names
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.project.storage import StorageMount, parse_size, shown_size

_ALONE: Final = "ReadWriteOncePod"
_SHARED: Final = "ReadWriteMany"
_GONE_S: Final = 240.0
"""A pod that has it may have calls under way for two minutes."""
_LOOK_S: Final = 0.5


class Claims:
    """The claims of one namespace.

    Args:
        client: Of the API.
        storage_class: Of new ones; None for the cluster's.

    Requests raise `ApiRefused` when the API refuses, and `FabricUnavailable` when it does not
    answer, unless they say otherwise.
    """

    def __init__(self, client: KubernetesClient, storage_class: str | None) -> None:
        self._client = client
        self._class = storage_class

    async def ensure(self, storage: StorageMount) -> None:
        """See that a storage's claim is there, at least as large as asked for.

        Raises:
            ConfigError: The one that is there is of other access.
            FabricUnavailable: It was there before and is gone, or is another storage's.
        """
        found = await self._find(storage.name)
        if found is None:
            if storage.is_made:
                raise FabricUnavailable(
                    f"claim {storage.name} is gone, and what was kept with it",
                    hint="somebody deleted it; delete the service, and make it anew",
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
        """Delete a storage's claim; returns when it is gone, or never was.

        Raises:
            AenvError: The API refuses it.
            FabricUnavailable: A pod has it still.
        """
        try:
            await self._delete(storage)
        except ApiRefused as exc:
            raise causes.in_words(exc, self._client.namespace) from exc

    async def _delete(self, storage: StorageMount) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _GONE_S
        found = await self._find(storage.name)
        if found is None or not _is_of(found, storage):
            return
        uid = found["metadata"]["uid"]
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self._client.request(Access.DELETE_CLAIM, storage.name, body=body)
        except ApiRefused as exc:
            if exc.status not in (404, 409):  # 409: another one has the name
                raise
        while found is not None and found["metadata"]["uid"] == uid:
            if loop.time() > until:
                raise FabricUnavailable(
                    f"claim {storage.name} is not gone {_GONE_S:g} s after it was deleted",
                    hint="a pod has it still: Kubernetes deletes it with the last of them",
                )
            await asyncio.sleep(_LOOK_S)
            found = await self._find(storage.name)

    async def _find(self, name: str) -> dict[str, Any] | None:
        try:
            return await self._client.request(Access.GET_CLAIM, name)
        except ApiRefused as exc:
            if exc.status == 404:
                return None
            raise

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
                "accessModes": [_SHARED if storage.is_shared else _ALONE],
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
            f"claim {storage.name} is not the one that was made for this storage",
            hint=f"it has another label {names.STORAGE_LABEL}; rename or delete it",
        )
    if "deletionTimestamp" in claim["metadata"]:
        raise FabricUnavailable(
            f"claim {storage.name} is being deleted", hint="somebody deleted it; try again later"
        )
    wanted = _SHARED if storage.is_shared else _ALONE
    modes = claim["spec"]["accessModes"]
    if wanted not in modes:
        raise ConfigError(
            f"claim {storage.name} was made for {', '.join(modes)}, and {wanted} is wanted",
            hint="Kubernetes lets nobody change that: set AENV_STORAGE_ACCESS as it was, or delete "
            "the storage",
        )
