"""Passes for loops that take as many batches as an epoch has, and never ask for the one that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from midepoch.loader import Loader


def rest_or_next(loader: Loader) -> Iterator[Any]:
    """What is left of the epoch that a loader is in; if nothing is, the next epoch.

    ``iter(loader)`` would begin again where its last pass began: to it, a loop that took the last batch and did not
    ask for the end looks like one that was left by a ``break``, which moves nothing. This goes on wherever it was left.
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
