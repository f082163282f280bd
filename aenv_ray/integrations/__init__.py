"""Adapters for agent frameworks and trainers: one module each, which imports its framework.

`openai` and `anthropic` need no package, nor does `episodes`, on which the adapters for trainers
build. The others raise `ConfigError` if their framework is missing or of a version that they do not
support.
"""
