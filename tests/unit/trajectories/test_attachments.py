"""Attachments: what records do not hold is beside them, by digest."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aenv_ray.cli.main import app
from aenv_ray.errors import ConfigError
from aenv_ray.trajectories import Attachment, Episode, ShardFormat, ShardWriter, read
from aenv_ray.trajectories.attachments import TEXT_LIMIT, attached, attachment_of
from aenv_ray.trajectories.files import EpisodeFile
from aenv_ray.trajectories.shards import open_output
from tests.unit.trajectories.episodes import episode, step

PNG = b"\x89PNG not really"


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _block(data: bytes, media_type: Any = "image/png") -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": media_type}


def _with_image(index: int, data: bytes = PNG) -> Episode:
    found = attached([_block(data)], "")
    made = episode(index, steps=(step(attachments=tuple(found)),))
    made.contents.update({one.digest: content for one, content in found.items()})
    return made


@pytest.mark.parametrize(
    ("block", "data", "media_type"),
    [
        (_block(PNG), PNG, "image/png"),
        (_block(PNG, "<script>"), PNG, "application/octet-stream"),
        (_block(PNG, None), PNG, "application/octet-stream"),
        ({"type": "audio", "data": "no base64!", "mimeType": "a/wav"}, b"no base64!", "a/wav"),
        (
            {"type": "resource", "resource": {"blob": "aGk=", "mimeType": "application/pdf"}},
            b"hi",
            "application/pdf",
        ),
        (
            {"type": "resource", "resource": {"text": "hi", "mimeType": "text/csv"}},
            b"hi",
            "text/csv",
        ),
    ],
)  # fmt: skip
def test_data_in_a_result_is_attached(block: Any, data: bytes, media_type: str) -> None:
    found = attached([{"type": "text", "text": "see"}, block], "see")
    expected = Attachment(digest=_digest(data), size_bytes=len(data), media_type=media_type)
    assert found == {expected: data}


@pytest.mark.parametrize("block", [None, "text", {"type": "image"}, {"type": "image", "data": 3}])
def test_what_has_no_content_is_not_attached(block: Any) -> None:
    assert attached([block], "short") == {}


def test_a_text_is_attached_if_the_record_truncates_it() -> None:
    """Invariant 12."""
    assert attached([{"type": "text", "text": "x" * TEXT_LIMIT}], "x" * TEXT_LIMIT) == {}
    text = "é\ud800" * TEXT_LIMIT
    ((one, data),) = attached([], text).items()
    assert (one.media_type, one.size_bytes) == ("text/plain", len(data))
    assert data.decode() == "é\ufffd" * TEXT_LIMIT


@pytest.mark.parametrize("name", ["run1.jsonl", "run1", "run1.parquet"])
def test_attachments_are_read_from_beside_the_records(tmp_path: Path, name: str) -> None:
    """Equal contents have one file, and records do not contain them."""
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    output = open_output(tmp_path / name)
    for index in range(2):
        output.write(_with_image(index))
    output.write(_with_image(2, b"other"))
    output.close()
    assert output.failure is None
    episodes = read(tmp_path / name)
    (found,) = episodes[0].steps[0].attachments
    assert found == Attachment(digest=_digest(PNG), size_bytes=len(PNG), media_type="image/png")
    assert episodes.attachment(found) == PNG
    assert episodes.attachment(_digest(b"other")) == b"other"
    place = tmp_path / "attachments" if name.endswith("jsonl") else tmp_path / name / "attachments"
    assert len(list(place.iterdir())) == 2
    assert not episodes[0].contents


def test_a_missing_or_changed_attachment_is_an_error(tmp_path: Path) -> None:
    file = EpisodeFile(tmp_path / "run1.jsonl")
    file.write(_with_image(0))
    file.close()
    episodes = read(tmp_path / "run1.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        episodes.attachment(_digest(b"nothing"))
    with pytest.raises(ConfigError, match="not the digest"):
        episodes.attachment("sha256:../../etc/passwd")
    (path,) = (tmp_path / "attachments").iterdir()
    path.write_bytes(b"changed")
    with pytest.raises(ConfigError, match="does not have the content"):
        episodes.attachment(_digest(PNG))


def test_an_attachment_that_cannot_be_written_is_a_failed_write(tmp_path: Path) -> None:
    """A record never lacks its attachments."""
    (tmp_path / "attachments").write_text("a file")
    file = EpisodeFile(tmp_path / "run1.jsonl")
    file.write(_with_image(0))
    file.close()
    assert file.failure is not None
    assert (tmp_path / "run1.jsonl").read_text() == ""


def test_what_is_no_regular_file_gets_records_only(caplog: pytest.LogCaptureFixture) -> None:
    """Invariant 12: it is said. There is no place beside a device or a pipe."""
    file = EpisodeFile(Path("/dev/null"))
    file.write(_with_image(0))
    tools = attachment_of(b"[]", "application/json")
    with_tools = episode(1, tools=tools.model_dump())
    with_tools.contents[tools.digest] = b"[]"
    file.write(with_tools)
    file.close()
    assert file.failure is None
    (warning,) = (record.message for record in caplog.records)
    assert "attachments of episode 0 are not written" in warning
    assert not Path("/dev/attachments").exists()


def test_a_replaced_run_leaves_no_attachments(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "run1", "w", form=ShardFormat.JSONL)
    writer.write(_with_image(0))
    writer.close()
    (tmp_path / "run1" / "attachments" / "mine.txt").touch()
    open_output(tmp_path / "run1").close()
    left = [path.name for path in (tmp_path / "run1" / "attachments").iterdir()]
    assert left == ["mine.txt"]


def test_filtered_episodes_take_their_attachments_along(tmp_path: Path) -> None:
    output = open_output(tmp_path / "run1")
    output.write(_with_image(0))
    output.write(_with_image(1, b"other").model_copy(update={"reward": 0.0}))
    output.close()
    (tmp_path / "new").mkdir()
    target = tmp_path / "new" / "solved.jsonl"
    arguments = ["trajectories", "filter", str(tmp_path / "run1"), "--out", str(target)]
    done = CliRunner().invoke(app, [*arguments, "--min-reward", "1"])
    assert done.exit_code == 0, done.output
    assert read(target).attachment(_digest(PNG)) == PNG
    assert len(list((tmp_path / "new" / "attachments").iterdir())) == 1
    shown = CliRunner().invoke(app, ["trajectories", "show", str(target), "0"])
    assert f"attachment {_digest(PNG)}, image/png, {len(PNG)} bytes" in shown.output


def test_a_record_without_attachments_is_read() -> None:
    """Of an older version."""
    record = episode(0).model_dump(mode="json")
    del record["tools"]
    for one in record["steps"]:
        del one["attachments"]
    assert Episode.model_validate(record).attachments == ()
