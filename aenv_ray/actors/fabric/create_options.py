"""The optional arguments of a create."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aenv_ray import ids, units
from aenv_ray.actors.fabric.engine_choice import WITH_CONTAINERS, possible_engines
from aenv_ray.errors import ConfigError
from aenv_ray.models import ActorDensity, InstanceSpec, Lifetime
from aenv_ray.policy import Policy
from aenv_ray.project import process_strings, project
from aenv_ray.project.config import DeployChanges
from aenv_ray.project.storage import StorageMount
from aenv_ray.runtime.door.dispatch import SEED_VARIABLE

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    Near: TypeAlias = str | ActorHandle[Any]
    """The id of a Ray node, ``"me"`` for the caller's node, or an actor for its node."""

logger = logging.getLogger("aenv_ray")

QUEUE_S: Final = 300.0
"""Default wait for room in a full cluster: a new node takes minutes to join."""

RESERVED_LABELS: Final = "aenv."
"""Beginning of the labels by which the fabric knows sandboxes of services and inner instances."""

_NODE_ID: Final = re.compile("[0-9a-f]{56}")

_warned: set[str] = set()
"""Digests of the projects that `_warn_of_open_network` has named."""


@dataclass(frozen=True)
class OwnOptions:
    """Options of one instance that replace those of its batch."""

    datasource: str = ""
    """Datasource of the instance; "": the datasource of the batch."""
    changes: DeployChanges | None = None
    """Changes that are added to those of the batch."""

    def given_to(self, spec: InstanceSpec) -> InstanceSpec:
        """Return the spec of an instance with these options."""
        update: dict[str, Any] = {"datasource": self.datasource} if self.datasource else {}
        if self.changes is not None:
            own = self.changes.model_dump(exclude_none=True)
            shared = spec.changes.model_dump(exclude_none=True) if spec.changes else {}
            update["changes"] = DeployChanges.model_validate(shared | own)
            if self.changes.image and spec.engines:
                able = (name for name in spec.engines if name in WITH_CONTAINERS)
                engines = tuple(able) or WITH_CONTAINERS  # if the policy allows none: refused later
                update |= {"engine": engines[0], "engines": engines}
        return spec.model_copy(update=update)


