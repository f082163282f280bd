"""The interface of the controller actor that creating processes use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from aenv_ray.actors.host.remote_host import HostMethod, RemoteHost
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceInfo, InstanceSpec

if TYPE_CHECKING:
    from aenv_ray.actors.controller.admission import Reservation
    from aenv_ray.actors.controller.controller import DedicatedAnswer
    from aenv_ray.actors.controller.draining import NodeState
    from aenv_ray.actors.controller.placement import HostLoad, Need


class RemoteController(Protocol):
    """The methods of `aenv_ray.actors.controller.controller.Controller`, which documents them."""

    ping: HostMethod[[], str]

    shared_hosts: HostMethod[[float, int, Need], list[tuple[HostLoad, RemoteHost]]]
    reserve: HostMethod[
        [Sequence[InstanceId], str, str | None, float, bool, Need], list[Reservation]
    ]
    queue_reason: HostMethod[[], str]
    is_queued: HostMethod[[Sequence[InstanceId]], bool]
    create_dedicated: HostMethod[[Sequence[InstanceSpec], float], list[DedicatedAnswer]]
    start_dedicated: HostMethod[[Sequence[InstanceSpec]], list[DedicatedAnswer]]

    locate: HostMethod[[str], tuple[RemoteHost, InstanceInfo]]
    list_instances: HostMethod[[], list[InstanceInfo]]
    pools: HostMethod[[], dict[str, int]]
    count_processes: HostMethod[[], int]
    release: HostMethod[[Sequence[str]], None]

    nodes: HostMethod[[], list[NodeState]]
    drain: HostMethod[[str, bool], NodeState]
    undrain: HostMethod[[str], NodeState]
