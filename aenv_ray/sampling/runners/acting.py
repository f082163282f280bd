"""How a policy runs: an async one on the loop, a sync one in a thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.episode_env import EpisodeEnv, SyncEpisodeEnv
from aenv_ray.sampling.policies.base import Policy, is_async
from aenv_ray.sampling.user_code import call, hand_over, outcome
from aenv_ray.trajectories.schema import Task


async def act(policy: Policy, env: EpisodeEnv, task: Task) -> Any:
    """Run a policy and return its result, see `outcome`.

    Raises:
        ConfigError: A sync policy returned a coroutine. It could not act: its environment is that
            of the thread, which has ended.
        Exception: Raised by the policy.
    """
    if is_async(policy):
        return await outcome(policy(env, task), "the policy")
    loop = asyncio.get_running_loop()
    sync_env = SyncEpisodeEnv(env, loop)
    done: asyncio.Future[Any] = loop.create_future()
    # A daemon thread, so that a policy that does not return cannot block the end of the process.
    thread = threading.Thread(target=_run_policy, args=(policy, sync_env, task, done), daemon=True)
    thread.start()
    try:
        output = await done
    finally:
        sync_env.abandon()
    if inspect.iscoroutine(output):
        output.close()
        raise ConfigError(
            f"the sync policy {policy!r} returned the coroutine {output.__qualname__}, which was "
            "not run: write the policy, and what wraps it, with async def",
            hint="a sync policy runs in a thread, and its environment ends with it",
        )
    return await outcome(output, "the policy") if inspect.isawaitable(output) else output


def _run_policy(policy: Policy, env: SyncEpisodeEnv, task: Task, done: asyncio.Future[Any]) -> None:
    """Run a sync policy in its thread and pass its outcome to the loop."""
    hand_over(done, *call(lambda: policy(env, task), "the policy"))
