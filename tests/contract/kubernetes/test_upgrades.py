"""Upgrades of a cluster by `aenv cluster upgrade`: workers one by one, the head last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aenv_ray.cluster import api as cluster_api
from aenv_ray.cluster import lifecycle, manifests
from aenv_ray.cluster.objects import KINDS
from aenv_ray.errors import ConfigError, DeadlineExceeded
from tests.contract.kubernetes.kubernetes_objects import all_of, edited
from tests.emulators.kubernetes.api import EmulatedCluster

ROOT = Path(__file__).parents[3]
LONG_S = 60.0


def images_of(emulated: EmulatedCluster) -> dict[str, str]:
    """Return the image of each Ray pod."""
    return {
        pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"]
        for pod in all_of(emulated, "Pod")
        if "ray.io/node-type" in pod["metadata"]["labels"]
    }


def upgraded(image: str) -> list[dict[str, Any]]:
    return manifests.load("dev", None, {"image": image, "workers.minReplicas": "3"})


def test_an_upgrade_replaces_one_worker_after_the_other_and_the_head_last(emulated, life, said):
    life.apply(upgraded("aenv-ray:1"))
    life.await_ready(LONG_S)
    said.clear()
    found = life.upgrade(upgraded("aenv-ray:2"), LONG_S)
    assert not found.problems()
    assert images_of(emulated) == dict.fromkeys(
        ("headgroup-0", "kubernetes-0", "kubernetes-1", "kubernetes-2"), "aenv-ray:2"
    )
    deleted = [line for line in said if line.endswith("deleted")]
    assert deleted == [
        "Pod kubernetes-0: deleted", "Pod kubernetes-1: deleted", "Pod kubernetes-2: deleted",
        "Pod headgroup-0: deleted",
    ]  # fmt: skip
    said.clear()
    life.upgrade(upgraded("aenv-ray:2"), LONG_S)
    assert not [line for line in said if line.endswith("deleted")], "nothing differs"
    life.upgrade(upgraded("aenv-ray:2"), LONG_S, everything=True)
    assert len([line for line in said if line.endswith("deleted")]) == 4


def test_an_upgrade_to_a_version_that_does_not_start_stops_at_the_first_worker(emulated, life):
    """Running workers continue; the corrected version replaces the broken worker first."""
    life.apply(upgraded("aenv-ray:1"))
    emulated.controllers.missing_images.add("aenv-ray:2")
    with pytest.raises(DeadlineExceeded, match="workers to replace: "):
        life.upgrade(upgraded("aenv-ray:2"), 0.0)
    with pytest.raises(DeadlineExceeded, match=r"workers to replace: \d+.*kubernetes-0: .*Pull"):
        life.upgrade(upgraded("aenv-ray:2"), 0.0)
    assert sorted(images_of(emulated).values()) == ["aenv-ray:1"] * 3 + ["aenv-ray:2"]
    life.upgrade(upgraded("aenv-ray:3"), LONG_S)
    assert set(images_of(emulated).values()) == {"aenv-ray:3"}


def autoscaled(api: cluster_api.ClusterApi, workers: int) -> None:
    """Want this many workers, as the autoscaler does."""
    path = "/spec/workerGroupSpecs/0/replicas"
    change = [{"op": "replace", "path": path, "value": workers}]
    api.patch(KINDS["RayCluster"], "aenv", "aenv", change)


def unplaced(emulated: EmulatedCluster) -> int:
    """Return how many pods wait for room."""
    return [pod["status"]["phase"] for pod in all_of(emulated, "Pod")].count("Pending")


IMAGES = ("aenv-ray:1", "aenv-ray:2")


def test_an_upgrade_goes_on_while_no_node_has_room_for_all_workers(emulated, life, api, said):
    """The autoscaler wants as many workers as are demanded, even if the nodes have no room."""
    old, new = (manifests.load("dev", None, {"image": image}) for image in IMAGES)
    life.apply(old)
    emulated.controllers.worker_room = 1
    autoscaled(api, 2)
    assert unplaced(emulated) == 1
    during(api, said, lambda: autoscaled(api, 3)).upgrade(new, 0.5)
    assert unplaced(emulated) == 2
    assert deleted(said)[-1] == "headgroup-0"
    assert set(images_of(emulated).values()) == {"aenv-ray:2"}


def test_an_upgrade_stops_if_no_node_has_room_for_its_workers(emulated, life, api, said):
    """Although there was a worker that waited for room before."""
    old, new = (manifests.load("dev", None, {"image": image}) for image in IMAGES)
    life.apply(old)
    emulated.controllers.worker_room = 2
    autoscaled(api, 3)
    emulated.controllers.worker_room = 1  # the new version needs more
    with pytest.raises(DeadlineExceeded, match="Insufficient cpu"):
        life.upgrade(new, 0.5)
    assert sorted(deleted(said)) == ["kubernetes-0", "kubernetes-2"]


def test_there_must_be_something_to_upgrade(life):
    with pytest.raises(ConfigError, match="no cluster"):
        life.upgrade(upgraded("aenv-ray:2"), LONG_S)
    others = [one for one in upgraded("aenv-ray:2") if one["kind"] != "RayCluster"]
    with pytest.raises(ConfigError, match="no RayCluster among the objects"):
        life.upgrade(others, LONG_S)


def test_another_version_of_ray_is_refused_before_anything_is_changed(emulated, life):
    """Its workers could not join the head, which is replaced after all workers."""
    life.apply(upgraded("aenv-ray:1"))
    newer = manifests.load("dev", None, {"image": "aenv-ray:2", "rayVersion": "9.9.9"})
    before = [all_of(emulated, kind) for kind in KINDS]
    for change in life.upgrade, life.apply:
        with pytest.raises(
            ConfigError, match=r"runs Ray .*, and workers with Ray 9\.9\.9"
        ) as caught:
            change(newer)
        assert "aenv cluster delete; aenv cluster apply" in (caught.value.hint or "")
    assert [all_of(emulated, kind) for kind in KINDS] == before
    life.delete(LONG_S)
    life.apply(newer)
    assert set(images_of(emulated).values()) == {"aenv-ray:2"}


def deleted(said: list[str]) -> list[str]:
    return [line.split()[1].rstrip(":") for line in said if line.endswith("deleted")]


def during(api: cluster_api.ClusterApi, said: list[str], *steps: Any) -> lifecycle.Lifecycle:
    """Return a life cycle in which each wait takes one of the steps, as long as there are some."""
    left = list(steps)
    return lifecycle.Lifecycle(api, "aenv", said.append, lambda _: left and left.pop(0)())


def test_no_worker_is_deleted_while_the_head_is_not_ready(emulated, life, api, said):
    """A worker that cannot reach the head cannot drain."""
    life.apply(upgraded("aenv-ray:1"))

    def set_ready(word: str) -> None:
        with edited(emulated, "Pod", "headgroup-0") as pod:
            pod["status"]["conditions"] = [{"type": "Ready", "status": word}]

    set_ready("False")
    with pytest.raises(DeadlineExceeded, match="no worker is deleted") as caught:
        life.upgrade(upgraded("aenv-ray:2"), 0.0)
    assert "delete its pod" in (caught.value.hint or "")
    assert deleted(said) == []
    during(api, said, lambda: set_ready("True")).upgrade(upgraded("aenv-ray:2"), LONG_S)
    assert set(images_of(emulated).values()) == {"aenv-ray:2"}


def test_a_head_that_does_not_start_is_replaced_first(emulated, life, said):
    """All would wait for it otherwise, and nothing uses it yet."""
    emulated.controllers.missing_images.add("aenv-ray:1")
    life.apply(upgraded("aenv-ray:1"))
    life.upgrade(upgraded("aenv-ray:2"), LONG_S)
    assert deleted(said)[0] == "headgroup-0"
    assert set(images_of(emulated).values()) == {"aenv-ray:2"}


def test_each_pod_is_replaced_once_even_if_admission_rewrites_images(emulated, life, said):
    emulated.controllers.mirror = "mirror.example/"
    life.apply(upgraded("aenv-ray:1"))
    life.upgrade(upgraded("aenv-ray:2"), LONG_S)
    assert deleted(said) == ["kubernetes-0", "kubernetes-1", "kubernetes-2", "headgroup-0"]
    assert set(images_of(emulated).values()) == {"mirror.example/aenv-ray:2"}


@pytest.mark.parametrize(("at_once", "words"), [(1, "26100 s"), (2, "18600 s")])
def test_the_default_timeout_suffices_for_the_drain_of_each_batch(at_once, words, life, said):
    values = {"workers.minReplicas": "3", "workers.drainSeconds": "7200"}
    life.apply(manifests.load("dev", None, {**values, "image": "aenv-ray:1"}))
    life.upgrade(manifests.load("dev", None, {**values, "image": "aenv-ray:2"}), at_once=at_once)
    assert f"waiting at most {words}" in said


def test_an_upgrade_that_ends_while_a_worker_drains_says_how_to_go_on(emulated, life):
    life.apply(upgraded("aenv-ray:1"))
    with edited(emulated, "Pod", "kubernetes-0") as pod:
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(DeadlineExceeded, match="worker kubernetes-0 drains") as caught:
        life.upgrade(upgraded("aenv-ray:2"), 0.0)
    for words in ("aenv cluster nodes", "--timeout", "run the command again"):
        assert words in (caught.value.hint or "")


def test_an_upgrade_outlasts_requests_that_fail(emulated, life, api, said):
    """It takes hours, in which an API server may restart."""
    life.apply(upgraded("aenv-ray:1"))
    waits = during(api, said, lambda: emulated.fail(500, None, None, 500))
    waits.upgrade(upgraded("aenv-ray:2"), LONG_S)
    assert set(images_of(emulated).values()) == {"aenv-ray:2"}
    outages = [line for line in said if "the Kubernetes API" in line]
    assert len(outages) == 1, "told once"
