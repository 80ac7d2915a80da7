"""Folders written by ``datasets.Dataset.save_to_disk`` and ``DatasetDict.save_to_disk``, read without ``datasets``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from midepoch.errors import DataNotFoundError, FormatError

_DICT, _STATE = "dataset_dict.json", "state.json"


def saved_splits(path: Path) -> dict[str, list[Path]] | None:
    """Return the Arrow files by split of a folder with a dataset dict, or None for a folder with a single dataset."""
    if not path.exists():
        raise DataNotFoundError(f"{str(path)!r} does not exist.")
    if (path / _STATE).is_file():
        return None
    if not (path / _DICT).is_file():
        raise DataNotFoundError(
            f"{path} was not written by save_to_disk: it has neither {_STATE} nor {_DICT}. "
            "For plain Arrow files use midepoch.from_files."
        )
    names = _read_json(path / _DICT).get("splits", [])
    return {str(name): saved_files(path / str(name)) for name in names}


def saved_files(path: Path) -> list[Path]:
    """Return the Arrow files of a folder with a single dataset, in order."""
    state = _read_json(path / _STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise FormatError(f"{path} was saved with an indices mapping. Load it with datasets and save it again.")
    try:
        files = [path / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise FormatError(f"{path / _STATE} does not list the data files.") from None
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise DataNotFoundError(
            f"{path} is incomplete: {', '.join(missing[:3])} missing ({len(missing)} of {len(files)})."
        )
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataNotFoundError(f"{path} does not exist.") from None
    except (ValueError, OSError) as problem:
        raise FormatError(f"{path} cannot be read: {problem}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path} contains {type(content).__name__} where an object was expected.")
    return content
