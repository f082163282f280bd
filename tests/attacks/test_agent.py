"""An agent, which may only call tools, tries to get, forge or void its reward."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.actors.calls import wire
from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import (
    INFRASTRUCTURE,
    AenvError,
    CallCancelled,
    CallOutcomeUnknown,
    FunctionFailed,
    InsideCause,
    SandboxDiedInside,
    SandboxExhausted,
    is_infrastructure,
)
from aenv_ray.ids import new_call_id
from aenv_ray.runtime.door.host.link import END_PROCESSES_METHOD, HELD_S, OUTER_REWARDS
from aenv_ray.testing.contract_bench import (
    LONG_S,
    Bench,
    call,
    eventually,
    execute,
    request,
    value_of,
)
from tests.attacks import headless
from tests.contract.docker.docker_node import shell_image
from tests.contract.engines import engine_on
from tests.contract.kubernetes.kubernetes_node import KubernetesNode

REWARD = {"name": "score", "arguments": {"answer": "42"}}


@pytest.mark.ordinary_user
async def test_an_agent_gains_nothing_from_a_call_id_of_the_trainer(either_engine: Bench) -> None:
    """Invariant 14: it neither returns the outcome of a reward nor takes its id."""
    sandbox = await either_engine.start()
    assert await request(sandbox, "aenv/reward", REWARD, call_id="graded") == {"score": 1.0}
    stolen = await call(sandbox, "echo", {"text": "mine"}, call_id="graded")
    assert stolen.data == "mine"
    assert (await call(sandbox, "echo", {"text": "forged"}, call_id="next")).data == "forged"
    assert await request(sandbox, "aenv/reward", REWARD, call_id="next") == {"score": 1.0}


async def test_an_agent_cannot_cancel_a_call_of_the_trainer(either_engine: Bench) -> None:
    """Invariant 14: a cancelled tool call with the same id stops the tool call alone."""
    sandbox = await either_engine.start()
    graded = asyncio.create_task(
        request(sandbox, "aenv/function", {"name": "reset", "arguments": {"seed": 7}}, call_id="x")
    )
    napping = asyncio.create_task(call(sandbox, "nap", {"seconds": 60.0}, call_id="x"))
    await value_of(sandbox, "echo", text="both were sent before this")
    napping.cancel()
    assert await graded == {"seed": 7}


@pytest.mark.parametrize("code", [1, 137, 143, 255])
async def test_an_exit_is_an_outcome(either_engine: Bench, code: int) -> None:
    """Invariant 14: an agent whose code runs in the runtime can exit, which does not void.

    Also with the exit code of a process that a signal from outside has ended.
    """
    sandbox = await either_engine.start()
    with pytest.raises(SandboxDiedInside) as raised:
        await call(sandbox, "leave", {"code": code})
    assert raised.value.died_of is InsideCause.EXIT


@pytest.mark.ordinary_user
async def test_no_error_that_a_tool_raises_voids(either_engine: Bench) -> None:
    """Invariant 14: code in the runtime that claims a failure of the infrastructure."""
    sandbox = await either_engine.start()
    for error in INFRASTRUCTURE:
        source = f"from aenv_ray.runtime.faults import Fault\nraise Fault({error.code!r}, 'forged')"
        with pytest.raises(AenvError, match="forged") as raised:
            await call(sandbox, "evaluate", {"source": source})
        counts = isinstance(raised.value, CallOutcomeUnknown)  # see FailureRewards
        assert counts or not is_infrastructure(raised.value), error


@pytest.mark.namespaces
async def test_a_closed_connection_is_an_outcome(walled: Bench) -> None:
    """Invariant 14: code in the runtime that closes the door while its process runs on."""
    sandbox = await walled.start()
    source = (
        "import os, socket\n"
        "for fd in map(int, os.listdir('/proc/self/fd')):\n"
        "    try:\n"
        "        sock = socket.socket(fileno=os.dup(fd))\n"
        "        sock.getpeername()  # raises for the listening socket\n"
        "        sock.shutdown(socket.SHUT_RDWR)\n"
        "    except OSError: pass\n"
    )
    with pytest.raises(SandboxDiedInside) as raised:
        await call(sandbox, "evaluate", {"source": source})
    assert raised.value.died_of is InsideCause.CONNECTION


# --- keeping a reward from running ---------------------------------------------------------------

_GRADED = """
import subprocess, sys, tempfile, threading, time
from pathlib import Path
from aenv_ray.runtime import register_function, register_reward, register_tool

