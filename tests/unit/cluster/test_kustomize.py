"""The part of kustomize that is understood here, each feature compared with what kubectl makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_ray.cluster import kustomize, yaml_files
from aenv_ray.errors import ConfigError
from tests.unit.cluster.test_manifests import as_set, by_kubectl

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, labels: {a: b, c.d/e: f}}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
        - name: one
          image: one:1
          args: [a, b]
          env: [{name: X, value: "1"}, {name: Y, value: "2"}]
        - {name: two, image: two:1}
"""
OTHER = """
apiVersion: ray.io/v1
kind: RayCluster
metadata: {name: other}
spec: {groups: [{name: a, count: 1, text: "7"}, {name: b, count: 2, text: "8"}], flag: false}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: facts
  annotations: {config.kubernetes.io/local-config: "true"}
data: {number: "5", word: hello, yes: "on", many: "a.b"}
"""
HEAD = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"


def kustomization(directory: Path, content: str, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / kustomize.FILE).write_text(HEAD + content)
    for name, text in {"deployment": DEPLOYMENT, "other": OTHER, **files}.items():
        (directory / f"{name}.yaml").write_text(text)
    return directory


RESOURCES = "resources: [deployment.yaml, other.yaml]\n"
MERGE = """
patches:
  - patch: |
      apiVersion: apps/v1
      kind: Deployment
      metadata: {name: web}
      spec:
        replicas: null
        template:
          spec:
            containers:
              - name: one
                image: one:2
                args: [c]
                env: [{name: Y, value: "3"}, {name: Z, value: "4"}]
              - {name: three, image: three:1}
              - {name: two, $patch: delete}
"""
MERGE_RAY = """
patches:
  - target: {kind: RayCluster}
    patch: |
      apiVersion: ray.io/v1
      kind: RayCluster
      metadata: {name: other}
      spec: {groups: [{name: c}], more: {x: 1}}
"""
JSON = """
patches:
  - target: {group: ray.io, version: v1, kind: RayCluster, name: oth.*}
    patch: |
      - {op: test, path: /spec/groups/0/name, value: a}
      - {op: replace, path: /spec/groups/0/count, value: 9}
      - {op: add, path: /spec/groups/-, value: {name: c}}
      - {op: add, path: /spec/groups/0, value: {name: first}}
      - {op: add, path: /metadata/annotations, value: {a~b/c: d}}
      - {op: remove, path: /spec/flag}
  - target: {kind: Deployment, name: nobody}
    patch: |
      - {op: remove, path: /spec}
"""
REPLACE = """
replacements:
  - source: {kind: ConfigMap, name: facts, fieldPath: data.number}
    targets:
      - select: {kind: RayCluster}
        fieldPaths: ["spec.groups.*.count", "spec.groups.[name=b].text"]
      - select: {kind: Deployment, name: web}
        fieldPaths: [spec.replicas, metadata.annotations.count]
        options: {create: true}
  - source: {kind: ConfigMap, name: facts, fieldPath: data.word}
    targets:
      - select: {kind: Deployment}
        fieldPaths:
          - spec.template.spec.containers.1.image
          - spec.template.spec.containers.[name=one].env.[name=X].value
          - metadata.labels.[c.d/e]
  - source: {kind: RayCluster, name: other, fieldPath: "spec.groups.[name=a]"}
    targets:
      - select: {kind: Deployment}
        fieldPaths: [spec.selector.matchLabels]
"""
LABELS = "labels:\n  - pairs: {team: rays}\n    includeSelectors: false\n"


@pytest.mark.parametrize(
    "content",
    ["", LABELS, MERGE, MERGE_RAY, JSON, REPLACE, MERGE_RAY + LABELS, JSON + LABELS + REPLACE],
    ids=["resources", "labels", "merge", "merge-ray", "json", "replace", "two", "three"],
)
def test_a_feature_does_what_it_does_in_kubectl(tmp_path, content):
    if content == JSON + LABELS + REPLACE:
        content = content.replace("[name=a]", "[name=c]")
    directory = kustomization(tmp_path / "k", RESOURCES + content)
    assert as_set(kustomize.render(directory)) == as_set(by_kubectl(directory))


