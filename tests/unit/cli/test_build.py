"""`aenv build` records the image in config.json, atomically."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aenv_ray.cli import build
from aenv_ray.errors import ConfigError, EnvironmentNotFound
from aenv_ray.project import project

_FULL = """
import resource, sys
from pathlib import Path
from aenv_ray.cli import build
from aenv_ray.errors import ConfigError
resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))  # as if the disk took no more
try:
    build.record_image(Path(sys.argv[1]), "r:1", "sha256:00")
except ConfigError as exc:
    sys.exit(0 if "cannot be recorded" in str(exc) and "sha256:00" in exc.hint else 2)
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    earlier = [{"type": "image", "content": "old"}, {"type": "dataset", "content": "kept"}]
    path.write_text(json.dumps({"name": "täglich", "artifacts": earlier}))
    path.chmod(0o640)
    return path


def test_an_image_replaces_an_earlier_one_and_nothing_else(config):
    build.record_image(config, "r:1", "r@sha256:00")
    assert json.loads(config.read_text()) == {
        "name": "täglich",
        "artifacts": [
            {"type": "dataset", "content": "kept"},
            {"type": "image", "content": "r:1", "digest": "r@sha256:00"},
        ],
    }
    assert "täglich" in config.read_text()
    assert config.stat().st_mode & 0o777 == 0o640


def test_a_symbolic_link_stays_one(config, tmp_path):
    link = tmp_path / "project" / "config.json"
    link.parent.mkdir()
    link.symlink_to(config)
    build.record_image(link, "r:1", "sha256:00")
    assert link.is_symlink()
    assert "sha256:00" in config.read_text()


def test_a_full_disk_leaves_the_file_unchanged(config):
    before = config.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(config)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert config.read_bytes() == before
    assert [path.name for path in config.parent.iterdir()] == ["config.json"]


def test_a_config_that_became_invalid_is_reported(config):
    config.write_text("{")
    with pytest.raises(ConfigError, match="was built, but cannot be recorded"):
        build.record_image(config, "r:1", "sha256:00")


def test_a_read_only_directory_is_reported_before_the_build(monkeypatch, config):
    build.check_writable(config)
    monkeypatch.setattr("os.access", lambda *_: False)  # nothing is closed to root
    with pytest.raises(ConfigError, match="is not writable"):
        build.check_writable(config)


def test_a_built_in_environment_is_named_and_a_directory_of_that_name_comes_first(tmp_path):
    assert build.project_of(tmp_path, Path("code")).path == project.builtins()["code"]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "config.json").write_text('{"name": "mine", "version": "1.0.0"}')
    assert build.project_of(tmp_path, Path("code")).config.name == "mine"
    with pytest.raises(EnvironmentNotFound, match="no project directory"):
        build.project_of(tmp_path, Path("coda"))