held = []


@register_tool
def run(command: str) -> int:
    return subprocess.run(["sh", "-c", command], stderr=subprocess.DEVNULL).returncode


@register_tool
def take_memory() -> int:
    try:
        while True:
            held.append(bytearray(1 << 20))
    except MemoryError:
        return len(held)


@register_tool
def take_threads() -> int:
    try:
        while True:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            held.append(None)
    except RuntimeError:
        return len(held)


@register_function
def serve() -> int:
    return subprocess.Popen(["sleep", "777"]).pid


@register_reward(name="serving")
def serving() -> int:
    return serve()


@register_function
def open_terminal() -> None:
    held.append(subprocess.Popen(["sh"], stdin=subprocess.PIPE, text=True))


@register_tool
def type_in(line: str) -> None:
    print(line, file=held[0].stdin, flush=True)
    while b"taken" not in Path(f"/proc/{held[0].pid}/cmdline").read_bytes():
        time.sleep(0.01)


@register_reward
def graded() -> float:
    with tempfile.NamedTemporaryFile(dir=".") as file:
        file.write(bytes(64 * 1024))
        file.flush()
        room = bytearray(4 << 20)
        subprocess.run(["true"], check=True)
    return 0.25 if room else 0.0


@register_reward(name="counting")
def counting() -> int:
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline")]
    return sum(command.startswith(b"sleep") for command in commands)


@register_reward(name="watching", keep_processes=True)
def watching() -> int:
    return counting()


@register_reward(name="evaluated")
def evaluated(source: str) -> float:
    names = {}
    exec(source, names)
    return float(names["result"])


@register_reward(name="looking", keep_processes=True)
def looking(source: str) -> float:
    return evaluated(source)


@register_reward(name="buggy")
def buggy() -> float:
    return {}["no such key"]
"""


_FORK_FOR_EVER = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"


@pytest.mark.ordinary_user
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param("while :; do sleep 600 & done", id="processes"),
        pytest.param("(while :; do sleep 600 & done) & setsid sleep 600 & exit", id="orphans"),
        pytest.param("head -c 1000000000 /dev/zero > full; touch more", id="disk"),
        # They use all CPUs, and each that is killed makes room for another one.
        pytest.param(
            "ulimit -u 400; for n in $(seq 20); do "
            f"setsid python3 -c '{_FORK_FOR_EVER}' & done; sleep 1",
            id="forks",
        ),
    ],
)
async def test_a_full_sandbox_does_not_keep_a_reward_from_running(
    walled: Bench, attack: str
) -> None:
    """Invariant 14: the agent's processes end first, and the reward has room reserved."""
    deploy = {"deployConfig": {"ephemeralStorage": "16M"}}
    sandbox = await walled.start(walled.project({"tools.py": _GRADED}, deploy))
    await call(sandbox, "run", {"command": attack})
    assert await request(sandbox, "aenv/reward", {"name": "graded"}) == 0.25
    assert await request(sandbox, "aenv/reward", {"name": "counting"}) == 0


@pytest.mark.docker
async def test_processes_of_a_container_do_not_keep_a_reward_from_running(dockered: Bench) -> None:
    """Invariant 14."""
    sandbox = await dockered.start(dockered.project({"tools.py": _GRADED}))
    await call(sandbox, "run", {"command": "while :; do sleep 600 & done"})
    assert await request(sandbox, "aenv/reward", {"name": "graded"}) == 0.25
    assert await request(sandbox, "aenv/reward", {"name": "counting"}) == 0


