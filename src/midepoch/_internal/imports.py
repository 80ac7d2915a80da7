"""Access to modules of other libraries only if they have been imported already."""

from __future__ import annotations

import sys
from typing import Any


def loaded(name: str) -> Any:
    """Return a module that has been imported, else None.

    A module that is being imported counts as not imported: a signal handler that saves may have interrupted the import,
    and a partial module lacks names.
    """
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module
