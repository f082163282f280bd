"""The file of `aenv hub backup` appears complete or not at all; a pipe can be restored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv_ray.cli.hub import _read, _written
from aenv_ray.cli.main import main
from aenv_ray.errors import ConfigError


def test_a_backup_that_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    file = tmp_path / "hub.tar"
    file.write_bytes(b"of yesterday")
    with pytest.raises(ConfigError, match="Redis"), _written(file):
        raise ConfigError("Redis is down")
    assert file.read_bytes() == b"of yesterday"
    assert list(tmp_path.iterdir()) == [file]


def test_a_disk_that_is_full_is_an_error_with_the_path(tmp_path: Path) -> None:
    file = tmp_path / "hub.tar"
    with pytest.raises(ConfigError, match="cannot be written: No space"), _written(file):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "hub.tar"
    file.mkdir()
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"), _written(file):
        pass
    assert list(tmp_path.iterdir()) == [file]


def test_a_pipe_such_as_the_output_of_a_decryption_can_be_read_twice() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as target:
        target.write(b"decrypted")
    try:
        with _read(Path(f"/dev/fd/{reader}")) as source:
            assert source.read() == b"decrypted"
            source.seek(0)
            assert source.read() == b"decrypted"
    finally:
        os.close(reader)


def test_a_backup_replaces_no_file_unless_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hub.tar"
    file.write_bytes(b"of yesterday")
    assert main(["hub", "backup", str(file)]) == 3
    said = capsys.readouterr().err
    assert "already exists" in said
    assert "--force" in said
    assert file.read_bytes() == b"of yesterday"
