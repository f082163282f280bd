"""What the tests of a pool do with a host: fill it, take from it, look into it."""

from __future__ import annotations

import json
from collections.abc import Callable

from aenv_ray.actors.calls.wire import CallMessage
from aenv_ray.actors.host.host import Host
from aenv_ray.actors.host.pool import WarmRequest
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceInfo, InstanceSpec

WAIT_S = 30.0
Spec = Callable[..., InstanceSpec]


async def keep(host: Host, spec: InstanceSpec, count: int) -> int:
    request = WarmRequest(spec=spec, count=count, idle_timeout_s=600.0)
    return await host.warm(request, WAIT_S if count else None)


async def start_one(host: Host, spec: InstanceSpec) -> InstanceInfo:
    (outcome,) = await host.start([spec])
    assert isinstance(outcome, InstanceInfo)
    return outcome


async def count_calls(host: Host, instance_id: InstanceId) -> int:
    params = b'{"name":"count","arguments":{},"_meta":{"aenv/call_id":"c%d"}}' % id(object())
    result = await host.calls.call(CallMessage(instance_id, "tools/call", 30.0, params))
    _, (_, data) = result.__reduce__()
    return int(json.loads(data)["structuredContent"]["result"])


def pooled(store: InstanceStore) -> list[InstanceId]:
    return [record.id for record in store.list() if record.is_pooled]


def is_warm(info: InstanceInfo) -> bool:
    return info.start_mode.startswith("warm, ")
