"""Commands and files of a sandbox, the same on every engine."""

from __future__ import annotations

import base64
import os
from typing import Any, ClassVar

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import FileAccessError, ToolInputInvalid, ToolTimeout
from aenv_ray.testing.contract_bench import (
    LONG_S,
    evaluate,
    eventually,
    execute,
    is_gone,
    request,
    sleeper,
    unique,
)

_OUTPUT_LIMIT_BYTES = 10 * 1024 * 1024


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def _write(sandbox: Sandbox, path: str, data: bytes, **arguments: Any) -> int:
    params = {"arguments": {"path": path, "data": _text(data), **arguments}}
    size: int = await request(sandbox, "aenv/write_file", params)
    return size


async def _read(sandbox: Sandbox, path: str, **arguments: Any) -> bytes:
    params = {"arguments": {"path": path, **arguments}}
    data: bytes = await request(sandbox, "aenv/read_file", params)
    return data


async def _list(sandbox: Sandbox, path: str) -> Any:
    return await request(sandbox, "aenv/list_files", {"arguments": {"path": path}})


class WorkspaceTests:
    """Commands and files."""

    large_mib: ClassVar[int] = 50
    """Size in MiB of the file that is written and read back; less where this is slow."""

    # --- commands -----------------------------------------------------------------------------

    async def test_an_exit_code_is_a_result(self, shared: Sandbox) -> None:
        result = await execute(shared, "printf out; printf err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"out", b"err")
        assert not result.truncated
        killed = await execute(shared, "kill -9 $$")
        assert killed.exit_code == 128 + 9

    async def test_a_missing_program_is_a_result(self, shared: Sandbox) -> None:
        result = await execute(shared, ["/no/such/program", "x"])
        assert result.exit_code == 127
        assert b"/no/such/program" in result.stderr

    async def test_a_program_that_cannot_run_is_a_result(self, shared: Sandbox) -> None:
        name = unique("no-program")
        program = {"path": name, "data": _text(b"\0\0\0\0"), "mode": 0o755}
        await request(shared, "aenv/write_file", {"arguments": program})
        result = await execute(shared, [f"./{name}"])
        assert result.exit_code == 126
        assert name.encode() in result.stderr

    async def test_stdin_variables_and_directory_reach_the_command(self, shared: Sandbox) -> None:
        stdin = bytes(range(256)) * 4096
        copied = await execute(shared, ["cat"], stdin=_text(stdin))
        assert copied.stdout == stdin
        result = await execute(shared, "echo $ONE; pwd", env={"ONE": "1"}, cwd="/usr")
        assert result.text() == "1\n/usr\n"
        unread = await execute(shared, ["true"], stdin=_text(stdin))
        assert unread.exit_code == 0

    async def test_an_invalid_command_is_refused(self, shared: Sandbox) -> None:
        with pytest.raises(FileAccessError, match="/no/such/place"):
            await execute(shared, ["true"], cwd="/no/such/place")
        for command in ([], ["a\0b"]):
            with pytest.raises(ToolInputInvalid):
                await execute(shared, command)

    async def test_a_timeout_kills_the_command_and_all_it_started(self, shared: Sandbox) -> None:
        """Invariant 3."""
        command = sleeper()
        nap = " ".join(command)
        script = f"{nap} & ({nap} & wait) & setsid {nap} & wait"
        with pytest.raises(ToolTimeout):
            await execute(shared, script, timeout_s=0.5)
        await eventually(lambda: is_gone(shared, command[1]), "every sleep is dead")

    async def test_long_output_is_truncated_with_a_note(self, shared: Sandbox) -> None:
        """Invariant 12."""
        result = await execute(shared, "head -c 11000000 /dev/zero; echo end >&2")
        assert result.truncated
        assert len(result.stdout) == _OUTPUT_LIMIT_BYTES
        assert result.stderr == b"end\n"

    async def test_a_background_program_does_not_hold_the_command(self, shared: Sandbox) -> None:
        result = await execute(shared, "sleep 20 & echo started $!", timeout_s=LONG_S)
        said, pid = result.text().split()
        assert said == "started"
        assert result.duration_s < LONG_S
        assert (await execute(shared, f"kill -9 {pid}")).exit_code == 0

    # --- files --------------------------------------------------------------------------------

    @pytest.mark.parametrize("data", [b"", b"text\n", "ü\r\n".encode(), bytes(range(256))])
    async def test_a_file_is_read_back_unchanged(self, shared: Sandbox, data: bytes) -> None:
        directory = f"{unique('a')}/b"
        assert await _write(shared, f"{directory}/c.bin", data) == len(data)
        assert await _read(shared, f"{directory}/c.bin") == data
        (entry,) = await _list(shared, directory)
        assert (entry.name, entry.type, entry.size_bytes) == ("c.bin", "file", len(data))

    async def test_a_large_file_is_read_back_unchanged(self, shared: Sandbox) -> None:
        data = os.urandom(1 << 20) * self.large_mib
        large = unique("large")
        assert await _write(shared, large, data) == len(data)
        assert await _read(shared, large) == data
        await execute(shared, ["rm", large])

    async def test_a_file_is_read_in_pieces(self, shared: Sandbox) -> None:
        digits = unique("digits")
        await _write(shared, digits, b"0123456789")
        assert await _read(shared, digits, offset=2, length=3) == b"234"
        assert await _read(shared, digits, offset=8, length=100) == b"89"
        assert await _read(shared, digits, offset=100) == b""
        with pytest.raises(ToolInputInvalid):
            await _read(shared, digits, offset=-1)

    async def test_a_file_is_appended_to_and_replaced(self, shared: Sandbox) -> None:
        log = unique("log")
        assert await _write(shared, log, b"one") == 3
        assert await _write(shared, log, b"two", append=True) == 6
        assert await _read(shared, log) == b"onetwo"
        assert await _write(shared, log, b"new", mode=0o750) == 3
        mode = f"import os; result = os.stat({log!r}).st_mode & 0o777"
        assert await evaluate(shared, mode) == 0o750
        await _write(shared, log, b"again")
        assert await evaluate(shared, mode) == 0o750

    @pytest.mark.parametrize("path", ["missing", ".", "\0", "missing/x", "x" * 300, "pipe"])
    async def test_what_cannot_be_read_is_a_typed_error(self, shared: Sandbox, path: str) -> None:
        await execute(shared, "[ -p pipe ] || mkfifo pipe")
        with pytest.raises(FileAccessError) as raised:
            await _read(shared, path)
        assert raised.value.instance_id == shared.instance_id

    @pytest.mark.parametrize("path", [".", "/proc/contract", "\0", "file/below"])
    async def test_what_cannot_be_written_is_a_typed_error(
        self, shared: Sandbox, path: str
    ) -> None:
        await _write(shared, "file", b"x")
        with pytest.raises(FileAccessError):
            await _write(shared, path, b"x")
        assert await _read(shared, "file") == b"x"

    async def test_invalid_base64_is_refused(self, shared: Sandbox) -> None:
        arguments = {"path": "x", "data": "no base64!"}
        with pytest.raises(ToolInputInvalid, match="base64"):
            await request(shared, "aenv/write_file", {"arguments": arguments})

    @pytest.mark.parametrize("mode", [-1, 0o10000, 10**30])
    async def test_an_invalid_mode_is_refused(self, shared: Sandbox, mode: int) -> None:
        arguments = {"path": "x", "data": _text(b"x"), "mode": mode}
        with pytest.raises(ToolInputInvalid, match="mode"):
            await request(shared, "aenv/write_file", {"arguments": arguments})

    async def test_a_listing_names_every_kind_of_entry(self, shared: Sandbox) -> None:
        name = unique("d")
        await execute(shared, f"mkdir {name}/e -p; cd {name}; touch f; ln -s f l; mkfifo p")
        entries = await _list(shared, name)
        assert [(entry.name, entry.type) for entry in entries] == [
            ("e", "directory"), ("f", "file"), ("l", "symlink"), ("p", "other"),
        ]  # fmt: skip
        with pytest.raises(FileAccessError):
            await _list(shared, "missing")
