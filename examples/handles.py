"""Use instances from Ray code: a handle goes wherever Ray goes.

python examples/handles.py
"""

import ray

import aenv_ray


@ray.remote
def count_lines(env: aenv_ray.EnvHandle, path: str) -> int:
    """Run in a Ray task, on an instance that the driver made."""
    done = ray.get(env.exec.remote(["wc", "-l", path]))
    return int(done.text().split()[0])


def main() -> None:
    envs = aenv_ray.create_many("mini-terminal", 4)
    ray.get([env.write_file.remote("a.txt", "x\n" * n) for n, env in enumerate(envs, 1)])
    print("lines", ray.get([count_lines.remote(env, "a.txt") for env in envs]))
    ray.get([env.release.remote() for env in envs])
    print("left", len(aenv_ray.list_instances()))
    aenv_ray.shutdown()


if __name__ == "__main__":
    main()
