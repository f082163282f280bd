"""What checks implementations of our contracts; shipped, so that others can check theirs.

- `engine_contract.EngineContract`: subclass it to test an engine of your own.
- `store_contract.InstanceStoreContract`: the same for stores of instance records.
- `environment_check.check_environment`: findings about an environment project, for its authors.
- ``python -m aenv_ray.testing.chaos``: rounds in which something dies, and what is left of them.

The first two need pytest and pytest-asyncio; nothing else in aenv-ray does.
"""
