"""Images between a node's daemon and registries: pull, push, and what their failures mean."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from aenv_ray.engines.images.credentials import Credentials, Login
from aenv_ray.engines.images.reference import has_tag, registry_of, split_tag
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import AenvError, FabricUnavailable, SandboxStartFailed, Unauthorized

logger = logging.getLogger(__name__)

SILENCE_S: Final = 600.0
"""A daemon that unpacks a large layer says nothing meanwhile."""
_TELL_S: Final = 5.0
_DONE: Final = (
    "Pull complete", "Already exists", "Pushed", "Layer already exists", "Mounted from",
)  # fmt: skip
_MOVING: Final = ("Downloading", "Pushing")


class Trouble(enum.Enum):
    """What kept an image from going from or to a registry."""

    DISK_FULL = enum.auto()
    OTHER_PLATFORM = enum.auto()
    """The registry has it, but not for this node."""
    UNAUTHORIZED = enum.auto()
    UNREACHABLE = enum.auto()
    NOT_FOUND = enum.auto()
    UNKNOWN = enum.auto()


_MARKS: Final = (  # the first that fits counts
    (Trouble.DISK_FULL, ("no space left", "disk quota exceeded")),
    (Trouble.OTHER_PLATFORM, ("no matching manifest", "does not match the specified platform")),
    (
        Trouble.UNAUTHORIZED,
        ("unauthorized", "no basic auth credentials", "authentication required", "denied",
         "authorization failed", "403 forbidden", "insufficient_scope"),
    ),
    (
        Trouble.UNREACHABLE,
        ("dial tcp", "connection refused", "connection reset", "no such host", "timeout", "x509",
         "server gave http response", "network is unreachable", "no route to host",
         "request canceled", "failed to do request", "service unavailable", "bad gateway"),
    ),
    (Trouble.NOT_FOUND, ("not found", "manifest unknown", "name unknown", "not known")),
)  # fmt: skip


def diagnose(words: str) -> Trouble:
    """Return what a daemon's words about a registry mean."""
    low = words.lower()
    for trouble, marks in _MARKS:
        if any(mark in low for mark in marks):
            return trouble
    return Trouble.UNKNOWN


class Transfer:
    """How far an image is that is pulled or pushed: the daemon's lines in, a summary out."""

    def __init__(self) -> None:
        self._statuses: dict[str, str] = {}
        self._sizes: dict[str, tuple[int, int]] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        """Take one line of the daemon's report."""
        layer, status = str(line.get("id") or ""), str(line.get("status") or "")
        if not layer or status.startswith("Pulling from"):  # that line's id is the tag
            return
        self._statuses[layer] = status
        detail = line.get("progressDetail") or {}
        if status in _MOVING and detail.get("total"):
            total = int(detail["total"])
            self._sizes[layer] = (min(int(detail.get("current", 0)), total), total)
        elif layer in self._sizes and status not in _MOVING:
            self._sizes[layer] = (self._sizes[layer][1],) * 2

    @property
    def layers(self) -> tuple[int, int]:
        """How many layers are there, and how many there will be."""
        done = sum(status.startswith(_DONE) for status in self._statuses.values())
        return done, len(self._statuses)

    def __str__(self) -> str:
        moved = sum(current for current, _ in self._sizes.values())
        total = sum(total for _, total in self._sizes.values())
        done, layers = self.layers
        size = f", {moved / 1e6:.1f} of {total / 1e6:.1f} MB" if total else ""
        return f"{done} of {layers} layers{size}"


async def pull(client: DockerClient, credentials: Credentials, reference: str) -> None:
    """Pull an image, with this node's login for its registry, telling the log how far it is.

    Cancelling it ends the pull.

    Raises:
        SandboxStartFailed: It does not exist, may not be pulled, its registry cannot be reached, or
            the disk is full.
        FabricUnavailable: The daemon does not answer.
    """
    login = await credentials.login(registry_of(reference))
    logger.warning("pulling image %s", reference)
    loop = asyncio.get_running_loop()
    tell_at = loop.time() + _TELL_S
    transfer = Transfer()

    def on_line() -> None:
        nonlocal tell_at
        if loop.time() >= tell_at:
            tell_at = loop.time() + _TELL_S
            logger.warning("pulling image %s: %s", reference, transfer)

    params = {"fromImage": reference, **({} if has_tag(reference) else {"tag": "latest"})}
    try:
        await _move(client, "/images/create", params, login, transfer, on_line)
    except DaemonRefused as exc:
        raise _pull_failure(reference, exc.message, login, credentials) from exc
    logger.warning("pulled image %s: %s", reference, transfer)


