"""Scheduling policies: which requests hold cache, which run, and why others wait.

All modules of this folder are imported, so that one with `register_policy` is all a policy takes.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
