"""`aenv config`: what users set is kept, secrets are masked, a broken file is left as it is."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import yaml

from aenv_ray.cli.main import main
from aenv_ray.cli.terminal import config_file


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a config file, and another directory to work in."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(config_file, "SYSTEM_FILE", tmp_path / "etc" / "cli_config.json")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.fixture
def file(home: Path) -> Path:
    path = home / ".aenv" / "cli_config.json"
    path.parent.mkdir(parents=True)
    return path


def test_reading_makes_no_file(home, capsys):
    assert main(["config", "show", "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["hub_config"]["timeout"] == 30
    assert shown["system_url"] is None
    assert not home.exists()


def test_set_writes_one_key_private_and_keeps_the_unknown_ones(file, capsys):
    file.write_text('{"mine": {"a": 1}, "hub_config": {"extra": true}, "owner": "bob"}')
    assert main(["config", "set", "hub_config.timeout", "60"]) == 0
    assert json.loads(file.read_text()) == {
        "mine": {"a": 1},
        "hub_config": {"extra": True, "timeout": 60},
        "owner": "bob",
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    assert capsys.readouterr().out == ""


def test_set_follows_a_link_instead_of_replacing_it(file, tmp_path):
    real = tmp_path / "dotfiles.json"
    real.write_text("{}")
    file.symlink_to(real)
    assert main(["config", "set", "owner", "alice"]) == 0
    assert file.is_symlink()
    assert json.loads(real.read_text()) == {"owner": "alice"}


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        ("hub_backend", "x", "unknown config key 'hub_backend'", "hub_config.hub_backend"),
        ("build.registry.host", "x", "unknown config key", "build_config.registry.host"),
        ("hub_config", "x", "hub_config is a section", "hub_config.timeout"),
        ("hub_config.timeout", "soon", "hub_config.timeout", "aenv config set"),
        ("output", "xml", "output", "aenv config set"),
    ],
)
def test_a_wrong_key_or_value_is_refused_and_nothing_changes(
    key, value, message, hint, file, capsys
):
    file.write_text('{"owner": "bob"}')
    assert main(["config", "set", key, value]) == 3
    err = capsys.readouterr().err
    assert message in err
    assert hint in err
    assert file.read_text() == '{"owner": "bob"}'


@pytest.mark.parametrize("text", ["{broken", "[]", "\0", '{"hub_config": 3}'])
def test_a_broken_file_is_an_error_and_never_overwritten(text, file, capsys):
    file.write_text(text)
    for words in (["show"], ["set", "owner", "x"], ["load", str(file)]):
        assert main(["config", *words]) == 3
        assert str(file) in capsys.readouterr().err
    assert main(["list"]) == 3
    assert file.read_text() == text


def test_a_token_of_digits_stays_text(file):
    assert main(["config", "set", "hub_config.api_key", "0123"]) == 0
    assert main(["config", "set", "owner", '"0123"']) == 0
    data = json.loads(file.read_text())
    assert (data["hub_config"]["api_key"], data["owner"]) == ("0123", "0123")


SECRETS = {
    "hub_config": {"api_key": "key-secret"},
    "build_config": {"registry": {"password": "pw-secret", "username": "bob"}},
    "other": [{"access_token": "tok-secret"}],
}


@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_secrets_are_masked_unless_asked_for(form, file, capsys):
    file.write_text(json.dumps(SECRETS))
    assert main(["config", "show", "-o", form]) == 0
    out = capsys.readouterr().out
    assert "secret" not in out
    assert "bob" in out
    assert main(["config", "show", "-o", form, "--show-secrets"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("key-secret", "pw-secret", "tok-secret"))


def test_get_prints_the_value_alone(file, capsys):
    file.write_text(json.dumps(SECRETS))
    assert main(["config", "get", "hub_config.api_key"]) == 0
    assert capsys.readouterr().out == f"{config_file.MASK}\n"
    assert main(["config", "get", "hub_config.api_key", "--show-secrets"]) == 0
    assert capsys.readouterr().out == "key-secret\n"
    assert main(["config", "get", "build_config.registry", "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["username"] == "bob"
    assert main(["config", "get", "nothing"]) == 3


def test_init_refuses_to_overwrite_and_reset_keeps_the_old_file(file, capsys):
    file.write_text("{broken")
    assert main(["config", "init"]) == 3
    assert main(["config", "reset"]) == 3  # nobody is here to confirm
    assert file.read_text() == "{broken"
    assert main(["config", "reset", "--yes"]) == 0
    assert json.loads(file.read_text()) == config_file.defaults()
    assert file.with_name(f"{file.name}.bak").read_text() == "{broken"
    file.unlink()
    assert main(["config", "init"]) == 0
    assert capsys.readouterr().out == f"{file}\n"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["set", "owner", "alice"], {"key": "owner", "value": "alice"}),
        (["set", "hub_config.api_key", "s3cret"], {"value": config_file.MASK}),
        (["path"], {}),
        (["reset", "--yes"], {}),
        (["load", "more.json"], {}),
    ],
)
@pytest.mark.parametrize("form", ["json", "yaml"])
def test_what_was_changed_is_data_where_data_is_asked_for(form, words, shown, file, capsys):
    file.write_text("{}")
    Path("more.json").write_text("{}")
    assert main(["config", *words, "-o", form]) == 0
    read = {"json": json.loads, "yaml": yaml.safe_load}[form]
    assert read(capsys.readouterr().out).items() >= ({"path": str(file)} | shown).items()


def test_an_export_can_be_loaded_and_holds_no_secret(file, tmp_path, capsys):
    file.write_text(json.dumps(SECRETS | {"owner": "alice"}))
    target = tmp_path / "export.json"
    assert main(["config", "export", "--output", str(target)]) == 0
    assert "secret" not in target.read_text()
    assert main(["config", "export", "--output", str(target)]) == 3, "it exists"
    file.write_text('{"hub_config": {"api_key": "mine"}, "kept": 1}')
    assert main(["config", "load", str(target)]) == 0
    data = json.loads(file.read_text())
    assert (data["owner"], data["kept"]) == ("alice", 1)
    assert data["hub_config"]["api_key"] == "mine", "merged deeply"
    capsys.readouterr()
    assert main(["config", "export", "--output", str(target), "--force", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(target)}
    assert main(["config", "export", "--output", "-", "--show-secrets"]) == 0
    assert '"mine"' in capsys.readouterr().out


def test_the_first_file_that_exists_is_read(file, tmp_path, capsys):
    here = tmp_path / "work" / ".aenv" / "cli_config.json"
    here.parent.mkdir()
    here.write_text('{"owner": "here"}')
    config_file.SYSTEM_FILE.parent.mkdir()
    config_file.SYSTEM_FILE.write_text('{"owner": "system"}')

    def owner() -> str:
        assert main(["config", "get", "owner"]) == 0
        return capsys.readouterr().out.strip()

    assert owner() == "here"
    file.write_text('{"owner": "home"}')
    assert owner() == "home"
    file.unlink()
    here.unlink()
    assert owner() == "system"
    assert main(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{config_file.SYSTEM_FILE}\n"
