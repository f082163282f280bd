"""The ``aenv`` command: one noun per file; parse, call, print.

Standard output carries data only, so that it can be piped; everything for people goes to standard
error through `aenv_ray.cli.terminal.console`.
"""