_CHAIN = "import os  # hop\nwhile True:\n  if os.fork(): os._exit(0)"
"""Its process ends all the time, and goes on under another id."""
_HOPS = """
import time
from pathlib import Path

result = 0
for _ in range(50):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            result += b"# hop" in path.read_bytes()
        except OSError:
            pass
    time.sleep(0.002)
"""


@pytest.mark.namespaces
@pytest.mark.timeout(120)
async def test_a_chain_of_processes_in_a_pod_ends_before_a_reward(
    pods: KubernetesNode, tmp_path: Path
) -> None:
    """Invariant 14: there, the runtime is not process 1."""
    async with engine_on(pods) as engine:
        bench = Bench(engine, tmp_path)
        sandbox = await bench.start(bench.project({"tools.py": _GRADED}))
        chain = f"setsid python3 -c '{_CHAIN}' >/dev/null 2>&1 &"
        await call(sandbox, "run", {"command": f"for n in $(seq 12); do {chain} done; sleep 2"})
        looks = {"arguments": {"source": _HOPS}}
        assert await request(sandbox, "aenv/reward", {"name": "looking", **looks}) > 0.0
        assert await request(sandbox, "aenv/reward", {"name": "evaluated", **looks}) == 0.0


async def test_a_process_without_a_main_thread_ends_before_a_reward(either_engine: Bench) -> None:
    """Invariant 14: the kernel reports its state as that of one that has ended."""
    sandbox = await either_engine.start(either_engine.project({"tools.py": _GRADED}))
    await call(sandbox, "run", {"command": headless.START})
    looks = {"arguments": {"source": headless.IS_OVER}}
    assert await request(sandbox, "aenv/reward", {"name": "looking", **looks}) == 0.0
    assert await request(sandbox, "aenv/reward", {"name": "evaluated", **looks}) == 1.0


_BESIDE = """
from aenv_ray.runtime import register_function, register_reward, register_tool, sidecar


@register_tool
def run(command: str) -> int:
    return sidecar.exec(command).exit_code


@register_function
def serve() -> int:
    return sidecar.exec("sleep 777 >/dev/null 2>&1 &").exit_code


@register_reward
def running() -> dict:
    found = sidecar.exec("cat /proc/[0-9]*/cmdline").text()
    return {"score": 0.25, "server": found.count("777"), "agent": found.count("600")}


@register_reward(name="watching", keep_processes=True)
def watching() -> dict:
    return running()
"""


@pytest.mark.docker
async def test_processes_in_the_second_container_end_before_a_reward(dockered: Bench) -> None:
    """Invariant 14: they could change what a reward reads there, or keep it from running."""
    deploy = {"podTemplate": "DualContainer", "network": "none", "container": {"pids": 64}}
    project = dockered.project({"tools.py": _BESIDE}, {"deployConfig": deploy})
    sandbox = await dockered.start(project, datasource=shell_image())
    await request(sandbox, "aenv/function", {"name": "serve"})
    loop = "(while sleep 600 & do :; done) >/dev/null 2>&1"
    await call(sandbox, "run", {"command": f"setsid sh -c '{loop}; sleep 600' >/dev/null 2>&1 &"})
    await eventually(lambda: _fills(sandbox), "the agent has filled the container")
    graded = await request(sandbox, "aenv/reward", {})
    assert graded == {"score": 0.25, "server": 1, "agent": 0}


async def _fills(sandbox: Sandbox) -> bool:
    """Whether no more programs can be started beside the sandbox."""
    try:
        return bool((await request(sandbox, "aenv/reward", {"name": "watching"}))["agent"] > 50)
    except FunctionFailed:
        return True


async def test_memory_that_a_tool_took_does_not_keep_a_reward_from_running(walled: Bench) -> None:
    """Invariant 14: also where tools run in the process of the runtime."""
    deploy = {"deployConfig": {"memory": "128M"}}
    sandbox = await walled.start(walled.project({"tools.py": _GRADED}, deploy))
    assert await value_of(sandbox, "take_memory") > 10
    assert await request(sandbox, "aenv/reward", {"name": "graded"}) == 0.25


