"""Counts a node's pods as the API has them: of what is left, a host's own tables are no witness."""

from __future__ import annotations

from aenv_ray.engines.kubernetes import causes, names
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.namespace import Place
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.engines.kubernetes.plan import find_owner


async def pods_of(place: Place) -> list[str]:
    """Return the names of the pods of all hosts in one pod, whatever their state.

    Raises:
        FabricUnavailable: The API does not answer, or refuses, so that nobody can say what runs.
    """
    client = KubernetesClient(place.namespace)
    try:
        await client.open()
        owner, _ = await find_owner(client, place)
        query = {"labelSelector": names.owner_selector(owner.uid)}
        listed = await client.request(Access.LIST_PODS, query=query)
    except ApiRefused as exc:
        raise causes.in_words(exc, client.namespace) from exc
    finally:
        await client.close()
    return [pod["metadata"]["name"] for pod in listed["items"]]
