"""Step many instances together, and train on whichever are ready first.

python examples/vector.py
"""

import ray

import aenv_ray


@ray.remote
def longest(*observations: aenv_ray.ToolResult) -> int:
    """Stand for a trainer: Ray hands it the observations from the object store."""
    return max(len(observation.text()) for observation in observations)


def main() -> None:
    with aenv_ray.vector("mini-terminal", 8, near="me") as environments:
        commands = [{"command": f"seq {n} | wc -l"} for n in range(8)]
        outcomes = environments.step("execute_command", commands)
        print("lines", [outcome.data["output"][0].strip() for outcome in outcomes])

        environments.send("execute_command", commands)
        received = 0
        while received < len(environments):
            received += len(environments.recv(min_ready=4))
        print("received", received)

        references = environments.step_refs("execute_command", commands)
        assert ray.get(longest.remote(*references)) > 0
    print("left", len(aenv_ray.list_instances()))
    aenv_ray.shutdown()


if __name__ == "__main__":
    main()
