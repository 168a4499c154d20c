"""The model families that are served: a module for each line of them, with what is special of it.

All modules of this folder and those in it are imported, so that one with `register_family` is all
that a family takes.
"""

from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
