"""Play an episode as GEM and ROLL do.

pip install 'aenv-ray[gem]'
python examples/integrations/trainers/gem_environment.py PROJECT
"""

import sys

import gem


def main(environment: str) -> None:
    gem.register(
        "walk", "aenv_ray.integrations.gem:GemEnv", environment=environment,
        tasks=[{"id": "walk", "instruction": "Walk to the goal."}],
    )  # fmt: skip
    env = gem.make("walk")
    env.reset(seed=3)
    env.step('<tool_call>{"name": "step", "arguments": {"action": 1}}</tool_call>')
    print("reward", env.step("I have arrived.")[1])
    env.close()


if __name__ == "__main__":
    main(sys.argv[1])
