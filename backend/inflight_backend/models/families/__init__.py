"""The model families that are served: a module each, with what is special about it.

All modules of this folder are imported, so that one with `register_family` is all a family takes.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
