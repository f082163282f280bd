"""What the API server checks of a pod beyond its schema, as the emulated one does.

A schema tells types and fields. That a name is a label of DNS, that a mount has its volume, or that
a request is not above its limit, is looked at by code of the API server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from aenv_ray.cluster import quantities
from tests.emulators.kubernetes.store import Object, Refused

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_QUALIFIED: Final = re.compile(
    r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_VALUE: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_PORT_NAME: Final = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
_VARIABLE: Final = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_ANNOTATIONS_BYTES: Final = 256 * 1024
_LONGEST_S: Final = 2**31 - 1

Problems = Iterator[str]


def check_pod(body: Object) -> None:
    """Refuse a pod that the API server calls invalid.

    Raises:
        Refused: It says all that is.
    """
    problems = [*_of_metadata(body["metadata"]), *_of_spec(body["spec"])]
    if problems:
        name = body["metadata"].get("name", "")
        raise Refused(422, "Invalid", f'Pod "{name}" is invalid: {", ".join(problems)}')


def _of_metadata(metadata: Mapping[str, Any]) -> Problems:
    if "name" in metadata and not _SUBDOMAIN.fullmatch(metadata["name"]):
        yield _invalid("metadata.name", metadata["name"])
    for key, value in (metadata.get("labels") or {}).items():
        if not _QUALIFIED.fullmatch(key):
            yield _invalid("metadata.labels", key)
        if not _VALUE.fullmatch(value):
            yield _invalid("metadata.labels", value)
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        if not _QUALIFIED.fullmatch(key):
            yield _invalid("metadata.annotations", key)
    if sum(len(key) + len(value.encode()) for key, value in annotations.items()) > (
        _ANNOTATIONS_BYTES
    ):
        yield "metadata.annotations: Too long: may not be more than 262144 bytes"
    for reference in metadata.get("ownerReferences") or ():
        for field in ("apiVersion", "kind", "name", "uid"):
            if not reference.get(field):
                yield f"metadata.ownerReferences.{field}: Invalid value: must not be empty"


def _of_spec(spec: Mapping[str, Any]) -> Problems:
    volumes = [volume["name"] for volume in spec.get("volumes") or ()]
    yield from _of_names("spec.volumes", volumes)
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    yield from _of_names("spec.containers", [container["name"] for container in containers])
    for container in containers:
        yield from _of_container(container, volumes)
    if "hostname" in spec and not _LABEL.fullmatch(spec["hostname"]):
        yield _invalid("spec.hostname", spec["hostname"])
    life_s = spec.get("activeDeadlineSeconds")
    if life_s is not None and not 1 <= life_s <= _LONGEST_S:
        yield f"{_invalid('spec.activeDeadlineSeconds', life_s)}: must be between 1 and 2147483647"
    for key, value in (spec.get("nodeSelector") or {}).items():
        if not _QUALIFIED.fullmatch(key) or not _VALUE.fullmatch(value):
            yield _invalid("spec.nodeSelector", f"{key}={value}")


def _of_names(field: str, names: Sequence[str]) -> Problems:
    for name in names:
        if not _LABEL.fullmatch(name):
            yield _invalid(f"{field}.name", name)
    for name in {name for name in names if names.count(name) > 1}:
        yield f'{field}.name: Duplicate value: "{name}"'


def _of_container(container: Mapping[str, Any], volumes: Sequence[str]) -> Problems:
    at = f"spec.containers[{container['name']}]"
    image = container.get("image") or ""
    if not image or image != image.strip():
        yield _invalid(f"{at}.image", image)
    for entry in container.get("env") or ():
        if not _VARIABLE.fullmatch(entry["name"]):
            yield _invalid(f"{at}.env.name", entry["name"])
    ports = [port.get("name", "") for port in container.get("ports") or ()]
    for name in filter(None, ports):
        if not _PORT_NAME.fullmatch(name):
            yield _invalid(f"{at}.ports.name", name)
    paths = [mount["mountPath"] for mount in container.get("volumeMounts") or ()]
    for mount in container.get("volumeMounts") or ():
        if mount["name"] not in volumes:
            yield f'{at}.volumeMounts.name: Not found: "{mount["name"]}"'
        if paths.count(mount["mountPath"]) > 1:
            yield f"{_invalid(f'{at}.volumeMounts.mountPath', mount['mountPath'])}: must be unique"
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    for name, amount in (resources.get("requests") or {}).items():
        if name in limits and quantities.parse(amount) > quantities.parse(limits[name]):
            yield f"{_invalid(f'{at}.resources.requests', amount)}: must be at most {name} limit"
    security = container.get("securityContext") or {}
    if security.get("privileged") and security.get("allowPrivilegeEscalation") is False:
        yield f"{at}.securityContext: Invalid value: cannot be privileged without escalation"


def _invalid(field: str, value: object) -> str:
    return f'{field}: Invalid value: "{value}"'
