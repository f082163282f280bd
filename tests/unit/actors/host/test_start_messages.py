"""The messages of `HostShell.start`."""

from __future__ import annotations

from aenv_ray.actors.calls.introduction import Introduction
from aenv_ray.actors.host.start_messages import (
    ProjectMissing,
    decode_answer,
    decode_specs,
    encode_answer,
    encode_specs,
)
from aenv_ray.errors import SandboxLost
from aenv_ray.ids import InstanceId
from aenv_ray.models import (
    ActorDensity,
    InstanceInfo,
    InstanceSpec,
    InstanceStatus,
    Isolation,
    Lifetime,
)

INSTANCE = InstanceId("env-abcdefgh")


def test_specs_and_outcomes_survive_encoding() -> None:
    spec = InstanceSpec(
        instance_id=INSTANCE, reference="env@1", digest="d", ttl_s=1.5, arguments=("a", "ü"),
        environment_variables={"SECRET": "s"}, labels={"k": "v"}, job_id="01000000",
    )  # fmt: skip
    assert decode_specs(encode_specs([spec])) == [spec]
    info = InstanceInfo(
        id=INSTANCE, reference="env@1", status=InstanceStatus.RUNNING, engine="process",
        node_id="n", host="h", density=ActorDensity.SHARED, created_at=1.0, deadline=2.5,
        idle_timeout_s=None, lifetime=Lifetime.JOB, owner=None, labels={},
        isolation=Isolation(kind="none", missing=("all",)), start_mode="template", calls=0,
        generation=0,
    )  # fmt: skip
    failure = SandboxLost("it died", instance_id=INSTANCE, hint="create another")
    introduction = Introduction("path", "key", None)
    answer = decode_answer(encode_answer([(info, introduction), (failure, None)]))
    assert isinstance(answer, list)
    again, (failed, nothing) = answer
    assert again == (info, introduction)
    assert nothing is None
    assert isinstance(failed, SandboxLost)
    assert vars(failed) == vars(failure)
    assert failed.message == failure.message


def test_a_missing_project_names_the_node() -> None:
    assert decode_answer(encode_answer(ProjectMissing("node-1"))) == ProjectMissing("node-1")
    assert decode_answer(encode_answer([])) == []
