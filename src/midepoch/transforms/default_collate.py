"""The format of map-style datasets, whose rows are items of any type: batches as torch's DataLoader makes them."""

from __future__ import annotations

from typing import Any

from midepoch.errors import MapError, MidepochError

ITEMS = "items"
"""Format of map-style datasets: a row is an item of any type, and batches are those of torch's ``default_collate``."""
ITEM = "item"
"""The column of such items. A row with other columns beside it is a dict."""


def default_collated(rows: list[Any]) -> Any:
    """Return a batch of items, as torch's ``default_collate`` makes it."""
    try:
        from torch.utils.data import default_collate
    except ImportError:
        raise MidepochError(
            "batches of a map-style dataset are made by torch's default_collate: `pip install midepoch[torch]`, or "
            "pass collate_fn."
        ) from None
    try:
        return default_collate(rows)
    except (TypeError, RuntimeError, ValueError, AttributeError) as problem:
        raise MapError(
            f"torch's default_collate cannot make a batch of {len(rows)} items like {rows[0]!r:.60}: "
            f"{str(problem).rstrip('.')}. Return tensors of one shape, numbers or texts from "
            "the dataset, or pass collate_fn."
        ) from problem
