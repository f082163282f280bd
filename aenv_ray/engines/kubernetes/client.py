"""Requests to the Kubernetes API, as JSON: one way in, which honours the API's limits.

Connection, certificates and tokens are those of the ``kubernetes`` package; its models are not
used, for they cost more than the requests do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

import aiohttp

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
"""How long a request is tried again that the API had no time for."""
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
WATCH_S: Final = 300
"""A watch is begun anew after this long."""
_CONNECTIONS: Final = 32


class ApiRefused(Exception):
    """The API answered a request with an error.

    Args:
        access: What was asked for.
        status: Of HTTP.
        reason: Kubernetes' own word, for example ``AlreadyExists``.
        message: For people.
    """

    def __init__(self, access: Access, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.access = access
        self.status = status
        self.reason = reason
        self.message = message


class KubernetesClient:
    """One host's connection to the API.

    Args:
        namespace: Of all requests. None: that of this pod, or of the kube config's context.
        configuration: Of ``kubernetes.aio``. None: this pod's service account, or a kube config.
    """

    def __init__(self, namespace: str | None = None, configuration: Any = None) -> None:
        self._namespace = namespace
        self._configuration = configuration
        self._api: Any = None

    @property
    def namespace(self) -> str:
        """Where requests are made; known once it is open."""
        return self._namespace or "default"

    async def open(self) -> None:
        """Read how to reach the API; does nothing later on.

        Raises:
            ConfigError: The ``kubernetes`` package is not installed.
            FabricUnavailable: This is no pod with a service account, and there is no kube config.
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
                        f"there is no Kubernetes here: {outside}",
                        hint="run hosts in pods with a service account, as clusters/kuberay does",
                    ) from exc
        configuration.connection_pool_maxsize = _CONNECTIONS
        configuration.retries = False  # one layer tries again: this one
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
        """Make one request, again where the API asks for that or cannot be reached for a moment.

        Args:
            access: What it is; `kubernetes_access` names what that takes.
            name: Of the object, where it is about one.
            query: Parameters.
            body: JSON data; of a patch, a merge patch.

        Raises:
            ApiRefused: The API refuses it.
            FabricUnavailable: It cannot be reached, or has no time for long.

        A create that is tried again may find its own object there: that is ``AlreadyExists``.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + _TRY_S
        pause = _FIRST_PAUSE_S
        while True:
            try:
                status, headers, data = await self._once(access, name, query, body)
            except (aiohttp.ClientError, OSError) as exc:
                problem, wait = f"it cannot be reached ({exc})", pause
            else:
                if status < 300:
                    return dict(data)
                if status not in _AGAIN and not _is_race(access, status, data):
                    raise _refusal(access, status, data)
                problem = f"it answers {status}: {data.get('message') or 'nothing'}"
                wait = _seconds(headers.get("Retry-After")) or pause
            if loop.time() + wait > end:
                raise FabricUnavailable(
                    f"the Kubernetes API does not {access.value.verb} {access.value.resource}: "
                    f"{problem}, for {_TRY_S:g} s",
                    hint="look at the API server's load, and its priority and fairness settings",
                )
            await asyncio.sleep(wait * random.uniform(1.0, 1.25))
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def may(self, access: Access) -> bool:
        """Return whether this service account has a permission; everybody may ask for his own.

        Raises:
            ApiRefused: The API does not know the service account.
            FabricUnavailable: The API cannot be reached.
        """
        await self.open()
        verb, resource, group = access.value
        wanted = {"verb": verb, "resource": resource, "group": group, "namespace": self.namespace}
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
            raise FabricUnavailable(f"the Kubernetes API cannot be reached: {exc}") from exc
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
        except ValueError:  # a proxy's own words
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
            ApiRefused: The API refuses it; status 410 when the version is too old.
            FabricUnavailable: It cannot be reached, or the connection broke.
        """
        watch = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        limit = aiohttp.ClientTimeout(
            total=None, sock_connect=_REQUEST_S, sock_read=WATCH_S + _REQUEST_S
        )
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
            raise FabricUnavailable(f"the watch of the Kubernetes API broke: {exc}") from exc


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
    """Whether a create lost against others, as many at a time do over one ResourceQuota."""
    return access.value.verb == "create" and status == 409 and data.get("reason") == "Conflict"


def _refusal(access: Access, status: int, data: Mapping[str, Any]) -> ApiRefused:
    message = str(data.get("message") or f"HTTP status {status}")
    return ApiRefused(access, status, str(data.get("reason") or ""), message)


def _status_of(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except ValueError:
        return {"message": data[:500].decode(errors="replace")}


def _seconds(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:  # a date: the pause of our own will do
        return None


def _own_namespace() -> str | None:
    with contextlib.suppress(OSError), open(NAMESPACE_FILE) as file:
        return file.read().strip() or None
    return None
