"""Images on a node: found by reference, pulled if missing, inspected once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.config import settings
from aenv_ray.engines.images import node_python, registry, runtime_bundle
from aenv_ray.engines.images.credentials import Credentials
from aenv_ray.engines.images.reference import is_id, is_valid, may_be_id
from aenv_ray.engines.images.runtime_bundle import ImagePython
from aenv_ray.engines.images.serving import ImageContent
from aenv_ray.engines.node import caches
from aenv_ray.engines.node.container_reports import parse_report
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.engines.node.docker_labels import DEADLINE_LABEL, STORAGE_LABEL
from aenv_ray.engines.node.singleflight import SingleFlight
from aenv_ray.errors import AenvError, ConfigError, SandboxStartFailed
from aenv_ray.files import FileLock, remove_unlocked, write_atomically
from aenv_ray.policy import Policy
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.project.project import builtins

logger = logging.getLogger(__name__)

RUNTIME_LABEL: Final = "aenv.runtime"
"""On images built by ``aenv build``: the fingerprint of their runtime."""
_OUR_LABELS: Final = "aenv."
"""How the names of our labels on containers begin; a daemon copies an image's labels to them."""
BUNDLES: Final = "runtime-bundles"
"""Directory of the cache with the runtimes for containers, see `runtime_bundle`."""
FACTS: Final = "image-facts"
"""Directory of the cache with what was found when images were inspected."""
ARTIFACT_TYPE: Final = "image"
PULL_DEADLINE_S: Final = 3600.0
"""How long a host waits for another one that pulls the same image."""
TOOL_DEADLINE_S: Final = 120.0
"""How long a container may take that inspects an image, or compiles for it."""
_INSPECT: Final = """
import importlib.util, json, platform, sys
print(json.dumps({
    "version": sys.version_info[:2],
    "machine": platform.machine(),
    "libc": "glibc" if platform.libc_ver()[0] == "glibc" else "musl",
    "aenvironment": importlib.util.find_spec("aenv") is not None,
}))
"""
_INSPECT_SHELL: Final = "import json, os; print(json.dumps(os.access('/bin/sh', os.X_OK)))"
_NO_PROGRAM: Final = ("not found", "no such file", "permission denied", "exec format")
"""How daemons report that a program cannot be started."""
_NOBODY: Final = "65534:65534"
_COMPILED: Final = "/aenv-compiled"
_COMPILE: Final = (
    f"import compileall, sys; sys.pycache_prefix = '{_COMPILED}'; "
    "sys.exit(not compileall.compile_dir('/bundle', quiet=1))"
)
_COMPILED_BYTES: Final = 128 << 20
_TOOL_LIMITS: Final = {
    "Memory": 1 << 30, "MemorySwap": 1 << 30, "PidsLimit": 256, "ShmSize": 1 << 20,
    "Ulimits": [{"Name": "fsize", "Soft": 16 << 20, "Hard": 16 << 20}],
    "LogConfig": {"Type": "local", "Config": {"max-size": "1m", "compress": "false"}},
}  # fmt: skip
"""Options of containers that inspect an image: its programs are not to be trusted."""


@dataclass(frozen=True)
class NodeImage:
    """An image on this node."""

    id: str
    """``sha256:…``, by content."""
    user: str
    """``USER``; "" for none."""
    path: str
    """The variable ``PATH``; "" for none."""
    directory: str
    """``WORKDIR``; "" for none."""
    python: ImagePython | None
    """Its ``python3``; None if none starts."""
    content: ImageContent
    names: tuple[str, ...] = ()
    """The image's names on this node, each with a tag or digest."""
    volumes: tuple[str, ...] = ()
    """``VOLUME``: directories that the daemon keeps outside the container's own layer."""


def reference_of(
    config: EnvironmentConfig, default: str | None, *, needs_registry: bool = False
) -> str:
    """Return the image that a project runs in.

    Raises:
        ConfigError: The project names none, and there is no default.
    """
    built = [
        a.digest if a.digest and (not needs_registry or "@" in a.digest) else a.content
        for a in config.artifacts
        if a.type == ARTIFACT_TYPE
    ]
    reference = config.deploy.container.image or (built[0] if built else default)
    if reference is None:
        setting = "AENV_KUBERNETES_IMAGE" if needs_registry else "AENV_DOCKER_IMAGE"
        command = f"aenv build {config.name if config.name in builtins() else 'PATH'}"
        raise ConfigError(
            f"{config.reference} has no image to run in",
            hint=f"build one with `{command}{' --push' if needs_registry else ''}`, set "
            f"deployConfig.container.image, or set {setting} to an image with Python 3.11 or newer",
        )
    return reference


