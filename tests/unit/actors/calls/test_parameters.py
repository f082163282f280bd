"""What a caller gets wrong is refused where it calls, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.actors.calls import parameters as call_parameters
from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.calls.wire import CallMessage
from aenv_ray.actors.fabric.create_options import group_size
from aenv_ray.client.over_http import HttpInstance
from aenv_ray.clock import FakeClock
from aenv_ray.errors import ConfigError, FileAccessError, ToolInputInvalid
from aenv_ray.ids import InstanceId
from aenv_ray.project import project


class Sent:
    """A host that keeps what it is sent."""

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
    ("a pair without arguments", lambda h: h.call_tools.remote([("echo",)])),
    ("a name instead of a pair", lambda h: h.call_tools.remote(["inc"])),
    ("a name of two letters", lambda h: h.call_tools.remote(["ls"])),
    ("calls that are a mapping", lambda h: h.call_tools.remote({"echo": {}})),
    ("calls that are nothing", lambda h: h.call_tools.remote(None)),
    ("no command", lambda h: h.exec.remote(None)),
    ("a command in bytes", lambda h: h.exec.remote(b"ls")),
    ("input that is text", lambda h: h.exec.remote("cat", stdin="text")),
    ("variables that are text", lambda h: h.exec.remote("env", env="A=1")),
    ("data that are nothing", lambda h: h.write_file.remote("z", None)),
    ("data that are a number", lambda h: h.write_file.remote("z", 5)),
    ("text that no UTF-8 holds", lambda h: h.write_file.remote("z", "\ud800")),
]


@pytest.mark.parametrize("call", [c for _, c in WRONG], ids=[name for name, _ in WRONG])
def test_wrong_parameters_are_refused_with_a_hint_and_send_nothing(
    handle: EnvHandle, host: Sent, call: Callable[[Any], Any]
) -> None:
    with pytest.raises(ToolInputInvalid) as caught:
        call(handle)
    assert caught.value.hint
    assert host.messages == []


@pytest.mark.parametrize("arguments", ["", 0, [], False, (), "text", 7, [1]])
@pytest.mark.parametrize("method", ["call_tool", "call_function", "stream_tool"])
def test_only_none_is_no_arguments(
    handle: EnvHandle, host: Sent, method: str, arguments: Any
) -> None:
    """What is false is not nothing: a policy's mistake is told to it."""
    with pytest.raises(ToolInputInvalid, match="not an object") as caught:
        getattr(handle, method).remote("echo", arguments)
    assert caught.value.tool_name == "echo"
    assert host.messages == []


@pytest.mark.parametrize("arguments", ["", 0, []])
def test_rewards_and_health_checks_take_objects_too(handle: EnvHandle, arguments: Any) -> None:
    for method in (handle.call_reward, handle.check_health):
        with pytest.raises(ToolInputInvalid, match="not an object"):
            method.remote(arguments)


@pytest.mark.parametrize("arguments", ["", 0, [], "text"])
async def test_over_http_only_none_is_no_arguments(arguments: Any) -> None:
    instance = HttpInstance("127.0.0.1:9")
    with pytest.raises(ToolInputInvalid, match="not an object"):
        await instance.call_tool("echo", arguments)
    with pytest.raises(ToolInputInvalid, match="not an object"):
        await instance.check_health(arguments)
    await instance.close()


def test_none_is_no_arguments_also_in_a_batch(handle: EnvHandle, host: Sent) -> None:
    handle.call_tool.remote("echo")
    handle.call_tools.remote([("echo", None), ["echo", {"a": 1}]])
    assert b'"arguments":{}' in host.messages[0].params
    batch = b'[{"name":"echo","arguments":{}},{"name":"echo","arguments":{"a":1}}]'
    assert batch in host.messages[1].params


def test_a_batch_leaves_one_calls_wrong_arguments_to_that_call(
    handle: EnvHandle, host: Sent
) -> None:
    handle.call_tools.remote([("echo", ""), ("echo", {})])
    assert b'"arguments":""' in host.messages[0].params


@pytest.mark.parametrize("call_id", ["", 7, b"id"])
def test_an_id_that_is_none_is_refused(handle: EnvHandle, call_id: Any) -> None:
    """Invariant 1: two calls of one empty id would be one call."""
    with pytest.raises(ConfigError, match="call_id"):
        handle.call_tool.remote("echo", call_id=call_id)


def test_only_calls_sent_right_behind_another_say_when(host: Sent) -> None:
    """What the host may send together; who waits for each answer never waits for others, too."""
    clock = FakeClock()
    handle = EnvHandle(InstanceId("env-abcdefgh"), "env@1.0.0", host, None, clock)
    for pause_s in (0.0, 0.0001, 0.001, -60.0):
        clock.advance(pause_s)
        handle.call_tool.remote("echo")
    sent_at = [message.sent_at for message in host.messages]
    assert sent_at[0] == 0.0
    assert sent_at[1] > 0.0
    assert sent_at[2:] == [0.0, 0.0]


def test_a_command_without_time_is_refused_like_a_call(handle: EnvHandle) -> None:
    with pytest.raises(ConfigError, match="timeout 0"):
        handle.exec.remote("true", timeout_s=0)


def test_a_file_beyond_one_write_is_refused_with_size_and_limit(
    handle: EnvHandle, host: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_parameters, "MAX_WRITE_BYTES", 9)
    handle.write_file.remote("z", b"123456789")
    with pytest.raises(FileAccessError, match=r"'z'.* 10 bytes .* 9 ") as caught:
        handle.write_file.remote("z", b"1234567890")
    assert "append=True" in str(caught.value.hint)
    assert caught.value.instance_id == "env-abcdefgh"
    assert len(host.messages) == 1


def test_the_largest_write_fits_into_one_call(handle: EnvHandle, host: Sent) -> None:
    handle.write_file.remote("d/" * 2000, bytes(call_parameters.MAX_WRITE_BYTES))
    assert len(host.messages) == 1


@pytest.mark.parametrize("reference", [None, 5, b"mini-terminal", ["mini-terminal"]])
def test_an_environment_that_is_no_name_is_refused(reference: Any) -> None:
    with pytest.raises(ConfigError, match="environment") as caught:
        project.resolve(reference)
    assert caught.value.hint
    assert project.resolve(Path(project.builtins()["mini-terminal"])).reference


@pytest.mark.parametrize("count", ["3", 1.5, True, None, 0, -1])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(ConfigError, match="count"):
        group_size(count)
    assert group_size(3) == 3


@pytest.mark.parametrize("handles", [[1], [None], ["env-abcdefgh"]])
def test_what_is_no_handle_is_not_released(handles: Any) -> None:
    with pytest.raises(ConfigError, match="not a handle"):
        aenv_ray.release_many(handles)
