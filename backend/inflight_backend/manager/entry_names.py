"""Python objects that the operator names in the configuration: trusted code, found by import."""

from __future__ import annotations

import importlib
from typing import Any

from inflight_backend.errors import ConfigurationError


def find_entry(setting: str, name: str, what: str) -> Any:
    """The object ``package.module:name``; `ConfigurationError` names ``setting``.

    ``what`` is what the object is called in the form that a bad name is answered with.
    """
    module_name, _, object_name = name.partition(":")
    if not module_name or module_name.startswith(".") or not object_name:
        raise ConfigurationError(f"{setting} = '{name}' must have the form package.module:{what}")
    try:
        return getattr(importlib.import_module(module_name), object_name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{setting} = '{name}': {error}") from None
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ConfigurationError(
            f"{setting} = '{name}' cannot be imported: {type(error).__name__}: {error}"
        ) from error
