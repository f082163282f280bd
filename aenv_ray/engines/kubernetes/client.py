"""A client of the Kubernetes API that exchanges JSON and honours the API's limits.

The ``kubernetes`` package provides connections, certificates and tokens. Its models are not used,
because they take more time than the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

import aiohttp

from aenv_ray.addresses import retry_after_s
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.errors import ConfigError, FabricUnavailable

NAMESPACE_FILE: Final = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_VERBS: Final = {
    "create": "POST", "get": "GET", "list": "GET", "watch": "GET", "patch": "PATCH",
    "delete": "DELETE",
}  # fmt: skip
_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_REQUEST_S: Final = 30.0
_TRY_S: Final = 60.0
"""How long a request is retried while the API is overloaded."""
_PAUSES_S: Final = (0.2, 0.4, 0.8, 1.6, 3.2, 5.0)
"""Between tries, unless the API asks for another delay."""
_RETRIED: Final = frozenset({429, 500, 502, 503, 504})
WATCH_S: Final = 300
"""The longest watch; then a new one begins."""
_SILENCE_S: Final = 90.0
"""A watch on which nothing comes for so long has broken. The API sends a bookmark every minute."""
_CONNECTIONS: Final = 32


class ApiRefused(Exception):
    """The API answered a request with an error."""

    def __init__(self, access: Access, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.access = access
        self.status = status
        self.reason = reason
        self.message = message


class KubernetesClient:
    """One host's connection to the API.

    Args:
        namespace: The namespace of all requests. None: this pod's, or that of the kube config's
            context.
        configuration: For ``kubernetes.aio``. None: this pod's service account, or a kube config.
    """

    def __init__(self, namespace: str | None = None, configuration: Any = None) -> None:
        self._namespace = namespace
        self._configuration = configuration
        self._resumes_at = 0.0
        """Until when the API has asked for no requests, on the loop's clock."""
        self._fails_at = math.inf
        """When requests fail because the API has long been overloaded; infinite: it is not."""
        self._problem = ""
        """What the API last answered to a request that is repeated."""
        self._api: Any = None

    @property
    def namespace(self) -> str:
        """The namespace of all requests; valid once the client is open."""
        return self._namespace or "default"

    async def open(self) -> None:
        """Read the connection settings; does nothing if the client is open.

        Raises:
            ConfigError: The ``kubernetes`` package is not installed.
            FabricUnavailable: There is neither a service account nor a kube config.
        """
        if self._api is not None:
            return
        try:
            from kubernetes.aio import client, config
        except ImportError as exc:
            raise ConfigError(
                "the kubernetes engine needs the package `kubernetes`",
                hint="install it: pip install 'aenv-ray[kubernetes]'",
            ) from exc
        configuration = self._configuration
        if configuration is None:
            configuration = client.Configuration()
            try:
                config.load_incluster_config(configuration)
                self._namespace = self._namespace or _own_namespace()
            except config.ConfigException as outside:
                try:
                    await config.load_kube_config(client_configuration=configuration)
                except (config.ConfigException, OSError) as exc:
                    raise FabricUnavailable(
                        f"this process has no access to a Kubernetes API: {outside}",
                        hint="run hosts in pods with a service account, as clusters/kuberay does, "
                        "or choose another engine",
                    ) from exc
        configuration.connection_pool_maxsize = _CONNECTIONS
        configuration.retries = False  # this class retries
        self._api = client.ApiClient(configuration)

    async def close(self) -> None:
        """Disconnect."""
        api, self._api = self._api, None
        if api is not None:
            await api.close()

    async def request(
        self,
        access: Access,
        name: str = "",
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
    ) -> dict[str, Any]:
        """Make a request, retrying while the API is overloaded or unreachable.

        A delay that the API asks for applies to all requests of this client. Once the API has
        answered none of them for a minute, further ones fail until that delay has passed.

        Args:
            access: The kind of request.
            name: The object's name, for a request about one object.
            query: Query parameters.
            body: JSON data; for a patch, a merge patch.

        Raises:
            ApiRefused: The API refuses the request.
            FabricUnavailable: The API stayed overloaded or unreachable.

        A retried create may find its own object and be refused with ``AlreadyExists``.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + _TRY_S
        pauses = itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1]))
        while True:
            wait = self._resumes_at - loop.time()
            if wait <= 0:
                status, headers, data = await self._answer(access, name, query, body)
                if status and status not in _RETRIED:
                    self._fails_at = math.inf
                    if status < 300:
                        return dict(data)
                    if not _is_race(access, status, data):
                        raise _refusal(access, status, data)
                elif self._fails_at == math.inf:
                    self._fails_at = loop.time() + _TRY_S
                self._problem = str(data.get("message") or f"it answers {status}")
                wait = next(pauses)
                if asked := retry_after_s(headers, default=0.0):
                    self._resumes_at, wait = loop.time() + asked, asked
            if loop.time() + wait > min(end, self._fails_at):
                raise FabricUnavailable(
                    f"the Kubernetes API did not {access.value.verb} {access.value.resource} "
                    f"within {_TRY_S:g} s: {self._problem}",
                    hint="look at the API server's load, and its priority and fairness settings",
                )
            await asyncio.sleep(wait * random.uniform(1.0, 1.25))

    async def _answer(
        self, access: Access, name: str, query: Mapping[str, str] | None, body: Any
    ) -> tuple[int, Mapping[str, str], dict[str, Any]]:
        """Return status, headers and data of an answer; status 0 if the API is unreachable."""
        try:
            status, headers, data = await self._once(access, name, query, body)
        except (aiohttp.ClientError, OSError) as exc:
            return 0, {}, {"message": f"it is unreachable ({exc})"}
        if status in _RETRIED:
            data = {
                **data,
                "message": f"it answers {status}: {data.get('message') or 'no message'}",
            }
        return status, headers, data

    async def find(self, access: Access, name: str) -> dict[str, Any] | None:
        """Return an object, or None if it does not exist; raises as `request`."""
        try:
            return await self.request(access, name)
        except ApiRefused as exc:
            if exc.status == 404:
                return None
            raise

    async def may(self, access: Access) -> bool:
        """Return whether this service account has a permission; asking needs none.

        Raises:
            ApiRefused: The API does not accept the service account.
            FabricUnavailable: The API cannot be reached.
        """
        await self.open()
        wanted = {
            "verb": access.verb,
            "resource": access.resource,
            "group": access.group,
            "namespace": self.namespace,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        }
        limit = aiohttp.ClientTimeout(total=_REQUEST_S)
        try:
            response = await self._call("POST", _REVIEWS, limit, body=review)
            data = await response.read()
        except (aiohttp.ClientError, OSError) as exc:
            raise FabricUnavailable(
                f"the Kubernetes API cannot be reached: {exc}",
                hint="check it with: kubectl get pods",
            ) from exc
        answer = _status_of(data)
        if response.status >= 300:
            raise _refusal(access, response.status, answer)
        return bool(answer["status"]["allowed"])

    async def _once(
        self, access: Access, name: str, query: Mapping[str, str] | None, body: Any
    ) -> tuple[int, Mapping[str, str], dict[str, Any]]:
        try:
            limit = aiohttp.ClientTimeout(total=_REQUEST_S)
            response = await self._send(access, name, query, body, limit)
            data = await response.read()
        except TimeoutError as exc:
            raise OSError(f"no answer in {_REQUEST_S:g} s") from exc
        try:
            decoded = json.loads(data) if data else {}
        except ValueError:  # the answer of a proxy
            decoded = {"message": data[:500].decode(errors="replace")}
        return response.status, response.headers, decoded

    async def _send(
        self,
        access: Access,
        name: str,
        query: Mapping[str, str] | None,
        body: Any,
        limit: aiohttp.ClientTimeout,
    ) -> Any:
        await self.open()
        permission = access.value
        root = f"apis/{permission.group}/v1" if permission.group else "api/v1"
        path = f"/{root}/namespaces/{self.namespace}/{permission.resource}"
        kind = "merge-patch+json" if permission.verb == "patch" else "json"
        return await self._call(
            _VERBS[permission.verb], f"{path}/{name}" if name else path, limit,
            query=query, body=body, content_type=f"application/{kind}",
        )  # fmt: skip

    async def _call(
        self,
        method: str,
        path: str,
        limit: aiohttp.ClientTimeout,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        method, url, headers, body, form = await self._api.param_serialize(
            method, path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )  # fmt: skip
        return await self._api.rest_client.request(
            method, url, headers=headers, body=body, post_params=form, _request_timeout=limit
        )

    @contextlib.asynccontextmanager
    async def watch(
        self, access: Access, query: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Yield the events of a watch, until it ends.

        Raises:
            ApiRefused: The API refuses it, with status 410 if the version is too old.
            FabricUnavailable: The API is unreachable, or the connection broke.
        """
        watch = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=_REQUEST_S, sock_read=_SILENCE_S)
        try:
            response = await self._send(access, "", {**query, **watch}, None, limit)
            try:
                if response.status >= 300:
                    data = await response.read()
                    raise _refusal(access, response.status, _status_of(data))
                async with contextlib.aclosing(_events(access, response.response)) as events:
                    yield events
            finally:
                response.response.close()
        except (aiohttp.ClientError, OSError) as exc:
            raise FabricUnavailable(
                f"the watch of the Kubernetes API broke: {exc}",
                hint="it is opened again; if this repeats, check the API with: kubectl get pods",
            ) from exc


async def _events(access: Access, response: Any) -> AsyncGenerator[dict[str, Any], None]:
    buffer = b""
    async for piece, _ in response.content.iter_chunks():
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in filter(None, lines):
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise _refusal(access, int(event["object"].get("code") or 500), event["object"])
            yield event


def _is_race(access: Access, status: int, data: Mapping[str, Any]) -> bool:
    """Return whether a create lost a race, as concurrent creates under a ResourceQuota do."""
    return access.value.verb == "create" and status == 409 and data.get("reason") == "Conflict"


def _refusal(access: Access, status: int, data: Mapping[str, Any]) -> ApiRefused:
    message = str(data.get("message") or f"HTTP status {status}")
    return ApiRefused(access, status, str(data.get("reason") or ""), message)


def _status_of(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except ValueError:
        return {"message": data[:500].decode(errors="replace")}


def _own_namespace() -> str | None:
    with contextlib.suppress(OSError), open(NAMESPACE_FILE) as file:
        return file.read().strip() or None
    return None
