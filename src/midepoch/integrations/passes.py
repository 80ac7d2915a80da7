"""Passes for loops that take exactly as many batches as an epoch has and never request another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from midepoch.loader import Loader


def rest_or_next(loader: Loader) -> Iterator[Any]:
    """Yield the rest of the loader's current epoch, or the next epoch if nothing is left.

    ``iter(loader)`` would restart its last pass: a loop that takes the last batch without requesting the end looks like
    one that was left by a ``break``. This continues where the loop stopped.
    """
    ends = 0
    while ends < 2:
        for batch in loader.current_pass():  # not next(): an interrupt on its return would lose the batch
            ends = 1
            yield batch
            break  # the loader may be in another pass by now
        else:
            loader.end_pass()
            ends += 1
