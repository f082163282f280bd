"""What `aenv up`, `down`, `status` and the other commands decide before anything is started."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest

from aenv_ray import local_fabric
from aenv_ray.cli.main import main
from aenv_ray.cli.terminal import config_file, options
from aenv_ray.config import settings
from aenv_ray.errors import ConfigError
from aenv_ray.local_fabric import LocalFabric, Phase


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AENV_DATA_DIR", str(tmp_path / "data"))
    for name in ("AENV_API_KEY", "AENV_SYSTEM_URL", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config_file, "SYSTEM_FILE", tmp_path / "none")
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("ray_answers", [True, False])
def test_only_a_complete_fabric_whose_ray_answers_is_used_again(phase, ray_answers):
    """It is incomplete if `aenv up` was killed; Ray is gone after the machine was restarted."""
    with socket.create_server(("127.0.0.1", 0)) as ray:
        port = ray.getsockname()[1] if ray_answers else 1
        fabric = local_fabric.LocalFabric(
            id="a", phase=phase, url="http://127.0.0.1:1", mcp_url="http://127.0.0.1:1",
            ray_address=f"127.0.0.1:{port}", owns_ray=True, started_at=0.0, user="me",
        )  # fmt: skip
        assert fabric.is_broken() is not (ray_answers and phase is Phase.UP)


def test_a_taken_port_is_an_error_before_anything_starts(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["up", "--port", port]) == 3
        out, err = capsys.readouterr()
        assert out == ""
        assert port in err
        assert "--port" in err
        assert main(["up", "--port", "0", "--mcp-port", port]) == 3
        assert "--mcp-port" in capsys.readouterr().err
    assert not local_fabric.path_in(tmp_path / "data").exists()


def test_down_and_status_where_nothing_is_up(capsys):
    assert main(["down", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"ended": False, "url": None}
    assert err == "nothing is up\n"
    assert main(["status", "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"state": "down"}


def written(tmp_path: Path, **changes) -> LocalFabric:
    facts = {
        "id": "0" * 16, "phase": Phase.UP, "url": "http://127.0.0.1:1", "owns_ray": True,
        "mcp_url": "http://127.0.0.1:2", "token": "up-secret", "ray_address": "127.0.0.1:3",
        "started_at": 1.0, "user": "me",
    }  # fmt: skip
    fabric = LocalFabric(**facts | changes)
    local_fabric.write(tmp_path / "data", fabric)
    return fabric


def test_what_is_written_down_is_private_and_read_back(tmp_path):
    fabric = written(tmp_path)
    path = local_fabric.path_in(tmp_path / "data")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert local_fabric.read(tmp_path / "data") == fabric
    assert "up-secret" not in repr(fabric)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        local_fabric.read(tmp_path / "data")


def test_the_remains_of_a_dead_fabric_are_taken_down(tmp_path, capsys):
    written(tmp_path, ray_temp_dir=tmp_path / "ray")
    (tmp_path / "ray").mkdir()
    assert main(["status", "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "broken"
    assert main(["down"]) == 0
    assert not (tmp_path / "ray").exists()
    assert local_fabric.read(tmp_path / "data") is None


# --- which gateway, which token -----------------------------------------------------------------


def told(system_url: str | None = None, api_key: str | None = None) -> tuple[str, str | None]:
    with options.gateway(system_url, api_key) as door:
        headers = door.http._http.headers
        return door.url, headers.get("Authorization")


def set_config(tmp_path: Path, **values) -> None:
    path = tmp_path / "home" / ".aenv" / "cli_config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def test_no_gateway_known_names_aenv_up(capsys):
    assert main(["list"]) == 3
    assert "aenv up" in capsys.readouterr().err


def test_option_environment_config_and_up_file_in_this_order(tmp_path, monkeypatch):
    written(tmp_path)
    assert told() == ("http://127.0.0.1:1", "Bearer up-secret")
    set_config(tmp_path, system_url="http://config", hub_config={"api_key": "config-secret"})
    assert told() == ("http://config:8080", "Bearer config-secret")
    monkeypatch.setenv("AENV_SYSTEM_URL", "http://variable")
    settings.cache_clear()
    assert told() == ("http://variable:8080", "Bearer config-secret")
    monkeypatch.setenv("AENV_API_KEY", "variable-secret")
    settings.cache_clear()
    assert told("http://option") == ("http://option:8080", "Bearer variable-secret")
    assert told("http://option", "option-secret")[1] == "Bearer option-secret"


def test_the_token_of_up_goes_to_its_gateway_alone(tmp_path):
    written(tmp_path)
    assert told("http://elsewhere")[1] is None
    assert told("http://127.0.0.1:1/")[1] == "Bearer up-secret"
    set_config(tmp_path, hub_config={"api_key": "config-secret"})
    assert told()[1] == "Bearer up-secret", "the file's is for another gateway"


def test_the_address_that_aenvironment_writes_by_itself_counts_for_none(tmp_path):
    set_config(tmp_path, hub_config={"hub_backend": "https://localhost:8080"})
    assert main(["list"]) == 3
    set_config(tmp_path, hub_config={"hub_backend": "https://hub.example.com"})
    assert told()[0] == "https://hub.example.com"
