"""``import aenv`` and ``python -m aenv.main`` in images, without the ``aenvironment`` package.

Images put the directory above on ``PYTHONPATH``; nothing else does.
"""

import sys

from aenv_ray.runtime.api import compat

compat.install()
# `install` has replaced this module by AEnvironment's names; `aenv.main` is found through the path.
sys.modules["aenv"].__path__ = __path__
sys.modules["aenv"].__spec__ = __spec__
