"""from_map_style: order, shuffle, workers, ranks and exact resume for any object with ``len`` and ``ds[i]``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch._internal.hints import hinted, instead, is_array, opener_of
from midepoch._internal.progress import Progress
from midepoch._internal.values import loaded
from midepoch.dataset import Dataset, habits
from midepoch.dataset.parts import PartWriter
from midepoch.dataset.steps import names_of
from midepoch.errors import DataNotFoundError
from midepoch.memory.stored import dataset_of, folder_for, stored
from midepoch.transforms.encode import ItemMap, Items
from midepoch.transforms.formats import ITEMS

_BLOCK = 1 << 16
_PLACEHOLDER = "row"


@hinted(habits.OPEN["from_map_style"])
def from_map_style(
    dataset: Any,
    *,
    fingerprint: str | None = None,
    columns: str | Sequence[str] | None = None,
    on_error: str = "raise",
    seed_globals: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Return a dataset of the items ``dataset[i]`` for i below ``len(dataset)``, such as a torch ``Dataset`` or a list.

    Items may be of any type. ``ds[i]`` and ``collate_fn`` get them as they are, and batches are those of torch's
    ``default_collate``. Random numbers that ``dataset[i]`` draws from ``random``, ``numpy.random`` or torch depend only
    on the seed, the epoch and i. Workers call ``dataset[i]``, or ``dataset.__getitems__`` for several.

    - ``fingerprint``: a name for this version of the contents. A state is refused if it, the length, the class, or the
      indices of a ``Subset`` differ. Other changes of the contents are not detected
    - ``columns``: names for the parts of an item (a tuple, or a dict with these keys). Rows are then dicts as those of
      files, for all steps and formats
    - ``on_error="skip"``: items on which ``dataset[i]`` raises are left out
    - ``seed_globals=False``: do not seed random generators for each item, which saves 9 µs for each
    """
    length = _length(dataset)
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise TypeError(f"from_map_style(fingerprint=…) must be a str, got {fingerprint!r}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    identity = f"{length} {described(dataset)} {fingerprint or ''}"
    name = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

    def write(writer: PartWriter, report: Progress) -> int:
        field = pa.field(_PLACEHOLDER, pa.null())
        writer.schema = pa.schema([field], metadata={b"midepoch": name.encode()})
        # Rows without values, which take no room in a file: items are found by the numbers of rows.
        sizes = (min(_BLOCK, length - start) for start in range(0, length, _BLOCK))
        writer.finish([pa.table({_PLACEHOLDER: pa.nulls(size)}) for size in sizes], rows=_BLOCK)
        report(length, length)
        return length

    source = stored(folder_for("memory", cache_dir), name, "from_map_style", write, expires=True)
    ds = dataset_of(source)
    step = ItemMap(
        Items(dataset, None if columns is None else names_of(columns)),
        remove_columns=(_PLACEHOLDER,),
        on_error=on_error,
        seed_globals=seed_globals,
    )
    made = ds._with_step(step)
    return made if columns is not None else type(made)(replace(made.pipeline, format=ITEMS))


def _length(dataset: Any) -> int:
    """Return the number of items. Raise TypeError for an object that has no numbered items."""
    data = loaded("torch.utils.data")
    expected = "an object with len(ds) and ds[i]"
    if isinstance(dataset, (Dataset, type)):
        raise TypeError(instead("from_map_style", expected, dataset))
    if data is not None and isinstance(dataset, data.IterableDataset):
        raise TypeError(
            f"from_map_style takes {expected}, got the IterableDataset {type(dataset).__name__}, whose rows cannot be "
            "read by number. Store them once: midepoch.from_generator(function that yields its rows)."
        )
    other = None if is_array(dataset) or isinstance(dataset, (list, tuple)) else opener_of(dataset)
    if isinstance(dataset, (str, bytes, Mapping)) or not (other is None or "map_style" in other):
        raise TypeError(instead("from_map_style", expected, dataset))
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        lacks = "len()" if hasattr(dataset, "__getitem__") else "ds[i]"
        raise TypeError(f"from_map_style takes {expected}, got {type(dataset).__name__} without {lacks}.")
    length = len(dataset)
    if not length:
        raise DataNotFoundError(f"from_map_style: {type(dataset).__name__} is empty.")
    return length


def described(dataset: Any) -> str:
    """Return the class of a dataset, and of those inside it. A ``Subset`` includes a digest of its indices."""
    kind = type(dataset).__qualname__
    if not type(dataset).__module__.startswith("torch.utils.data"):
        return kind
    inner = getattr(dataset, "datasets", None)
    if isinstance(inner, dict):  # StackDataset(image=a, label=b)
        return f"{kind}({', '.join(f'{name}={len(each)} {described(each)}' for name, each in inner.items())})"
    if isinstance(inner, (list, tuple)):
        return f"{kind}({', '.join(f'{len(each)} {described(each)}' for each in inner)})"
    if (indices := getattr(dataset, "indices", None)) is None:
        return kind
    numbers = np.asarray(indices, dtype=np.int64)
    digest = hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()
    return f"{kind}({len(dataset.dataset)} {described(dataset.dataset)}, {digest})"
