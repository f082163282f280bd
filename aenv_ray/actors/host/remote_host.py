"""The interface of a host actor that the controller and drivers use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from aenv_ray.actors.calls.call_batching import BatchAnswer, Begin
from aenv_ray.ids import InstanceId

if TYPE_CHECKING:
    from ray import ObjectRef

    from aenv_ray.actors.host.pool import WarmRequest
    from aenv_ray.project.storage import StorageMount

P = ParamSpec("P")
R = TypeVar("R")


class HostMethod(Protocol[P, R]):
    """A method of an actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Send the call without waiting for its result."""


class RemoteHost(Protocol):
    """The methods of `aenv_ray.actors.host.host_actor` that place and start instances."""

    @property
    def start(self) -> HostMethod[[bytes, str], bytes]:
        """Start instances, and introduce a caller in that session and node to them.

        See `start_messages` for the encoding.
        """

    @property
    def claim(self) -> HostMethod[[InstanceId], None]:
        """Keep a spare host for an instance."""

    @property
    def prepare(self) -> HostMethod[[str], None]:
        """Load an engine, so that the first start need not."""

    @property
    def has_project(self) -> HostMethod[[str], bool]:
        """Return whether the node has the project with this digest."""

    @property
    def put_project(self) -> HostMethod[[str, bytes], None]:
        """Store the archive of the project with this digest on the node."""

    @property
    def warm(self) -> HostMethod[[WarmRequest, float | None], int]:
        """Keep sandboxes ready; return how many are, after waiting for some seconds."""

    @property
    def delete_storage(self) -> HostMethod[[str, StorageMount], None]:
        """Delete the data of a storage volume of an engine."""

    @property
    def engines(self) -> HostMethod[[], tuple[str, ...]]:
        """Return the engines that the node can run, the preferred one first."""

    @property
    def load(self) -> HostMethod[[], tuple[int, int]]:
        """Return how many slots are taken, and how many there are."""

    @property
    def hold(self) -> HostMethod[[float], None]:
        """Accept only instances with a reservation, for some seconds; 0: accept all again."""

    @property
    def reserve(self) -> HostMethod[[Sequence[InstanceId], float, int], bool]:
        """Reserve slots for instances for some seconds; False if there are too few."""

    @property
    def release(self) -> HostMethod[[Sequence[InstanceId]], Sequence[InstanceId]]:
        """End instances; return the ids that the host knew."""

    @property
    def exchange(self) -> HostMethod[[list[Begin], list[str], list[str]], list[BatchAnswer]]:
        """Make calls in batches; see `BatchServer.exchange`."""
