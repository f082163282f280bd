"""Pull and push between a node's daemon and registries, and the reasons of their failures."""

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
"""How long a daemon may report nothing, as while it unpacks a large layer."""
_LOG_PROGRESS_S: Final = 5.0
_DONE: Final = (
    "Pull complete", "Already exists", "Pushed", "Layer already exists", "Mounted from",
)  # fmt: skip
_MOVING: Final = ("Downloading", "Pushing")


class Reason(enum.Enum):
    """Why a pull or push failed."""

    DISK_FULL = enum.auto()
    OTHER_PLATFORM = enum.auto()
    """The registry has the image, but not for this node's platform."""
    UNAUTHORIZED = enum.auto()
    UNREACHABLE = enum.auto()
    NOT_FOUND = enum.auto()
    SILENT = enum.auto()
    UNKNOWN = enum.auto()


_NO_REPORT: Final = "the daemon reported nothing"
_MARKS: Final = (  # the first match counts
    (Reason.SILENT, (_NO_REPORT,)),
    (Reason.DISK_FULL, ("no space left", "disk quota exceeded")),
    (Reason.OTHER_PLATFORM, ("no matching manifest", "does not match the specified platform")),
    (
        Reason.UNAUTHORIZED,
        ("unauthorized", "no basic auth credentials", "authentication required", "denied",
         "authorization failed", "403 forbidden", "insufficient_scope"),
    ),
    (
        Reason.UNREACHABLE,
        ("dial tcp", "connection refused", "connection reset", "no such host", "timeout", "x509",
         "server gave http response", "network is unreachable", "no route to host",
         "request canceled", "failed to do request", "service unavailable", "bad gateway"),
    ),
    (Reason.NOT_FOUND, ("not found", "manifest unknown", "name unknown", "not known")),
)  # fmt: skip


def diagnose(message: str) -> Reason:
    """Return the reason of a failure, given the daemon's message."""
    low = message.lower()
    for failure, marks in _MARKS:
        if any(mark in low for mark in marks):
            return failure
    return Reason.UNKNOWN


class Transfer:
    """The progress of a pull or push, from the daemon's report."""

    def __init__(self) -> None:
        self._statuses: dict[str, str] = {}
        self._sizes: dict[str, tuple[int, int]] = {}

    def feed(self, line: Mapping[str, Any]) -> None:
        """Parse one line of the report."""
        layer, status = str(line.get("id") or ""), str(line.get("status") or "")
        if not layer or status.startswith("Pulling from"):  # the id of that line is the tag
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
        """How many layers are done, and how many there are so far."""
        done = sum(status.startswith(_DONE) for status in self._statuses.values())
        return done, len(self._statuses)

    def __str__(self) -> str:
        transferred = sum(current for current, _ in self._sizes.values())
        total = sum(total for _, total in self._sizes.values())
        done, layers = self.layers
        size = f", {transferred / 1e6:.1f} of {total / 1e6:.1f} MB" if total else ""
        return f"{done} of {layers} layers{size}"


async def pull(client: DockerClient, credentials: Credentials, reference: str) -> None:
    """Pull an image with this node's login for its registry; the progress is logged.

    Cancelling ends the pull.

    Raises:
        SandboxStartFailed: The image does not exist, the registry refuses or cannot be reached, or
            the disk is full.
        FabricUnavailable: The daemon does not answer.
    """
    login = await credentials.login(registry_of(reference))
    logger.warning("pulling image %s", reference)
    loop = asyncio.get_running_loop()
    log_at = loop.time() + _LOG_PROGRESS_S
    transfer = Transfer()

    def on_line() -> None:
        nonlocal log_at
        if loop.time() >= log_at:
            log_at = loop.time() + _LOG_PROGRESS_S
            logger.warning("pulling image %s: %s", reference, transfer)

    params = {"fromImage": reference, **({} if has_tag(reference) else {"tag": "latest"})}
    try:
        await _transfer(client, "/images/create", params, login, transfer, on_line)
    except DaemonRefused as exc:
        raise _pull_failure(reference, exc.message, login, credentials) from exc
    logger.warning("pulled image %s: %s", reference, transfer)


