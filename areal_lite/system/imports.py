"""Functions that the configuration names as `module:name`."""

import importlib
from collections.abc import Callable
from typing import Any


def load_object(key: str, name: str) -> Callable[..., Any]:
    """Import the callable that the configuration key `key` names, or raise ValueError."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(
            f"{key}={name} must be module:name,"
            " such as areal_lite.rollout.workflows.single_turn:single_turn"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of a user can raise anything
        reason = str(error) if isinstance(error, ImportError) else repr(error)
        raise ValueError(f"{key}={name}: cannot import {module_name}: {reason}") from error
    if not callable(found := getattr(module, attribute, None)):
        raise ValueError(f"{key}={name}: {module_name} has no callable {attribute!r}")
    return found
