"""What a pod needs of its cluster: owner, image and what that lacks, network, nodes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque

from aenv_ray.engines.base import SandboxSpec, check_os
from aenv_ray.engines.images import serving as docker_serving
from aenv_ray.engines.images.node_images import ARTIFACT_TYPE
from aenv_ray.engines.images.serving import Serving
from aenv_ray.engines.kubernetes import names
from aenv_ray.engines.kubernetes.claims import Claims
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.namespace import Owner, Place
from aenv_ray.engines.kubernetes.network import Policies, network_mode
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.engines.kubernetes.spec import Surroundings
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.ids import HostId
from aenv_ray.project.config import EnvironmentConfig

logger = logging.getLogger(__name__)

_RAY_CONTAINERS = ("ray-worker", "ray-head")
_NODES = 8


def image_of(config: EnvironmentConfig, default: str | None) -> str:
    """Return which image a project runs in; by digest, where a registry has it by that.

    Raises:
        ConfigError: It names none, and there is no default.
    """
    built = [
        artifact.digest if "@" in artifact.digest else artifact.content
        for artifact in config.artifacts
        if artifact.type == ARTIFACT_TYPE
    ]
    reference = config.deploy.container.image or (built[0] if built else default)
    if reference is None:
        raise ConfigError(
            f"{config.reference} has no image to run in",
            hint="build and push one with `aenv build --push`, name one as "
            "deployConfig.container.image, or set AENV_KUBERNETES_IMAGE to one with Python 3.11 "
            "or newer",
        )
    return reference


async def find_owner(client: KubernetesClient, place: Place) -> tuple[Owner, str]:
    """Return the pod that this process runs in, and the image of its Ray.

    Raises:
        FabricUnavailable: This is no pod of the namespace.
        ApiRefused: The API does not show it.
    """
    name = place.pod_name or socket.gethostname()
    try:
        pod = await client.request(Access.GET_POD, name)
    except ApiRefused as exc:
        if exc.status != 404:
            raise
        raise FabricUnavailable(
            f"namespace {client.namespace} has no pod {name}, which this host would run "
            "in: nothing would end its instances with it",
            hint="run Ray in pods, and give them POD_NAME and POD_NAMESPACE by the downward "
            "API, as clusters/kuberay does",
        ) from exc
    containers = {c["name"]: c["image"] for c in pod["spec"]["containers"]}
    ray = next((n for n in _RAY_CONTAINERS if n in containers), next(iter(containers)))
    return Owner(name, pod["metadata"]["uid"]), containers[ray]


class Planner:
    """Finds, once each, what the pods of a host share.

    Args:
        client: Of the API.
        place: What the cluster's operator set.
        host_id: Whose pods they are.
    """

    def __init__(self, client: KubernetesClient, place: Place, host_id: HostId) -> None:
        self._client = client
        self._place = place
        self._host_id = host_id
        self._policies = Policies(client)
        self.claims = Claims(client, place.storage_class)
        self._lacks: dict[str, str] = {}
        self._nodes: dict[str, deque[str]] = {}
        self._owner: Owner | None = None
        self._own_image = ""

    @property
    def owner(self) -> Owner:
        """The pod that this host runs in.

        Raises:
            FabricUnavailable: It is not known yet.
        """
        if self._owner is None:
            raise FabricUnavailable("the kubernetes engine is not connected")
        return self._owner

    async def learn(self) -> Owner:
        """Find the pod that this host runs in, and its image.

        Raises:
            FabricUnavailable: This is no pod of the namespace.
            ApiRefused: The API does not show it.
        """
        self._owner, self._own_image = await find_owner(self._client, self._place)
        return self._owner

    def note_image(self, image: str, node: str) -> None:
        """Note that a node has an image now: further pods of it prefer that node."""
        nodes = self._nodes.setdefault(image, deque(maxlen=_NODES))
        if node and node not in nodes:
            nodes.append(node)

    async def surroundings(
        self, spec: SandboxSpec, name: str, nonce: str, secret_digest: str, lack: str
    ) -> Surroundings:
        """Return what a pod gets that its spec does not say.

        Args:
            spec: The instance's.
            name: The pod's.
            nonce: The pod's.
            secret_digest: Of what opens its first connection.
            lack: What its image turned out to lack, in words; "" for nothing.

        Raises:
            ConfigError: The project asks for what no pod has.
            FabricUnavailable: The API does not answer, or the instance's storage is gone.
            ApiRefused: The API refuses a claim.
        """
        deploy = spec.config.deploy
        check_os(spec.config, "linux", "the cluster")
        mode = network_mode(spec.config)
        image = image_of(spec.config, self._place.image)
        code = await asyncio.to_thread(docker_serving.has_code, spec.project_dir)
        if lack:
            self._lacks[image] = lack
        lack = self._lacks.get(image, "")
        asked = Serving(deploy.container.door) if deploy.container.door else None
        if asked is Serving.RUNTIME and lack:
            raise ConfigError(lack, hint="base the image on Python 3.11 or newer")
        serving = asked or (Serving.COMMANDS if lack else Serving.RUNTIME)
        absence = ""
        if serving is Serving.COMMANDS:
            absence = _absence(lack, code=code)
            if code:
                logger.warning("%s: no tools: %s", spec.instance_id, absence)
        second = ""
        if deploy.is_dual:
            second = docker_serving.sidecar_image(spec.config.reference, deploy, spec.datasource)
        if spec.storage is not None:
            await self.claims.ensure(spec.storage)
        carrier = self._place.carrier_image or self._own_image
        labels = names.labels(self.owner.uid, self._host_id, mode)
        return Surroundings(
            name=name,
            host_id=self._host_id,
            owner=self.owner,
            place=self._place,
            nonce=nonce,
            secret_digest=secret_digest,
            image=image,
            serving=serving,
            absence=absence,
            second_image=second,
            carrier_image=carrier if second or serving is not Serving.RUNTIME else "",
            network=mode,
            is_network_kept=await self._policies.keep(labels),
            nodes=tuple(self._nodes.get(image, ())),
        )


def _absence(lack: str, *, code: bool) -> str:
    if not code:
        return "the project has no code; it has commands and files only"
    if not lack:
        return "the project asks for commands and files only"
    return f"{lack}; commands and files work"
