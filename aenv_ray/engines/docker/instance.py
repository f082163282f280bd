"""One instance of the docker engine, as its host knows it, and the wait for it to come up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray.engines.docker.link import Link
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.errors import SandboxStartFailed
from aenv_ray.ids import InstanceId

BOOT_DEADLINE_S: Final = 60.0
"""A started container says that it is up within this, or is ended."""
CAUSE_WAIT_S: Final = 10.0
"""A daemon under load tells late why a container ended."""


@dataclass
class Instance:
    """A container of this host, or two."""

    id: InstanceId
    name: str
    ended: asyncio.Future[str]
    """Its cause, once it ended."""
    container_id: str = ""
    """The daemon's; an earlier container may have had the same name."""
    started: set[str] = field(default_factory=set)
    """Names of its containers that ran once: one that does not run any more has ended."""
    links: dict[str, Link] = field(default_factory=dict)
    """The ways to its containers, by name."""
    sandbox: DoorSandbox | None = None
    has_second: bool = False
    second_id: str = ""
    second: DoorSandbox | None = None
    log: str = ""
    out_of_memory: set[str] = field(default_factory=set)
    """Names of its containers of which the daemon told so."""
    burial: asyncio.Task[None] | None = None


def with_log(cause: str, log: str) -> str:
    """Return a cause with the end of what was printed, if anything was."""
    return f"{cause}; the end of its log:\n{log}" if log else cause


async def await_boot(
    instance: Instance, link: Link, last_words: Callable[[], Awaitable[str]], what: str = ""
) -> None:
    """Wait until a container of an instance says that it is up.

    Args:
        instance: Its end, of either container, ends the wait.
        link: To the container.
        last_words: Asked for the end of its log when it neither came up nor died.
        what: Which of the containers, for messages; "" for the first.

    Raises:
        SandboxStartFailed: It said why not, died, or said nothing in time.
    """
    report = asyncio.create_task(link.hear())
    try:
        async with asyncio.timeout(BOOT_DEADLINE_S):
            futures: set[asyncio.Future[Any]] = {report, instance.ended}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            message = report.result() if report.done() else {}
            if "ready" in message:
                return
            # One that closed without a word is dying; the daemon says how.
            why = message.get("failed") or await asyncio.shield(instance.ended)
    except TimeoutError:
        why = with_log(f"it was not up after {BOOT_DEADLINE_S:g} s", await last_words())
    except OSError as exc:
        try:
            async with asyncio.timeout(CAUSE_WAIT_S):
                why = await asyncio.shield(instance.ended)
        except TimeoutError:
            why = with_log(f"it does not answer ({exc})", await last_words())
    finally:
        report.cancel()
        await asyncio.wait([report])
    raise SandboxStartFailed(f"{instance.id} did not start: {what}{why}", instance_id=instance.id)
