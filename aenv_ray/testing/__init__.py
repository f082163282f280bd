"""What checks implementations of our contracts; shipped, so that others can check theirs.

- `engine_contract.EngineContract`: subclass it to test an engine of your own.
- `store_contract.InstanceStoreContract`: the same for stores of instance records.
- `environment_check.check_environment`: findings about an environment project, for its authors.

The first two need pytest and pytest-asyncio; nothing else in aenv-ray does.
"""
