"""Objects of an emulated cluster by the names of their kinds, for tests of `aenv cluster`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from aenv_ray.cluster.objects import KINDS, Document
from tests.emulators.kubernetes.api import NAMESPACE, EmulatedCluster


def add(cluster: EmulatedCluster, document: Document) -> None:
    """Put an object there, as others do."""
    kind = KINDS[document["kind"]]
    namespace = document["metadata"].get("namespace", "")
    cluster.create(kind.plural, document, kind.group, namespace)


def all_of(cluster: EmulatedCluster, kind_name: str) -> list[Document]:
    """Return the objects of a kind, in all namespaces."""
    kind = KINDS[kind_name]
    return cluster.objects(kind.plural, kind.group, "")


def one(cluster: EmulatedCluster, kind_name: str, name: str) -> Document:
    """Return an object."""
    (found,) = [o for o in all_of(cluster, kind_name) if o["metadata"]["name"] == name]
    return found


def edited(cluster: EmulatedCluster, kind_name: str, name: str) -> AbstractContextManager[Document]:
    """Yield an object to change, as others do."""
    kind = KINDS[kind_name]
    namespace = NAMESPACE if kind.is_namespaced else ""
    return cluster.edited(kind.plural, name, kind.group, namespace)
