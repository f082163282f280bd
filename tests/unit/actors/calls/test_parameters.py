"""Invalid parameters are rejected in the caller's process, before sending."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.actors.calls import parameters
from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.calls.wire import CallMessage
from aenv_ray.actors.fabric.create_options import group_size
from aenv_ray.client.over_http import HttpInstance
from aenv_ray.errors import ConfigError, FileAccessError, ToolInputInvalid
from aenv_ray.ids import InstanceId
from aenv_ray.project import project
from tests.fake_clock import FakeClock


class Sent:
    """A host that records the messages it receives."""

    def __init__(self) -> None:
        self.messages: list[CallMessage] = []
        self.call = self

    def remote(self, data: bytes) -> None:
        self.messages.append(CallMessage.decode(data))


@pytest.fixture
def host() -> Sent:
    return Sent()


@pytest.fixture
def handle(host: Sent) -> EnvHandle:
    return EnvHandle(InstanceId("env-abcdefgh"), "env@1.0.0", host, None)


WRONG: list[tuple[str, Callable[[Any], Any]]] = [
    ("a pair of one item", lambda h: h.call_tools.remote([("echo",)])),
    ("a name instead of a pair", lambda h: h.call_tools.remote(["inc"])),
    ("a name of two letters", lambda h: h.call_tools.remote(["ls"])),
    ("a mapping as calls", lambda h: h.call_tools.remote({"echo": {}})),
    ("no calls", lambda h: h.call_tools.remote(None)),
    ("no command", lambda h: h.exec.remote(None)),
    ("a command in bytes", lambda h: h.exec.remote(b"ls")),
    ("text as input", lambda h: h.exec.remote("cat", stdin="text")),
    ("text as variables", lambda h: h.exec.remote("env", env="A=1")),
    ("no data", lambda h: h.write_file.remote("z", None)),
    ("a number as data", lambda h: h.write_file.remote("z", 5)),
    ("text that UTF-8 cannot encode", lambda h: h.write_file.remote("z", "\ud800")),
]


@pytest.mark.parametrize("call", [c for _, c in WRONG], ids=[name for name, _ in WRONG])
def test_invalid_parameters_are_rejected_with_a_hint_before_sending(
    handle: EnvHandle, host: Sent, call: Callable[[Any], Any]
) -> None:
    with pytest.raises(ToolInputInvalid) as caught:
        call(handle)
    assert caught.value.hint
    assert host.messages == []


@pytest.mark.parametrize("arguments", ["", 0, [], False, (), "text", 7, [1]])
@pytest.mark.parametrize("method", ["call_tool", "call_function", "stream_tool"])
def test_only_none_means_no_arguments(
    handle: EnvHandle, host: Sent, method: str, arguments: Any
) -> None:
    """Other false values are mistakes of a policy, and must be reported."""
    with pytest.raises(ToolInputInvalid, match="not an object") as caught:
        getattr(handle, method).remote("echo", arguments)
    assert caught.value.tool_name == "echo"
    assert host.messages == []


@pytest.mark.parametrize("arguments", ["", 0, []])
def test_rewards_and_health_checks_also_require_mappings(handle: EnvHandle, arguments: Any) -> None:
    for method in (handle.call_reward, handle.check_health):
        with pytest.raises(ToolInputInvalid, match="not an object"):
            method.remote(arguments)


@pytest.mark.parametrize("arguments", ["", 0, [], "text"])
async def test_over_http_only_none_means_no_arguments(arguments: Any) -> None:
    instance = HttpInstance("127.0.0.1:9")
    with pytest.raises(ToolInputInvalid, match="not an object"):
        await instance.call_tool("echo", arguments)
    with pytest.raises(ToolInputInvalid, match="not an object"):
        await instance.check_health(arguments)
    await instance.close()


def test_none_means_no_arguments_also_in_a_batch(handle: EnvHandle, host: Sent) -> None:
    handle.call_tool.remote("echo")
    handle.call_tools.remote([("echo", None), ["echo", {"a": 1}]])
    assert b'"arguments":{}' in host.messages[0].params
    batch = b'[{"name":"echo","arguments":{}},{"name":"echo","arguments":{"a":1}}]'
    assert batch in host.messages[1].params


def test_invalid_arguments_in_a_batch_fail_only_their_call(handle: EnvHandle, host: Sent) -> None:
    handle.call_tools.remote([("echo", ""), ("echo", {})])
    assert b'"arguments":""' in host.messages[0].params


@pytest.mark.parametrize("call_id", ["", 7, b"id"])
def test_an_invalid_call_id_is_rejected(handle: EnvHandle, call_id: Any) -> None:
    """Invariant 1: two calls with an empty id would be one call."""
    with pytest.raises(ConfigError, match="call_id"):
        handle.call_tool.remote("echo", call_id=call_id)


def test_only_pipelined_calls_carry_a_time(host: Sent) -> None:
    """The host may delay pipelined calls, but never the calls of a caller that awaits each."""
    clock = FakeClock()
    handle = EnvHandle(InstanceId("env-abcdefgh"), "env@1.0.0", host, None, clock)
    for pause_s in (0.0, 0.0001, 0.001, -60.0):
        clock.advance(pause_s)
        handle.call_tool.remote("echo")
    sent_at = [message.sent_at for message in host.messages]
    assert sent_at[0] == 0.0
    assert sent_at[1] > 0.0
    assert sent_at[2:] == [0.0, 0.0]


def test_a_command_with_a_zero_timeout_is_rejected(handle: EnvHandle) -> None:
    with pytest.raises(ConfigError, match="timeout 0"):
        handle.exec.remote("true", timeout_s=0)


def test_an_oversized_write_is_rejected_with_size_and_limit(
    handle: EnvHandle, host: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "MAX_WRITE_BYTES", 9)
    handle.write_file.remote("z", b"123456789")
    with pytest.raises(FileAccessError, match=r"'z'.* 10 bytes .* 9 ") as caught:
        handle.write_file.remote("z", b"1234567890")
    assert "append=True" in str(caught.value.hint)
    assert caught.value.instance_id == "env-abcdefgh"
    assert len(host.messages) == 1


def test_the_largest_write_fits_into_one_call(handle: EnvHandle, host: Sent) -> None:
    handle.write_file.remote("d/" * 2000, bytes(parameters.MAX_WRITE_BYTES))
    assert len(host.messages) == 1


@pytest.mark.parametrize("reference", [None, 5, b"mini-terminal", ["mini-terminal"]])
def test_an_environment_reference_of_the_wrong_type_is_rejected(reference: Any) -> None:
    with pytest.raises(ConfigError, match="environment") as caught:
        project.resolve(reference)
    assert caught.value.hint
    assert project.resolve(Path(project.builtins()["mini-terminal"])).reference


@pytest.mark.parametrize("count", ["3", 1.5, True, None, 0, -1])
def test_an_invalid_count_is_rejected(count: Any) -> None:
    with pytest.raises(ConfigError, match="count"):
        group_size(count)
    assert group_size(3) == 3


@pytest.mark.parametrize("handles", [[1], [None], ["env-abcdefgh"]])
def test_release_many_rejects_values_that_are_not_handles(handles: Any) -> None:
    with pytest.raises(ConfigError, match="is not an EnvHandle"):
        aenv_ray.release_many(handles)
