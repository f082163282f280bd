"""What a driver does all the time while nodes are lost or replaced: source for a `Console`."""

from __future__ import annotations

from tests.ray.faults import eventually
from tests.ray.nodes.nodes import Console

LOADS = """
import threading
import httpx
from aenv_ray import sampling, serve
class Load(threading.Thread):
    def __init__(self, act):
        super().__init__(daemon=True)
        self.act, self.done, self.failed, self.is_over = act, 0, [], threading.Event()
        self.start()
    def run(self):
        while not self.is_over.wait(0.2):
            try:
                self.act()
                self.done += 1
            except Exception as exc:
                self.failed.append(f"{type(exc).__name__}: {exc}")
    def end(self):
        self.is_over.set()
        self.join(100)
        return [self.is_alive(), self.failed]
def call():
    ray.get(kept.call_tool.remote("count"), timeout=20)
def create():
    aenv_ray.release_many(aenv_ray.create_many(PROBE, 1))
def use_service(handle=None):
    answer = (handle or desk).call_tool.remote("execute_command", {"command": "true"})
    assert not answer.result(timeout_s=20).is_error
def ask_gateway():
    http.get("/instances").raise_for_status()
def serve_elsewhere():
    for number in range(9):
        handle = serve.deploy("mini-terminal", name=f"desk{number}")
        (name,) = [row for row in ray.util.list_named_actors(all_namespaces=True)
                   if f"desk{number}" in row["name"]]
        node = ray_api.node_of(ray.get_actor(**name))
        if not ray_api.alive_nodes()[node].is_head:
            return f"desk{number}", handle
        serve.remove(f"desk{number}")
async def act(env, task):
    await env.call_tool("count")
    await env.exec("sleep 0.5")
def sample(runners, episodes=60):
    tasks = [sampling.Task(id=f"t{n}", instruction="count") for n in range(episodes)]
    run = sampling.sample(PROBE, act, tasks, concurrency=2, runners=runners)
    thread = threading.Thread(target=run.run, daemon=True)
    thread.start()
    return run, thread
def lost(run):
    return [[e.status.value, e.attempts, e.error] for e in run.episodes
            if e.status.value != "completed"]
"""
LONG_S = 120.0
"""For whatever Ray does on a busy machine."""


def work_on(driver: Console, times: int, *loads: str) -> None:
    """Return once each of these loads of a driver has succeeded so many times more."""
    for load in loads:
        before = driver.value(f"{load}.done")
        eventually(
            lambda n=load, least=before + times: driver.value(f"{n}.done") >= least,  # type: ignore[misc]
            LONG_S,
            lambda n=load: f"{n}: {driver.value(f'{n}.failed[-3:]')}",  # type: ignore[misc]
        )
