"""Data files in a folder of a dataset repository, which also contains descriptions of them, and several splits."""

from __future__ import annotations

import logging
import os
import re

from midepoch.sources.folders import SPLITS
from midepoch.sources.hub_address import parse_hub_path
from midepoch.sources.open_files import Entry

_log = logging.getLogger("midepoch")
_DESCRIPTIONS = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
_SPLIT = re.compile(rf"(?:^|[-._ 0-9/])({'|'.join(SPLITS)})(?=[-._ 0-9/]|$)")


def data_files(folder: str, files: list[Entry], *, parquet_only: bool) -> list[Entry]:
    """Return the data files in a folder: with ``parquet_only`` those of Parquet, if there are any.

    Warn if they belong to several splits.
    """
    found = [file for file in files if file.path.rpartition("/")[2] not in _DESCRIPTIONS]
    if parquet_only:
        found = [file for file in found if file.path.lower().endswith((".parquet", ".pq", ".parq"))] or found
    splits: dict[str, str] = {}
    for file in found:
        at = parse_hub_path(file.path)
        if (match := _SPLIT.search(at.path.lower())) is not None:
            start, rest = at.path[: match.end(1)], at.path[match.end(1) :]
            pattern = f"{start}/**" if "/" in rest else f"{start}*{os.path.splitext(rest)[1]}"
            splits.setdefault(SPLITS[match[1]], f"hf://{at.root}/{pattern}")
    if len(splits) > 1:
        _log.warning(
            "hf://%s contains the splits %s, and all of them are read as one dataset. For one split, pass its "
            "files: %s",
            folder, ", ".join(splits), next(iter(splits.values())),
        )  # fmt: skip
    return found