async def test_a_reward_without_room_is_an_outcome_and_a_bug_is_not(walled: Bench) -> None:
    """Invariant 14: threads of the runtime cannot be ended; the error says which limit it was."""
    sandbox = await walled.start(walled.project({"tools.py": _GRADED}))
    with pytest.raises(FunctionFailed, match="KeyError") as bug:
        await request(sandbox, "aenv/reward", {"name": "buggy"})
    assert not isinstance(bug.value, SandboxExhausted)
    assert await value_of(sandbox, "take_threads") > 10
    with pytest.raises(SandboxExhausted) as raised:
        await request(sandbox, "aenv/reward", {"name": "graded"})
    assert raised.value.died_of is InsideCause.PROCESSES


async def test_what_a_command_of_a_policy_has_started_ends_before_a_reward(
    either_engine: Bench,
) -> None:
    """Invariant 14, boundary D19: also if the policy has called no tool before."""
    sandbox = await either_engine.start(either_engine.project({"tools.py": _GRADED}))
    await request(sandbox, "aenv/function", {"name": "serve"})
    done = await execute(sandbox, "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!")
    assert done.text().strip().isdecimal()
    assert await request(sandbox, "aenv/reward", {"name": "counting"}) == 1


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("python3 -c 'import time; time.sleep(600)  # taken'", id="another"),
        pytest.param("sh -c 'while :; do sleep 600; done  # taken'", id="the same"),
    ],
)
async def test_a_program_that_replaces_one_of_the_environment_ends_before_a_reward(
    either_engine: Bench, program: str
) -> None:
    """Invariant 14: ``exec`` in a shell that the environment started before the first tool call."""
    sandbox = await either_engine.start(either_engine.project({"tools.py": _GRADED}))
    await request(sandbox, "aenv/function", {"name": "open_terminal"})
    await call(sandbox, "type_in", {"line": f"exec {program}"})
    source = (
        "from pathlib import Path\n"
        "found = [path.read_bytes() for path in Path('/proc').glob('[0-9]*/cmdline')]\n"
        "result = sum(b'# taken' in command for command in found)\n"
    )
    looks = {"arguments": {"source": source}}
    assert await request(sandbox, "aenv/reward", {"name": "looking", **looks}) == 1.0
    assert await request(sandbox, "aenv/reward", {"name": "evaluated", **looks}) == 0.0


@pytest.mark.parametrize(
    ("method", "name"), [("aenv/function", "serve"), ("aenv/reward", "serving")]
)
async def test_what_an_outer_tool_starts_by_a_function_ends_before_the_outer_reward(
    either_engine: Bench, method: str, name: str
) -> None:
    """Invariant 14: in an inner instance, functions and rewards run for the agent too."""
    sandbox = await either_engine.start(either_engine.project({"tools.py": _GRADED}))

    async def ask(method: str, name: str, rewards: int) -> Any:
        meta = {"aenv/call_id": new_call_id(), "aenv/timeout_s": LONG_S, OUTER_REWARDS: rewards}
        params = {"name": name, "_meta": {**meta, HELD_S: LONG_S}}
        return await sandbox.request(method, params, deadline_s=LONG_S)

    await ask("aenv/function", "serve", -1)  # by a setup
    await ask(method, name, 0)
    await ask(END_PROCESSES_METHOD, "", 1)
    counted = await ask("aenv/reward", "counting", -1)
    assert wire.decode("aenv/reward", counted) == 1


async def test_processes_of_the_environment_go_on(walled: Bench) -> None:
    """Those from before the first tool call, and all for a reward that asks for it."""
    sandbox = await walled.start(walled.project({"tools.py": _GRADED}))
    await request(sandbox, "aenv/function", {"name": "serve"})
    started = "sleep 600 & until grep -q sleep /proc/$!/cmdline; do :; done"
    await call(sandbox, "run", {"command": started})
    assert await request(sandbox, "aenv/reward", {"name": "watching"}) == 2
    assert await request(sandbox, "aenv/reward", {"name": "counting"}) == 1


# --- acting beside a reward ----------------------------------------------------------------------