def check_image(policy: Policy, reference: str, what: str) -> None:
    """Check an image that a project names, before anything asks a registry for it.

    An image that was built and not pushed has an id instead of a name, and is never pulled: see
    `check_names`.

    Raises:
        ConfigError: It is not a valid image name.
        PolicyRefused: The policy does not allow it.
    """
    if not is_valid(reference):
        raise ConfigError(
            f"{what}: invalid image {reference[:200]!r}",
            hint="write it as REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:…",
        )
    if not is_id(reference):
        policy.check_image(reference, what)


def check_names(policy: Policy, reference: str, names: Sequence[str], what: str) -> None:
    """Check an image that a project gives by its id, by the names that it has on the node.

    Raises:
        PolicyRefused: The policy allows none of them.
    """
    if may_be_id(reference) and not any(map(policy.allows_image, names)):
        policy.refuse_image_id(reference, what)


def _check_labels(reference: str, labels: Mapping[str, str]) -> None:
    """Check that an image says nothing in our name about its containers.

    Raises:
        SandboxStartFailed: It has labels by which hosts and the janitor recognize containers.
    """
    ours = sorted(name for name in labels if name.startswith(_OUR_LABELS))
    reserved = [name for name in ours if name != RUNTIME_LABEL]
    if reserved:
        raise SandboxStartFailed(
            f"image {reference[:200]} has reserved labels: {', '.join(reserved)[:200]}",
            hint=f"build it without labels that begin with {_OUR_LABELS!r}",
        )


class _CommandFailed(DaemonRefused):
    """A command that inspects an image was started, and failed."""


