"""The host's side of the launcher: what it waits for has a deadline and a name."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.process import launcher_client
from aenv_ray.engines.process.launcher_client import LauncherClient
from aenv_ray.errors import DeadlineExceeded, FabricUnavailable


class SilentLauncher:
    """Answers what it is told to answer, and nothing else."""

    def __init__(self) -> None:
        self.answers: dict[str, list[dict[str, Any]]] = {"hello": [{"instances": []}]}
        self.heard: list[str] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        while line := await reader.readline():
            message = json.loads(line)
            self.heard.append(message["op"])
            for answer in self.answers.get(message["op"], []):
                writer.write(json.dumps({"seq": message["seq"], **answer}).encode() + b"\n")
        writer.close()


@pytest.fixture
def launcher() -> SilentLauncher:
    return SilentLauncher()


@pytest.fixture
async def client(launcher: SilentLauncher) -> AsyncIterator[LauncherClient]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ae-") as directory:  # a short path
        server = await asyncio.start_unix_server(launcher.serve, f"{directory}/launcher.sock")
        client = LauncherClient(Path(directory), "h", 1, lambda *_: None, lambda: None)
        yield client
        await client.close()
        for writer in launcher.writers:
            writer.close()
            await writer.wait_closed()
        server.close()


async def test_an_answer_that_never_comes_ends_at_its_deadline(
    client: LauncherClient, launcher: SilentLauncher
) -> None:
    """Invariant 9: and the error names what was waited for."""
    await client.connect()
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s .* answer to 'list'") as raised:
        await client.ask("list", deadline_s=0.05)
    assert str(client.directory) in str(raised.value.hint)
    launcher.answers["list"] = [{"instances": ["x"]}]
    assert (await client.ask("list"))["instances"] == ["x"]


async def test_one_answer_of_several_that_never_comes_ends_at_its_deadline(
    client: LauncherClient, launcher: SilentLauncher
) -> None:
    """Invariant 9."""
    launcher.answers["start"] = [{"id": "a"}, {"id": "b"}]
    await client.connect()
    seq, answers = client.send("start", items=[])
    received = [(await client.receive(answers, "a start", 10.0))["id"] for _ in range(2)]
    assert received == ["a", "b"]
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s .* a start"):
        await client.receive(answers, "a start", 0.05)
    client.forget(seq)


async def test_a_launcher_that_does_not_know_us_is_not_used(
    client: LauncherClient, launcher: SilentLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the greeting, what is started would belong to no host."""
    greeting = launcher.answers.pop("hello")
    ask = client.ask

    async def ask_briefly(op: str, **fields: Any) -> dict[str, Any]:
        return await ask(op, deadline_s=0.05, **fields)

    monkeypatch.setattr(client, "ask", ask_briefly)
    with pytest.raises(DeadlineExceeded, match="'hello'"):
        await client.connect()
    assert not client.is_connected
    with pytest.raises(FabricUnavailable):
        client.send("list")
    launcher.answers["hello"] = greeting
    monkeypatch.undo()
    await client.connect()
    assert client.is_connected
    assert launcher.heard == ["hello", "hello"]


async def test_the_launchers_own_deadlines_are_the_shorter_ones() -> None:
    """The launcher knows why something takes long, and says it; this side knows only that."""
    from aenv_ray.engines.process import launcher, templates

    assert launcher_client.BOOT_DEADLINE_S > launcher.BOOT_DEADLINE_S
    assert launcher_client.TEMPLATE_DEADLINE_S > 2 * templates.TEMPLATE_DEADLINE_S


async def test_nothing_is_sent_to_a_launcher_that_has_just_ended(client: LauncherClient) -> None:
    """Its end is noticed a moment later; uvloop raises RuntimeError at such a write."""
    await client.connect()
    assert client._writer is not None
    client._writer.close()
    with pytest.raises(FabricUnavailable, match="has ended"):
        client.send("list")