async def push(
    client: DockerClient,
    credentials: Credentials,
    reference: str,
    on_progress: Callable[[Transfer], None],
) -> str:
    """Push one name of an image.

    Args:
        client: Of the daemon that has it.
        credentials: With the login for its registry.
        reference: ``REGISTRY/NAME:TAG``.
        on_progress: Told how far it is.

    Returns:
        ``REGISTRY/NAME@sha256:…``: what any node can pull exactly this image by.

    Raises:
        Unauthorized: The registry wants a login, or another one.
        FabricUnavailable: The registry or the daemon does not answer, or refuses.
    """
    repository, tag = split_tag(reference)
    login = await credentials.login(registry_of(reference))
    transfer, path = Transfer(), f"/images/{repository}/push"
    try:
        digest = await _move(
            client, path, {"tag": tag}, login, transfer, lambda: on_progress(transfer)
        )
    except DaemonRefused as exc:
        raise _push_failure(reference, exc.message, login, credentials) from exc
    if not digest:
        raise FabricUnavailable(f"{reference} cannot be pushed: the daemon ended without a word")
    return f"{repository}@{digest}"


async def _move(
    client: DockerClient,
    path: str,
    params: Mapping[str, str],
    login: Login,
    transfer: Transfer,
    on_line: Callable[[], None],
) -> str:
    """Follow a pull or push to its end and return the digest that it tells; "" for none.

    Raises:
        DaemonRefused: It failed; with the daemon's words.
    """
    loop = asyncio.get_running_loop()
    digest = ""
    try:
        async with (
            asyncio.timeout(SILENCE_S) as limit,
            client.stream(
                "POST", path, params=params, headers={"X-Registry-Auth": login.header}
            ) as lines,
        ):
            async for line in lines:
                if "error" in line:
                    raise DaemonRefused(500, str(line["error"]))
                limit.reschedule(loop.time() + SILENCE_S)
                digest = (line.get("aux") or {}).get("Digest") or digest
                transfer.take(line)
                on_line()
    except TimeoutError as exc:
        raise DaemonRefused(504, f"the daemon said nothing for {SILENCE_S:g} s") from exc
    return digest


def login_hint(reference: str, login: Login, credentials: Credentials) -> str:
    """Return what to do about a registry that does not let this node in."""
    registry = registry_of(reference)
    if login.trouble:
        return f"{login.trouble}; mend that, or: docker login {registry}"
    return f"on this node, docker login {registry} writes {credentials.path}, which is read here"


def _unauthorized(login: Login) -> str:
    if login.auth is None:
        return "it does not exist there, or its registry wants a login and this node has none"
    return "it does not exist there, or its registry does not accept this node's login"


def _pull_failure(
    reference: str, words: str, login: Login, credentials: Credentials
) -> SandboxStartFailed:
    where = registry_of(reference)
    reason, hint = {
        Trouble.DISK_FULL: (
            "the disk of this node's Docker is full", "free some, for example: docker image prune"
        ),
        Trouble.OTHER_PLATFORM: (
            "there is none for this node's platform", "build it for this platform: aenv build -p"
        ),
        Trouble.UNAUTHORIZED: (_unauthorized(login), login_hint(reference, login, credentials)),
        Trouble.UNREACHABLE: (
            f"registry {where} cannot be reached from this node",
            "an image that is on the node needs no registry",
        ),
        Trouble.NOT_FOUND: ("it does not exist", f"check its name and tag at {where}"),
        Trouble.UNKNOWN: ("the daemon gives up", f"try on that node: docker pull {reference}"),
    }[diagnose(words)]  # fmt: skip
    return SandboxStartFailed(
        f"image {reference} cannot be pulled: {reason} ({words.strip()})", hint=hint
    )


def _push_failure(reference: str, words: str, login: Login, credentials: Credentials) -> AenvError:
    message = f"{reference} cannot be pushed"
    match diagnose(words):
        case Trouble.UNAUTHORIZED:
            asks = "wants a login" if login.auth is None else "does not allow it to this login"
            return Unauthorized(
                f"{message}: registry {registry_of(reference)} {asks} ({words.strip()})",
                hint=login_hint(reference, login, credentials),
            )
        case Trouble.UNREACHABLE:
            return FabricUnavailable(
                f"{message}: registry {registry_of(reference)} cannot be reached ({words.strip()})",
                hint="the image is built, and on this node; name a registry with -r",
            )
    return FabricUnavailable(
        f"{message}: {words.strip()}", hint="the image is built, and on this node"
    )
