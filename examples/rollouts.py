"""Sample episodes with a policy of your own, and read what they say.

    python examples/rollouts.py

The policy here tries a shell one-liner by rule; put a model in its place. Episodes run on fresh
instances, eight at a time, and come back as they finish.
"""

import aenv_ray
from aenv_ray.project import project
from aenv_ray.sampling import Task, load_tasks


async def policy(env, task: Task) -> str:
    """Look around, then try the task's own solution: a stand-in for a model."""
    seen = await env.call_tool("execute_command", {"command": "ls"})
    for step in task.reference:
        await env.call_tool(step.tool, step.arguments)
    return seen.data["output"][0]


def main() -> None:
    tasks = load_tasks(project.resolve("mini-terminal").path / "tasks.jsonl")[:12]
    sampling = aenv_ray.sample("mini-terminal", policy, tasks, concurrency=8)
    for episode in sampling:
        print(f"{episode.task_id:<24} {episode.status.value:<12} reward {episode.reward}")
    summary = sampling.summary()
    print(f"reward mean {summary.reward_mean} over {summary.rollouts}, void {summary.infra_failed}")
    aenv_ray.shutdown()


if __name__ == "__main__":
    main()
