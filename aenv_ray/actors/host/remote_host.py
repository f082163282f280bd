"""A host actor as the controller and drivers see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from aenv_ray.actors.calls.call_batching import Answer, Begin
from aenv_ray.ids import InstanceId

if TYPE_CHECKING:
    from ray import ObjectRef

P = ParamSpec("P")
R = TypeVar("R")


class RemoteMethod(Protocol[P, R]):
    """A method of an actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Send the call without waiting for its result."""


class RemoteHost(Protocol):
    """The methods of `aenv_ray.actors.host.host_actor` that place and start instances."""

    @property
    def start(self) -> RemoteMethod[[bytes], bytes]:
        """Start instances; see `start_messages` for the encoding."""

    @property
    def start_introduced(self) -> RemoteMethod[[bytes, str], bytes]:
        """Start instances and introduce a caller in that session and node to them."""

    @property
    def claim(self) -> RemoteMethod[[InstanceId], None]:
        """Keep a spare host for an instance."""

    @property
    def prepare(self) -> RemoteMethod[[str], None]:
        """Load an engine, so that the first start need not."""

    @property
    def has_project(self) -> RemoteMethod[[str], bool]:
        """Return whether the node has the project with this digest."""

    @property
    def put_project(self) -> RemoteMethod[[str, bytes], None]:
        """Store the archive of the project with this digest on the node."""

    @property
    def load(self) -> RemoteMethod[[], tuple[int, int]]:
        """Return how many places are taken, and how many there are."""

    @property
    def hold(self) -> RemoteMethod[[float], tuple[int, int]]:
        """Keep the host alive for some seconds, and return its load."""

    @property
    def reserve(self) -> RemoteMethod[[Sequence[InstanceId], float], bool]:
        """Reserve places for instances for some seconds; False if there are too few."""

    @property
    def release(self) -> RemoteMethod[[Sequence[InstanceId]], Sequence[InstanceId]]:
        """End instances; return the ids that the host knew."""

    @property
    def exchange(self) -> RemoteMethod[[list[Begin], list[str], list[str]], list[Answer]]:
        """Make calls in batches; see `BatchServer.exchange`."""
