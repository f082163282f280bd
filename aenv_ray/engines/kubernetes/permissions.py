"""Every permission that the kubernetes engine uses, and nothing besides.

`aenv_ray.engines.kubernetes.client` makes a request only for one of these, so that what a Role must
grant is this list: a cluster's Role is compared with it by a test.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Permission(NamedTuple):
    """What a rule of a Role grants."""

    verb: str
    resource: str
    """The plural, for example ``pods``."""
    group: str = ""
    """The API group; "" for the core one."""


class Access(Permission, Enum):
    """What the engine asks of the API, all of it in its own namespace."""

    CREATE_POD = Permission("create", "pods")
    """A sandbox."""
    GET_POD = Permission("get", "pods")
    """A sandbox to attach to, and the Ray pod that owns them."""
    LIST_PODS = Permission("list", "pods")
    """What runs, and where a watch begins."""
    WATCH_PODS = Permission("watch", "pods")
    """One for each host."""
    PATCH_POD = Permission("patch", "pods")
    """A renewed deadline, in an annotation."""
    DELETE_POD = Permission("delete", "pods")
    """A release, and what the janitor finds."""
    CREATE_CLAIM = Permission("create", "persistentvolumeclaims")
    """A service's storage."""
    GET_CLAIM = Permission("get", "persistentvolumeclaims")
    """Whether it is there, and gone."""
    PATCH_CLAIM = Permission("patch", "persistentvolumeclaims")
    """A storage that grows."""
    DELETE_CLAIM = Permission("delete", "persistentvolumeclaims")
    """A storage that its owner deletes; nobody else does."""
    LIST_NETWORK_POLICIES = Permission("list", "networkpolicies", "networking.k8s.io")
    """What sandboxes really reach; without it, their facts say that it is not known."""