async def push(
    client: DockerClient,
    credentials: Credentials,
    reference: str,
    on_progress: Callable[[Transfer], None],
) -> str:
    """Push one tag of an image.

    Args:
        client: The client of the daemon that has the image.
        credentials: The logins, including the one for the registry.
        reference: ``REGISTRY/NAME:TAG``.
        on_progress: Called with the progress.

    Returns:
        ``REGISTRY/NAME@sha256:…``, by which any node can pull exactly this image.

    Raises:
        Unauthorized: The registry requires a login, or does not accept this node's.
        FabricUnavailable: The registry or the daemon does not answer, or refuses.
    """
    repository, tag = split_tag(reference)
    login = await credentials.login(registry_of(reference))
    transfer, path = Transfer(), f"/images/{repository}/push"
    try:
        digest = await _transfer(
            client, path, {"tag": tag}, login, transfer, lambda: on_progress(transfer)
        )
    except DaemonRefused as exc:
        raise _push_failure(reference, exc.message, login, credentials) from exc
    if not digest:
        raise FabricUnavailable(
            f"{reference} cannot be pushed: the Docker daemon reported no digest",
            hint="push it again",
        )
    return f"{repository}@{digest}"


async def _transfer(
    client: DockerClient,
    path: str,
    params: Mapping[str, str],
    login: Login,
    transfer: Transfer,
    on_line: Callable[[], None],
) -> str:
    """Run a pull or push and return the digest that the daemon reports; "" for none.

    Raises:
        DaemonRefused: It failed; with the daemon's message.
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
                transfer.feed(line)
                on_line()
    except TimeoutError as exc:
        raise DaemonRefused(504, f"{_NO_REPORT} for {SILENCE_S:g} s") from exc
    return digest


def login_hint(reference: str, login: Login, credentials: Credentials) -> str:
    """Return what to do if a registry refuses this node."""
    registry = registry_of(reference)
    if login.problem:
        return f"{login.problem}; fix that, or run `docker login {registry}`"
    return f"run `docker login {registry}` on this node; it writes {credentials.path}"


def _unauthorized(login: Login) -> str:
    if login.auth is None:
        return "it does not exist, or its registry requires a login and this node has none"
    return "it does not exist, or its registry does not accept this node's login"


def pull_trouble(reference: str, error: str) -> str:
    """Return why an image cannot be pulled, in our own words.

    The message of the daemon is not shown: it may quote what a server in a private network answers
    to a publisher who names that server as a registry.
    """
    registry = registry_of(reference)
    return {
        Reason.DISK_FULL: "the disk of the node is full",
        Reason.OTHER_PLATFORM: "there is no image for the node's platform",
        Reason.UNAUTHORIZED: "it does not exist, or its registry refuses the node",
        Reason.UNREACHABLE: f"registry {registry} cannot be reached from the node",
        Reason.NOT_FOUND: "it does not exist",
        Reason.SILENT: f"{_NO_REPORT} for {SILENCE_S:g} s",
        Reason.UNKNOWN: "the node's container engine failed",
    }[diagnose(error)]


def _pull_failure(
    reference: str, error: str, login: Login, credentials: Credentials
) -> SandboxStartFailed:
    why, reason = pull_trouble(reference, error), diagnose(error)
    if reason is Reason.UNAUTHORIZED:
        why = _unauthorized(login)
    hint = {
        Reason.DISK_FULL: "free some space, for example: docker image prune",
        Reason.OTHER_PLATFORM: "build it for this platform: aenv build -p",
        Reason.UNAUTHORIZED: login_hint(reference, login, credentials),
        Reason.UNREACHABLE: "an image that is already on the node needs no registry",
        Reason.NOT_FOUND: f"check its name and tag at {registry_of(reference)}",
    }.get(reason, f"try on this node: docker pull {reference}")
    return SandboxStartFailed(f"image {reference} cannot be pulled: {why}", hint=hint)


def _push_failure(reference: str, error: str, login: Login, credentials: Credentials) -> AenvError:
    message, registry = f"{reference} cannot be pushed", registry_of(reference)
    match diagnose(error):
        case Reason.UNAUTHORIZED:
            refusal = "requires a login" if login.auth is None else "does not accept this login"
            return Unauthorized(
                f"{message}: registry {registry} {refusal} ({error.strip()})",
                hint=login_hint(reference, login, credentials),
            )
        case Reason.UNREACHABLE:
            return FabricUnavailable(
                f"{message}: registry {registry} cannot be reached ({error.strip()})",
                hint="the image was built and is on this node; -r names another registry",
            )
    return FabricUnavailable(
        f"{message}: {error.strip()}", hint="the image is on this node; correct this and push again"
    )
