"""Provides ``import aenv`` and ``python -m aenv.main`` in images without ``aenvironment``.

Only images put the parent directory on ``PYTHONPATH``.
"""

import sys

from aenv_ray.runtime.api import compat

compat.install()
# `install` has replaced this module; with the path, `aenv.main` is still found.
sys.modules["aenv"].__path__ = __path__
sys.modules["aenv"].__spec__ = __spec__
