"""midepoch: training data in place, resumed exactly and immediately, on any cluster size.

ds = midepoch.load_dataset("parquet", data_files="*.parquet", split="train")
loader = ds.shuffle(seed=42).loader(batch_size=64, num_workers=4)
for batch in loader: ...
state = loader.state_dict()          # < 1 KB, JSON-able
loader.load_state_dict(state)        # in another process, with other numbers of workers, ranks, rows per batch
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from midepoch._internal.version import __version__

if TYPE_CHECKING:
    from midepoch.checkpoint import Keep, PipelineCheckpoint
    from midepoch.compat.structured import StructuredDataset
    from midepoch.dataset import Dataset
    from midepoch.dataset.combine import concat, concatenate_datasets, interleave_datasets, mix
    from midepoch.dataset.combine import zip as zip  # noqa: A004 (the export of a name that is not in __all__)
    from midepoch.errors import (
        CheckpointDamagedError,
        CheckpointError,
        CheckpointMismatchError,
        CheckpointNotFoundError,
        CheckpointSaveError,
        ColumnError,
        CorruptBlockError,
        DataChangedError,
        DataError,
        DataNotFoundError,
        DifferentSchemasError,
        FetchError,
        FormatError,
        LeaseError,
        MapError,
        MidepochError,
        StateError,
        WorkerError,
        WorldError,
    )
    from midepoch.loader import Lease, Loader
    from midepoch.memory.generated import from_generator, from_map_style
    from midepoch.memory.hf import from_hf
    from midepoch.memory.tables import from_arrow, from_dict, from_list, from_pandas
    from midepoch.open.files import from_files, load_dataset, load_from_disk
    from midepoch.open.tables import from_delta, from_iceberg, from_lance
    from midepoch.open.tokens import from_megatron, from_tokens
    from midepoch.order.schedule import Phase, Schedule
    from midepoch.storage.stores import Retry

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "ColumnError",
    "CorruptBlockError",
    "DataChangedError",
    "DataError",
    "DataNotFoundError",
    "Dataset",
    "DifferentSchemasError",
    "FetchError",
    "FormatError",
    "Keep",
    "Lease",
    "LeaseError",
    "Loader",
    "MapError",
    "MidepochError",
    "Phase",
    "PipelineCheckpoint",
    "Retry",
    "Schedule",
    "StateError",
    "StructuredDataset",
    "WorkerError",
    "WorldError",
    "__version__",
    "concat",
    "concatenate_datasets",
    "from_arrow",
    "from_delta",
    "from_dict",
    "from_files",
    "from_generator",
    "from_hf",
    "from_iceberg",
    "from_lance",
    "from_list",
    "from_map_style",
    "from_megatron",
    "from_pandas",
    "from_tokens",
    "interleave_datasets",
    "load_dataset",
    "load_from_disk",
    "mix",
]  # not zip: `from midepoch import *` would hide Python's own


# Names are imported when first used: `import midepoch` takes 1 ms instead of the 150 ms of numpy and pyarrow.
_NAMES = {
    "midepoch.checkpoint": ["Keep", "PipelineCheckpoint"],
    "midepoch.compat.structured": ["StructuredDataset"],
    "midepoch.dataset": ["Dataset"],
    "midepoch.dataset.combine": ["concat", "concatenate_datasets", "interleave_datasets", "mix", "zip"],
    "midepoch.loader": ["Lease", "Loader"],
    "midepoch.memory.generated": ["from_generator", "from_map_style"],
    "midepoch.memory.hf": ["from_hf"],
    "midepoch.memory.tables": ["from_arrow", "from_dict", "from_list", "from_pandas"],
    "midepoch.open.files": ["from_files", "load_dataset", "load_from_disk"],
    "midepoch.open.tables": ["from_delta", "from_iceberg", "from_lance"],
    "midepoch.open.tokens": ["from_megatron", "from_tokens"],
    "midepoch.order.schedule": ["Phase", "Schedule"],
    "midepoch.storage.stores": ["Retry"],
    "midepoch.errors": [name for name in __all__ if name.endswith("Error")],  # last: a message shows the first names
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        from midepoch._internal.hints import NAMES, no_attribute

        problem = no_attribute("module 'midepoch'", name, _WHERE, NAMES)
        # `from midepoch import name` asks here first, then for a module, and does not show the message of this error.
        if sys._getframe(1).f_code.co_name == "_handle_fromlist" and find_spec(f"midepoch.{name}") is None:
            raise ImportError(str(problem), name=name)
        raise problem
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
