"""Modules of other libraries that are in use already: they are not imported only to look for their values."""

from __future__ import annotations

import sys
from typing import Any


def loaded(name: str) -> Any:
    """Return a module that has been imported, else None.

    Not one that is being imported: a signal handler that saves may have interrupted that, and half a module has neither
    values nor all of its names.
    """
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module