_GRADES_SLOWLY = """
import asyncio, threading, time
from pathlib import Path
from aenv_ray.runtime import register_function, register_reward, register_tool

MARK = Path("mark")
begun, done = threading.Event(), threading.Event()
tasks = []


@register_tool
def act() -> None:
    MARK.write_text("forged")
    time.sleep(0.005)


@register_tool
async def act_later() -> None:
    MARK.write_text("forged")


@register_tool
async def linger() -> None:
    async def forge():
        while True:
            await act_later()
            await asyncio.sleep(0.001)

    tasks.append(asyncio.create_task(forge()))


@register_tool
async def tick() -> None:
    loop = asyncio.get_running_loop()
    tasks.append(loop.create_task(act_later()))
    loop.call_later(0.001, lambda: tasks.append(loop.create_task(tick())))


@register_function
def has_begun() -> bool:
    return begun.wait(60)


@register_function
def finish() -> None:
    done.set()


@register_reward
def graded() -> float:
    MARK.unlink(missing_ok=True)
    begun.set()
    assert done.wait(60)
    return 0.0 if MARK.exists() else 0.25


@register_reward(name="short")
def short() -> float:
    MARK.unlink(missing_ok=True)
    time.sleep(0.3)
    return 0.0 if MARK.exists() else 0.25
"""
_ACTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tool": ("tools/call", {"name": "act"}),
    "async tool": ("tools/call", {"name": "act_later"}),
    "batch": ("aenv/call_tools", {"calls": [{"name": "act"}, {"name": "act_later"}]}),
    "command": ("aenv/exec", {"arguments": {"command": "echo forged > mark"}}),
    "file": ("aenv/write_file", {"arguments": {"path": "mark", "data": "Zm9yZ2Vk"}}),
}


@pytest.mark.ordinary_user
async def test_an_agent_cannot_act_while_a_reward_runs(either_engine: Bench) -> None:
    """Invariant 14, boundary D19: it could change what the reward reads, and take its room."""
    sandbox = await either_engine.start(either_engine.project({"tools.py": _GRADES_SLOWLY}))
    graded = asyncio.create_task(request(sandbox, "aenv/reward", {"name": "graded"}))
    assert await request(sandbox, "aenv/function", {"name": "has_begun"})
    for name, (method, params) in _ACTS.items():
        for _ in range(2):
            with pytest.raises(CallCancelled, match="a reward of the instance is under way") as no:
                await request(sandbox, method, params, call_id=f"again {name}")
            assert not is_infrastructure(no.value)
    await request(sandbox, "aenv/function", {"name": "finish"})
    assert await graded == 0.25
    for name, (method, params) in _ACTS.items():
        await request(sandbox, method, params, call_id=f"again {name}")


async def test_calls_behind_a_reward_do_not_run_beside_it(either_engine: Bench) -> None:
    """Invariant 14: an agent that sends calls without end, some of which wait for a thread."""
    sandbox = await either_engine.start(either_engine.project({"tools.py": _GRADES_SLOWLY}))

    async def act(name: str) -> AenvError | None:
        try:
            await call(sandbox, name)
        except AenvError as exc:
            return exc
        return None

    acts = [asyncio.create_task(act("act")) for _ in range(40)]
    reward = asyncio.create_task(request(sandbox, "aenv/reward", {"name": "short"}))
    acts += [asyncio.create_task(act(name)) for _ in range(40) for name in ("act", "act_later")]
    assert await reward == 0.25
    ends = [await one for one in acts]
    assert all(end is None or isinstance(end, CallCancelled) for end in ends)
    await value_of(sandbox, "act")


@pytest.mark.parametrize("name", ["linger", "tick"])
async def test_a_task_that_a_tool_has_left_does_not_run_beside_a_reward(
    either_engine: Bench, name: str
) -> None:
    """Invariant 14: a coroutine is neither a call nor a process, and a timer may start one."""
    sandbox = await either_engine.start(either_engine.project({"tools.py": _GRADES_SLOWLY}))
    await value_of(sandbox, name)
    assert await request(sandbox, "aenv/reward", {"name": "short"}) == 0.25
