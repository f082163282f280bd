"""Every permission that the kubernetes engine uses.

`aenv_ray.engines.kubernetes.client` makes only these requests, so a Role must grant exactly this
list. A test compares the Role in ``clusters/kuberay`` with it.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Permission(NamedTuple):
    """A permission as a rule of a Role grants it."""

    verb: str
    resource: str
    """The plural, for example ``pods``."""
    group: str = ""
    """The API group; "" for the core group."""
    is_namespaced: bool = True


class Access(Permission, Enum):
    """The requests of the engine, all in its own namespace."""

    CREATE_POD = Permission("create", "pods")
    """Create a sandbox."""
    GET_POD = Permission("get", "pods")
    """Attach to a sandbox, and find the Ray pod that owns it."""
    LIST_PODS = Permission("list", "pods")
    """List running sandboxes, and find where to begin a watch."""
    WATCH_PODS = Permission("watch", "pods")
    """Watch the pods of a host."""
    PATCH_POD = Permission("patch", "pods")
    """Renew a deadline, which is an annotation."""
    DELETE_POD = Permission("delete", "pods")
    """Release a sandbox, and remove orphans."""
    CREATE_CLAIM = Permission("create", "persistentvolumeclaims")
    """Create the storage of a service."""
    GET_CLAIM = Permission("get", "persistentvolumeclaims")
    """Check whether a storage volume exists."""
    PATCH_CLAIM = Permission("patch", "persistentvolumeclaims")
    """Grow a storage volume."""
    DELETE_CLAIM = Permission("delete", "persistentvolumeclaims")
    """Delete a storage volume, on its owner's request only."""
    LIST_NETWORK_POLICIES = Permission("list", "networkpolicies", "networking.k8s.io")
    """Find out what sandboxes can reach; without it, their isolation facts say "unknown"."""
