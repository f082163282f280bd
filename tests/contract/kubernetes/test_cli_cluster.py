"""`aenv cluster` as commands, against an API that refuses as Kubernetes does."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import yaml

from aenv_ray.cli.main import main
from aenv_ray.cluster import lifecycle, manifests
from tests.contract.kubernetes.kubernetes_objects import all_of, edited, one
from tests.emulators.kubernetes.api import EmulatedCluster


@pytest.fixture
def kubeconfig(emulated: EmulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the commands speak with the emulated cluster."""
    content = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": emulated.url}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
    }  # fmt: skip
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setattr(lifecycle, "POLL_S", 0.0)


@pytest.mark.usefixtures("kubeconfig")
def test_the_commands_bring_up_look_at_and_take_down(emulated, capsys):
    assert main(["cluster", "status"]) == 1
    assert "not there" in capsys.readouterr().out
    assert main(["cluster", "doctor"]) == 0
    assert main(["cluster", "apply", "dev", "--image", "mine:1", "-o", "json"]) == 0
    lines = capsys.readouterr().out
    facts = json.loads(lines[lines.index("{") :])
    assert (facts["state"], facts["lacks"], facts["head"]) == ("ready", [], "headgroup-0")
    pod = one(emulated, "Pod", "kubernetes-0")
    environment = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert environment["AENV_KUBERNETES_IMAGE"] == "mine:1"
    assert main(["cluster", "scale", "2:4"]) == 0
    assert main(["cluster", "scale", "many"]) == 2
    assert main(["cluster", "status", "-o", "json"]) == 0
    token = base64.b64decode(one(emulated, "Secret", "aenv-admin")["data"]["token"]).decode()
    capsys.readouterr()
    assert main(["cluster", "status", "--token"]) == 0
    assert capsys.readouterr().out == f"{token}\n"
    assert main(["cluster", "delete"]) == 3  # nobody is there to say yes
    assert main(["cluster", "delete", "--yes"]) == 0
    assert "--delete-storage" in capsys.readouterr().err
    assert not all_of(emulated, "Pod")


@pytest.mark.usefixtures("kubeconfig")
def test_a_secret_without_a_token_is_named(emulated, capsys):
    assert main(["cluster", "apply", "dev"]) == 0
    with edited(emulated, "Secret", "aenv-admin") as secret:
        del secret["data"]
    capsys.readouterr()
    assert main(["cluster", "status", "--token"]) == 3
    said = capsys.readouterr().err
    assert "Secret aenv-admin in namespace aenv has no key `token`" in said
    assert "hint: set the key" in said


def test_render_writes_manifests_that_apply_reads_back(tmp_path, capsys):
    assert main(["cluster", "render", "dev", "--copy-to", str(tmp_path / "mine")]) == 0
    own = tmp_path / "mine" / "overlays" / "dev"
    assert main(["cluster", "render", str(own)]) == 0
    text = capsys.readouterr().out
    (tmp_path / "all.yaml").write_text(text)
    assert main(["cluster", "render", str(tmp_path / "all.yaml")]) == 0
    assert capsys.readouterr().out == text
    assert main(["cluster", "render", "dev", "--copy-to", str(tmp_path / "mine")]) == 3
    assert main(["cluster", "render", str(tmp_path / "all.yaml"), "--set", "image=x"]) == 3


def test_without_a_kube_config_it_says_what_to_set(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["cluster", "status"]) == 3
    assert "set KUBECONFIG" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["table", "json"])
def test_doctor_names_the_first_step_of_each_alert_offline(monkeypatch, tmp_path, capsys, output):
    """The reader of an alert may not have access to the cluster yet."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["cluster", "doctor", "--alerts", "-n", "elsewhere", "-o", output]) == 0
    said = capsys.readouterr().out
    alerts = manifests.alerts("elsewhere")
    if output == "json":
        assert json.loads(said) == [alert._asdict() for alert in alerts]
    else:
        assert said == "".join(f"{a.name}: {a.summary}\n  {a.first_step}\n" for a in alerts)
    assert "AenvControllerAbsent" in said
    assert "kubectl -n elsewhere get pods -o wide" in said
    assert "-n aenv" not in said