class CreateOptions:
    """The optional arguments of a create, parsed and checked.

    Attributes:
        labels: Those of the caller, and those that the fabric itself sets.
        near: The preferred place of the instances, as in `aenv_ray.create`.
        near_node: The node of `near`, as for `InstanceSpec`; set before `specs`.
    """

    def __init__(  # noqa: PLR0913  # one for each option of `create`
        self,
        *,
        actor: str = "dedicated",
        lifetime: str = "job",
        ttl: str | float | None = None,
        idle_timeout: str | float | None = None,
        engine: str | None = None,
        environment_variables: Mapping[str, str] | None = None,
        arguments: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        fabric_labels: Mapping[str, str] | None = None,
        owner: str | None = None,
        datasource: str = "",
        queue_timeout: str | float = QUEUE_S,
        near: Near | None = None,
        changes: DeployChanges | None = None,
        storage: StorageMount | None = None,
        node_ids: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        self.actor = _member(ActorDensity, actor, "actor")
        self.lifetime = _member(Lifetime, lifetime, "lifetime")
        self.ttl = None if ttl == "" else ttl  # AEnvironment's clients send "" for None
        self.idle_timeout = None if idle_timeout == "" else idle_timeout
        self.engine = engine
        self.environment_variables = _strings(environment_variables, "environment_variables")
        if seed is not None:
            self.environment_variables |= {SEED_VARIABLE: str(_seed(seed))}
        process_strings.checked_variables(self.environment_variables, what="environment_variables")
        self.arguments = _texts(arguments, "arguments")
        process_strings.check_total((len(text.encode()) for text in self.arguments), "arguments")
        self.labels = _free_labels(labels) | dict(fabric_labels or {})
        self.owner = None if owner is None else _text(owner, "owner")
        self.datasource = _text(datasource, "datasource")
        self.changes = changes
        self.storage = storage
        self.node_ids = tuple(node_ids)
        self.near = near
        if near is not None:
            _check_near(near)
        self.near_node = ""
        is_none = queue_timeout == 0 and not isinstance(queue_timeout, bool)
        self.queue_s = (
            0.0 if is_none else units.parse_duration_s(queue_timeout, what="queue_timeout")
        )

    def specs(
        self, source: project.Project, count: int, *, job_id: str | None, policy: Policy
    ) -> list[InstanceSpec]:
        """Return the specs of `count` new instances of a project.

        Unless they are detached, the instances end with the Ray job `job_id`. Of the policy, only
        what it says of engines that nobody named is applied.

        Raises:
            ConfigError: The TTL, idle timeout or engine is invalid.
        """
        _warn_of_open_network(source)
        engines = possible_engines(source, policy, self.engine, self.changes)
        deploy = source.config.deploy
        ttl = deploy.ttl if self.ttl is None else self.ttl
        ttl_s = units.DEFAULT_TTL_S if ttl is None else units.parse_duration_s(ttl, what="ttl")
        idle = deploy.idle_timeout if self.idle_timeout is None else self.idle_timeout
        return [
            InstanceSpec(
                instance_id=ids.new_instance_id(source.config.name),
                reference=source.reference,
                digest=source.digest,
                ttl_s=ttl_s,
                idle_timeout_s=None
                if idle is None
                else units.parse_duration_s(idle, what="idle timeout"),
                environment_variables=self.environment_variables,
                arguments=self.arguments,
                labels=self.labels,
                owner=self.owner,
                datasource=self.datasource,
                engine=engines.names[0],
                engines=() if engines.is_fixed else engines.names,
                job_id=None if self.lifetime is Lifetime.DETACHED else job_id,
                changes=self.changes,
                storage=self.storage,
                node_ids=self.node_ids,
                near_node=self.near_node,
                places=1 + deploy.inner_limit,
            )
            for _ in range(count)
        ]


def _seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed {seed!r} is not an integer", hint="pass an int, or None")
    return seed


def _warn_of_open_network(source: project.Project) -> None:
    """Log once that a project names no network, so that its instances can reach Ray."""
    if source.config.deploy.network is None and source.digest not in _warned:
        _warned.add(source.digest)
        logger.warning(
            "%s names no deployConfig.network: its instances use the node's network and can "
            'reach Ray; write "network": "none" unless its tools need more',
            source.reference,
        )


def group_size(count: Any) -> int:
    """Return the number of instances of a group.

    Raises:
        ConfigError: It is not an integer, or less than 1.
    """
    is_integer = not isinstance(count, bool) and hasattr(count, "__index__")
    if not is_integer or operator.index(count) < 1:
        why = "is less than 1" if is_integer else "is not an integer"
        raise ConfigError(f"count {count!r} {why}", hint="pass the number of instances, at least 1")
    return operator.index(count)


def _member(kind: Any, value: str, what: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"unknown {what} {value!r}", hint=f"use one of {known}") from None


def _check_near(near: Near) -> None:
    is_node = isinstance(near, str) and (near == "me" or _NODE_ID.fullmatch(near) is not None)
    if not is_node and not hasattr(near, "_actor_id"):
        raise ConfigError(
            f"near={near!r} is neither a node nor an actor",
            hint='pass the id of a Ray node, "me" for this node, or the handle of an actor',
        )


def _strings(values: Mapping[Any, Any] | None, what: str) -> dict[str, str]:
    if not isinstance(values, Mapping | None):
        raise ConfigError(
            f"{what} must be a mapping of strings to strings, not {type(values).__name__}",
            hint='pass a dict such as {"NAME": "value"}',
        )
    return {
        _text(key, f"a key of {what}"): _text(value, f"{what}[{key!r}]")
        for key, value in (values or {}).items()
    }


def _free_labels(labels: Mapping[Any, Any] | None) -> dict[str, str]:
    checked = _strings(labels, "labels")
    for name in checked:
        if name.startswith(RESERVED_LABELS):
            raise ConfigError(
                f"label {name[:200]!r} is reserved for aenv-ray",
                hint=f"choose a name that does not start with {RESERVED_LABELS!r}",
            )
    return checked


def _texts(values: Sequence[Any] | None, what: str) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence | None):
        raise ConfigError(f"{what} {values!r} is not a list of strings", hint="pass a list")
    return tuple(_text(value, f"{what}[{n}]") for n, value in enumerate(values or ()))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            f"{what} must be a string, not {type(value).__name__}",
            hint="convert it with str(), or leave it out",
        )
    process_strings.check_text(value, what)
    return value