class DockerImages:
    """The images that one host uses.

    Args:
        client: The client of the node's daemon.
        credentials: Logins for registries.
        own_labels: Labels of containers that inspect an image; the janitor finds them by these.
        cache_dir: Directory of bundles and facts about images; shared by all hosts of the node.
        clock: Wall clock.
    """

    def __init__(
        self,
        client: DockerClient,
        credentials: Credentials,
        own_labels: Mapping[str, str],
        cache_dir: Path,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._credentials = credentials
        self._labels = own_labels
        self._cache_dir = cache_dir
        self._clock = clock or SystemClock()
        self._known: dict[str, NodeImage] = {}
        self._bundles: set[Path] = set()
        """The runtime bundles that this host uses."""
        self._lookups: SingleFlight[NodeImage] = SingleFlight()

    async def find(self, reference: str) -> NodeImage:
        """Return an image; pulls it if it is missing, once for all callers on this node.

        A reference keeps the image that it was resolved to until `forget`.

        Raises:
            SandboxStartFailed: The image does not exist, or cannot be pulled.
            FabricUnavailable: The daemon does not answer.
        """
        if reference not in self._known:
            self._known[reference] = await self._lookups.run(
                reference, lambda: self._resolve(reference)
            )
        return self._known[reference]

    def forget(self) -> None:
        """Resolve every reference again: an image was removed from the node."""
        self._known.clear()

    async def _resolve(self, reference: str) -> NodeImage:
        details = await self._details(reference)
        config = details.get("Config") or {}
        labels = config.get("Labels") or {}
        _check_labels(reference, labels)
        variables = dict(item.partition("=")[::2] for item in config.get("Env") or ())
        facts = await self._facts(details["Id"])
        python = ImagePython.reported(facts) if facts.get("version") else None
        words = [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())]
        content = ImageContent(
            reference=reference,
            python=python.version if python else None,
            has_fitting_python=python is not None and python.version >= runtime_bundle.OLDEST,
            has_shell=facts["shell"],
            has_aenvironment=bool(facts.get("aenvironment")),
            carries_runtime=labels.get(RUNTIME_LABEL) == runtime_bundle.fingerprint(),
            command=tuple(words),
            ports=frozenset(config.get("ExposedPorts") or ()),
        )
        return NodeImage(
            details["Id"], config.get("User") or "", variables.get("PATH", ""),
            config.get("WorkingDir") or "", python, content,
            (*(details.get("RepoTags") or ()), *(details.get("RepoDigests") or ())),
            tuple(config.get("Volumes") or ()),
        )  # fmt: skip

    async def _details(self, reference: str) -> dict[str, Any]:
        path = f"/images/{reference}/json"
        with contextlib.suppress(DaemonRefused):
            return dict(await self._client.request("GET", path))
        name = hashlib.sha256(reference.encode()).hexdigest()[:16]
        locks = self._cache_dir / "pulls"
        await asyncio.to_thread(locks.mkdir, parents=True, exist_ok=True)
        try:
            with await _pull_lock(locks / f"{name}.lock", reference):
                with contextlib.suppress(DaemonRefused):  # pulled by another host of this node
                    return dict(await self._client.request("GET", path))
                if reference.startswith("sha256:"):
                    raise SandboxStartFailed(
                        f"image {reference[:19]} is not on this node, and cannot be pulled by its "
                        "id",
                        hint="it was built on another node: push it with `aenv build --push`",
                    )
                await registry.pull(self._client, self._credentials, reference)
                return dict(await self._client.request("GET", path))
        finally:
            remove_unlocked(locks)  # a publisher may name any number of images

    # --- inspection -------------------------------------------------------------------------

    async def bundle(self, image: NodeImage) -> Path | None:
        """Return the bundle for an image's own Python; None if the image carries the same runtime.

        Raises:
            SandboxStartFailed: The image has no suitable Python, or the bundle cannot be created.
        """
        if image.content.carries_runtime:
            return None
        if image.python is None or not image.content.has_fitting_python:
            raise SandboxStartFailed(
                image.content.lack, hint="base the image on Python 3.11 or newer"
            )

        async def compile_in(bundle: Path) -> None:
            """Let the image compile for itself; it sees the bundle read-only."""
            async with self._tool(
                image.id, ["python3", "-P", "-c", _COMPILE], "0:0", bundle
            ) as name:
                target = f"/containers/{name}/archive"
                archive = await self._client.read(target, {"path": _COMPILED}, _COMPILED_BYTES)
            await asyncio.to_thread(runtime_bundle.add_compiled, bundle, archive)

        bundles = self._cache_dir / BUNDLES
        try:
            bundle = await runtime_bundle.ensure(image.python, bundles, compile_in, image.id)
            if bundle not in self._bundles:
                self._bundles.add(bundle)
                await self._collect_bundles(bundles)
            return bundle
        except DaemonRefused as exc:
            raise SandboxStartFailed(
                f"image {image.content.reference}: {exc.message}",
                hint="check that the image runs: docker run --rm IMAGE true",
            ) from exc

    async def _collect_bundles(self, bundles: Path) -> None:
        """Delete bundles that no container uses, if there are too many.

        Raises:
            ConfigError: A limit is malformed.
            DaemonRefused: The daemon does not list its containers.
        """
        limits = settings().cache_limits
        if not await asyncio.to_thread(caches.exceeds, bundles, *limits):
            return
        containers = await self._client.request("GET", "/containers/json", params={"all": True})
        sources = [m.get("Source") or "" for c in containers for m in c.get("Mounts") or ()]
        used = {Path(source).relative_to(bundles).parts[0] for source in sources
                if Path(source).is_relative_to(bundles)}  # fmt: skip
        await asyncio.to_thread(caches.collect, bundles, *limits, lambda: used)

    async def carried_bundle(self) -> Path:
        """Return the bundle with the node's own Python, for any image.

        Raises:
            SandboxStartFailed: This node's Python cannot be used in an image.
        """
        return await runtime_bundle.carried(self._cache_dir / BUNDLES)

    async def _facts(self, image_id: str) -> dict[str, Any]:
        """Return what `_INSPECT` reports, if the image has a Python, and whether it has a shell."""
        note = self._cache_dir / FACTS / f"{image_id.partition(':')[2]}.json"
        with contextlib.suppress(FileNotFoundError):
            known = dict(json.loads(await asyncio.to_thread(note.read_text)))
            await asyncio.to_thread(caches.note_use, note)
            return known
        facts: dict[str, Any] = {"shell": True}
        try:
            command = ["python3", "-P", "-c", _INSPECT]
            report = parse_report(await self._output(image_id, command))
            python = ImagePython.reported(report)
            facts |= {
                "version": python.version,
                "machine": python.machine,
                "libc": python.libc,
                "aenvironment": report.get("aenvironment") is True,
            }
        except ValueError as exc:
            raise SandboxStartFailed(
                f"the python3 of image {image_id[:19]} is not a Python: {exc}",
                hint="base the image on one with Python 3.11 or newer",
            ) from exc
        except DaemonRefused as exc:
            if not isinstance(exc, _CommandFailed) and not any(
                mark in exc.message.lower() for mark in _NO_PROGRAM
            ):
                raise  # a failure of the daemon says nothing about the image
            logger.info("image %s has no working python3: %s", image_id[:19], exc.message)
            facts["shell"] = await self._has_shell(image_id)
        await asyncio.to_thread(note.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(write_atomically, note, json.dumps(facts))
        await asyncio.to_thread(caches.note_use, note)
        await asyncio.to_thread(caches.collect, note.parent, *settings().cache_limits)
        return facts

    async def _has_shell(self, image_id: str) -> bool:
        bundle = await self.carried_bundle()
        command = [*node_python.command("/bundle/python"), "-c", _INSPECT_SHELL]
        try:
            return bool(json.loads(await self._output(image_id, command, bundle)))
        except DaemonRefused as exc:
            raise SandboxStartFailed(
                f"image {image_id[:19]} cannot run this node's Python: {exc.message}",
                hint="check that it is an image for this node's architecture",
            ) from exc

    async def _output(self, image_id: str, command: list[str], bundle: Path | None = None) -> str:
        """Run a command in the image, as nobody, and return its output."""
        async with self._tool(image_id, command, _NOBODY, bundle) as name:
            return await self._client.log(name, 50)

    @contextlib.asynccontextmanager
    async def _tool(
        self, image_id: str, command: list[str], user: str, bundle: Path | None
    ) -> AsyncIterator[str]:
        """Run a command in the image, without network, and yield its ended container's name.

        Raises:
            _CommandFailed: The command failed.
        """
        name = f"aenv-inspect-{uuid.uuid4().hex[:12]}"
        deadline = self._clock.now() + TOOL_DEADLINE_S
        mount = {"Type": "bind", "Source": str(bundle), "Target": "/bundle", "ReadOnly": True}
        body = {
            "Image": image_id,
            "Entrypoint": command,
            "Cmd": [],
            "User": user,
            "WorkingDir": "/",
            "NetworkDisabled": True,
            "Labels": {
                **self._labels,
                DEADLINE_LABEL: repr(deadline),
                STORAGE_LABEL: str(_COMPILED_BYTES),
            },
            "HostConfig": {
                "NetworkMode": "none", "Mounts": [mount] if bundle else [], "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"], **_TOOL_LIMITS,
            },
        }  # fmt: skip
        try:
            await self._client.request(
                "POST", "/containers/create", params={"name": name}, body=body
            )
            await self._client.request("POST", f"/containers/{name}/start")
            ended = await self._client.request("POST", f"/containers/{name}/wait")
            if ended["StatusCode"]:
                output = await self._client.log(name, 50)
                raise _CommandFailed(500, output or f"exit code {ended['StatusCode']}")
            yield name
        finally:
            with contextlib.suppress(DaemonRefused, AenvError):  # the janitor tries again
                await self._client.request(
                    "DELETE", f"/containers/{name}", params={"force": 1, "v": 1}
                )


async def _pull_lock(path: Path, reference: str) -> FileLock:
    try:
        return await FileLock.acquire_async(path, PULL_DEADLINE_S)
    except TimeoutError as exc:
        raise SandboxStartFailed(
            f"image {reference} was not pulled: another process of this node has been pulling it "
            f"for {PULL_DEADLINE_S:g} s",
            hint=f"look at the daemon, or try on that node: docker pull {reference}",
        ) from exc