def test_components_change_what_came_before_them(tmp_path):
    component = kustomization(tmp_path / "component", REPLACE.lstrip())
    text = (component / kustomize.FILE).read_text().replace("v1beta1", "v1alpha1")
    (component / kustomize.FILE).write_text(text.replace("Kustomization", "Component"))
    kustomization(tmp_path / "base", "resources: [deployment.yaml]\n")
    top = kustomization(
        tmp_path / "top",
        "resources: [../base, other.yaml]\ncomponents: [../component]\n" + LABELS,
    )
    found = as_set(kustomize.render(top))
    assert found == as_set(by_kubectl(top))
    assert '"replicas": 5' in found["Deployment web"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("resources: [nothing.yaml]\n", "nothing.yaml cannot be read"),
        (RESOURCES + "namePrefix: x-\nimages: []\n", "uses images, namePrefix, which"),
        (RESOURCES + REPLACE.replace("data.word", "data.wort"), "has no value at data.wort"),
        (
            RESOURCES + REPLACE.replace("containers.1.", "containers.7."),
            "has no field spec.templ",
        ),
        (RESOURCES + REPLACE.replace("name: facts", "name: fact", 1), "0 objects match the source"),
        (RESOURCES + JSON.replace("value: a}", "value: b}"), "expects 'b' at /spec/groups/0/name"),
        (
            RESOURCES + JSON.replace("groups/0/count", "groups/5/count"),
            "/spec/groups/5/count, which does not exist",
        ),
        (RESOURCES + JSON.replace("/spec/flag", "/spec/flog"), "which does not exist"),
        (RESOURCES + JSON.replace("op: remove", "op: move", 1), "operation: 'move'"),
        (RESOURCES + MERGE.replace("name: web", "name: wob"), "which does not exist"),
        (RESOURCES + LABELS.replace("false", "true"), "includeSelectors"),
        ("resources: [deployment.yaml, deployment.yaml]\nkind: Other\n", "duplicate key 'kind'"),
    ],
)
def test_what_is_wrong_or_not_known_is_refused_and_named(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        kustomize.render(kustomization(tmp_path / "k", content))


def test_an_error_names_the_file_and_the_way_out(tmp_path):
    wrong = RESOURCES + LABELS.replace("false", "true")
    with pytest.raises(ConfigError, match=r"/k/kustomization\.yaml: ") as caught:
        kustomize.render(kustomization(tmp_path / "k", wrong))
    assert f"kubectl kustomize {tmp_path / 'k'} > all.yaml" in str(caught.value.hint)


def test_yaml_is_read_as_kubernetes_reads_it():
    text = (
        "{a: yes, b: on, c: 012, d: 1e3, e: 2026-11-21, f: 12:30, g: true, h: ~, i: 0o17, j: None}"
    )
    assert yaml_files.parse(text, "it") == [
        {"a": "yes", "b": "on", "c": 10, "d": 1000.0, "e": "2026-11-21", "f": "12:30", "g": True,
         "h": None, "i": 15, "j": "None"}
    ]  # fmt: skip


def test_a_path_names_places_in_every_way():
    document = {"a.b/c": [{"name": "x", "v": 1}, {"name": "y.z", "v": 2}], "d": {"e.f": 3}}
    assert kustomize.get_field(document, "[a.b/c].[name=y.z].v") == 2
    assert kustomize.get_field(document, r"d.e\.f") == 3
    assert kustomize.get_field(document, "d.g") is None
    assert kustomize.set_field(document, "[a.b/c].*.v", "7") == 2
    assert [row["v"] for row in document["a.b/c"]] == [7, 7]
    with pytest.raises(ConfigError, match="2 fields"):
        kustomize.get_field(document, "[a.b/c].*.v")


def test_a_merge_patch_may_replace_a_map_and_knows_no_other_directive():
    document = {"apiVersion": "v1", "a": {"b": 1, "c": 2}}
    replaced = kustomize.merge_patch(document, {"a": {"$patch": "replace", "d": 3}})
    assert replaced == {"apiVersion": "v1", "a": {"d": 3}}
    with pytest.raises(ConfigError, match="unsupported"):
        kustomize.merge_patch(document, {"a": {"$patch": "delete"}})
