"""The kubernetes engine reads the state of a pod: failed starts, causes of ends, refusals."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from aenv_ray.engines.kubernetes import pod_status
from aenv_ray.engines.kubernetes.client import ApiRefused
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.errors import (
    CapacityExceeded,
    ConfigError,
    FabricUnavailable,
    InsideCause,
    SandboxStartFailed,
)
from aenv_ray.runtime.container.pod import ENDED_BY_SIGTERM
from tests.unit.engines.kubernetes.pods import pod_with

LEFT = json.dumps(
    {"cause": "its main process exited with code 3", "log": base64.b64encode(b"bye\n").decode()}
)


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (pod_with({"terminated": {"reason": "OOMKilled", "exitCode": 137}}), "limit 64 MiB"),
        (pod_with({"terminated": {"exitCode": 137}}), "SIGKILL"),
        (pod_with({"terminated": {"exitCode": 3, "message": LEFT}}), "code 3; the end of its log"),
        (pod_with(reason="DeadlineExceeded"), "its TTL passed"),
        (pod_with(reason="Evicted", message="low on memory"), "evicted it: low on memory"),
        (pod_with(reason="NodeLost", message="gone"), "its node was lost: gone"),
        (pod_with(conditions=[{"type": "DisruptionTarget", "status": "True",
                               "reason": "DeletionByTaintManager", "message": "m"}]),
         "its node no longer answers"),
        (pod_with(conditions=[{"type": "DisruptionTarget", "status": "True",
                               "reason": "PreemptionByScheduler"}]), "higher priority"),
        (pod_with(), "deleted by someone other than its host"),
    ],
)  # fmt: skip
def test_an_end_has_a_cause_in_words(pod: dict[str, Any], words: str) -> None:
    """Invariant 2."""
    assert words in str(pod_status.end_cause(pod))


def with_unpacker(pod: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    pod["spec"]["containers"].append({"name": "unpacker"})
    row = {"name": "unpacker", "image": "i:1", "state": state}
    pod["status"]["containerStatuses"].append(row)
    pod["status"].update(phase="Running", podIP="10.0.0.7")
    return pod


DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}


def test_the_end_of_the_unpacker_is_not_that_of_its_pod() -> None:
    pod = with_unpacker(pod_with({"running": {}}), DONE)
    assert not pod_status.is_over(pod)
    assert pod_status.address(pod) == "10.0.0.7"
    assert pod_status.start_failure(pod, "made-1") is None
    ended = with_unpacker(pod_with({"terminated": {"exitCode": 3, "message": LEFT}}), DONE)
    assert pod_status.is_over(ended)
    assert "code 3; the end of its log" in str(pod_status.end_cause(ended))


def test_a_pod_whose_files_cannot_be_unpacked_does_not_start() -> None:
    state = {"terminated": {"exitCode": 1, "message": "No space left on device"}}
    failure = pod_status.start_failure(with_unpacker(pod_with({"running": {}}), state), "made-1")
    assert isinstance(failure, SandboxStartFailed)
    assert "cannot be unpacked: exit code 1 No space left" in failure.message


def test_an_image_without_python_lacks_it_in_the_unpacker_too() -> None:
    """The node may try that one first."""
    message = 'exec: "python3": executable file not found in $PATH'
    state = {"terminated": {"reason": "StartError", "exitCode": 128, "message": message}}
    pod = with_unpacker(pod_with({"waiting": {"reason": "ContainerCreating"}}), state)
    assert isinstance(pod_status.start_failure(pod, "made-1"), pod_status.UnsuitableImage)


@pytest.mark.parametrize(
    ("pod", "inside"),
    [
        (pod_with(reason="Evicted", message="The node was low on resource: ephemeral-storage."),
         None),
        (pod_with(reason="Evicted",
                  message="Pod ephemeral local storage usage exceeds the total limit of "
                          "containers 64Mi. "), InsideCause.DISK),
        (pod_with(reason="Evicted",
                  message='Usage of EmptyDir volume "work" exceeds the limit "64Mi". '),
         InsideCause.DISK),
        (pod_with({"terminated": {"reason": "OOMKilled", "exitCode": 137, "message": LEFT}}),
         InsideCause.MEMORY),
        (pod_with({"terminated": {"exitCode": 137}}), None),
        (pod_with({"terminated": {"exitCode": 1, "message": "[" * 100_000}}), InsideCause.EXIT),
        (pod_with(reason="NodeLost"), None),
    ],
)  # fmt: skip
def test_ends_from_inside_are_told_from_losses(
    pod: dict[str, Any], inside: InsideCause | None
) -> None:
    """Invariant 14: a process inside can write the message of its container before it dies."""
    assert pod_status.end_cause(pod).inside is inside


def test_the_message_of_a_container_that_was_killed_is_not_believed() -> None:
    """Process 1 had no time to write it, but any process of the container had."""
    cause = pod_status.end_cause(pod_with({"terminated": {"exitCode": 137, "message": LEFT}}))
    assert cause.text == "its main process was killed by SIGKILL"


def test_a_sigterm_is_from_outside_only_if_the_api_shows_a_reason() -> None:
    """Invariants 2 and 14: who sent it cannot be told in the pod."""
    left = json.dumps({"cause": ENDED_BY_SIGTERM, "inside": None, "log": ""})
    ended = {"terminated": {"exitCode": 0, "message": left}}
    unexplained = pod_status.unexplained_end(pod_with(ended))
    assert unexplained is not None
    assert unexplained.inside is InsideCause.SIGNAL
    deleted = pod_with(ended)
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    disrupted = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
    for pod in (
        deleted,
        pod_with(ended, reason="Terminated"),
        pod_with(ended, conditions=disrupted),
    ):
        assert pod_status.unexplained_end(pod) is None
        assert pod_status.end_cause(pod).inside is None
    exited = {"terminated": {"exitCode": 3, "message": LEFT}}
    assert pod_status.unexplained_end(pod_with(exited)) is None


@pytest.mark.parametrize(
    ("ended_at", "deleted_at", "is_explained"),
    [
        # The timestamp of a deletion is that of its end, after the grace period of 30 s.
        (["12:00:00"], "12:00:30", True),
        (["12:00:12"], "12:00:30", True),
        (["12:00:00"], "12:00:38", True),  # the clock of the node is behind
        (["12:00:00"], "12:01:00", False),
        (["12:00:00", "12:01:00"], "12:01:10", False),
    ],
)
def test_a_deletion_explains_an_end_that_is_not_earlier(
    ended_at: list[str], deleted_at: str, is_explained: bool
) -> None:
    """Invariants 2 and 14: the janitor of another host deletes pods that have ended."""
    left = json.dumps({"cause": ENDED_BY_SIGTERM, "inside": None, "log": ""})
    states = [
        {"terminated": {"exitCode": 0, "message": left, "finishedAt": f"2026-01-01T{at}Z"}}
        for at in ended_at
    ]
    pod = pod_with(states[0])
    pod["status"]["containerStatuses"] += [{"name": "second", "state": one} for one in states[1:]]
    pod["metadata"] |= {
        "deletionTimestamp": f"2026-01-01T{deleted_at}Z", "deletionGracePeriodSeconds": 30,
    }  # fmt: skip
    assert (pod_status.unexplained_end(pod) is None) is is_explained


@pytest.mark.parametrize(
    ("limit", "words"), [("524288k", "500 MiB"), ("2Gi", "2048 MiB"), ("much", "much")]
)
def test_a_memory_limit_is_one_however_the_api_writes_it(limit: str, words: str) -> None:
    """Invariant 14: the API writes 524288000 as 524288k, and a webhook as it likes."""
    pod = pod_with({"terminated": {"reason": "OOMKilled", "exitCode": 137}})
    pod["spec"]["containers"][0]["resources"]["limits"]["memory"] = limit
    cause = pod_status.end_cause(pod)
    assert cause.inside is InsideCause.MEMORY
    assert f"limit {words}" in cause.text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}, "cannot be pulled"),
        ({"waiting": {"reason": "ErrImagePull", "message": "i:1: not found"}}, "does not exist"),
        ({"waiting": {"reason": "InvalidImageName"}}, "InvalidImageName"),
        ({"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}},
         "no secret"),
        ({"terminated": {"reason": "StartError", "exitCode": 128, "message": "bad"}}, "bad"),
    ],
)  # fmt: skip
def test_a_start_that_cannot_be_is_said(state: dict[str, Any], words: str) -> None:
    failure = pod_status.start_failure(pod_with(state), "made-1")
    assert isinstance(failure, SandboxStartFailed)
    assert words in failure.message
    assert failure.instance_id == "made-1"


def test_a_python_that_nobody_may_start_names_the_user_to_set() -> None:
    message = 'exec: "python3": permission denied'
    state = {"terminated": {"reason": "StartError", "exitCode": 128, "message": message}}
    failure = pod_status.start_failure(pod_with(state), "made-1")
    assert isinstance(failure, SandboxStartFailed)
    assert "deployConfig.container.user" in str(failure.hint)


@pytest.mark.parametrize(
    "state",
    [
        {"waiting": {"reason": "ContainerCreating"}},
        {"waiting": {"reason": "ErrImagePull", "message": "i/o timeout"}},
        {"running": {}},
    ],
)
def test_what_may_still_come_is_no_failure(state: dict[str, Any]) -> None:
    assert pod_status.start_failure(pod_with(state), "made-1") is None


@pytest.mark.parametrize(
    "message",
    [
        'exec: "python3": executable file not found in $PATH',
        'finding executable "python3" in PATH: no such file or directory',
        "Failed to exec python3: ENOENT: No such file or directory",
    ],
)
def test_an_image_without_python_is_known_by_its_error(message: str) -> None:
    state = {"terminated": {"reason": "StartError", "exitCode": 128, "message": message}}
    assert isinstance(
        pod_status.start_failure(pod_with(state), "made-1"), pod_status.UnsuitableImage
    )


def test_a_pod_is_reachable_when_all_its_containers_run() -> None:
    assert pod_status.address(pod_with({"running": {}}, podIP="10.1.2.3")) == "10.1.2.3"
    assert pod_status.address(pod_with({"waiting": {}}, podIP="10.1.2.3")) is None
    assert pod_status.address(pod_with({"running": {}})) is None


@pytest.mark.parametrize(
    ("status", "message", "error", "words"),
    [
        (403, 'pods is forbidden: User "u" cannot create resource "pods"', FabricUnavailable,
         "may not create pods in namespace aenv"),
        (403, 'pods "p" is forbidden: exceeded quota: q, used: pods=2', CapacityExceeded,
         "has no room"),
        (403, 'pods "p" is forbidden: violates PodSecurity', ConfigError, "refuses its pod"),
        (422, "Pod is invalid", SandboxStartFailed, "Pod is invalid"),
        (401, "Unauthorized", FabricUnavailable, "may not create pods"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_it_means(
    status: int, message: str, error: type[Exception], words: str
) -> None:
    refused = ApiRefused(Access.CREATE_POD, status, "Forbidden", message)
    found = pod_status.error_of(refused, "aenv", "made-1")
    assert type(found) is error
    assert words in found.message
    assert message in found.message
