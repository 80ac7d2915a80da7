"""The function that opens an object in memory, for messages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any


def opener_of(given: Any) -> str | None:
    """Return the call that opens an object, or None if there is none."""
    package, kind = type(given).__module__.partition(".")[0], type(given).__name__
    if package == "midepoch":
        return None
    if package == "datasets" and kind.startswith("Iterable"):
        return "midepoch.from_hf(ds) with a dataset that was loaded without streaming=True"
    if package == "datasets":
        return "midepoch.from_hf(ds, split='train')" if "Dict" in kind else "midepoch.from_hf(ds)"
    if package in ("pandas", "polars") and kind.endswith("Frame"):
        return "midepoch.from_pandas(frame)"
    if package == "pyarrow" or hasattr(given, "__arrow_c_stream__"):
        return "midepoch.from_arrow(table)"
    if isinstance(given, Mapping):
        return "midepoch.from_dict(columns)"
    if isinstance(given, (list, tuple)) and given and all(isinstance(row, Mapping) for row in given[:3]):
        return "midepoch.from_list(rows)"
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], (str, bytes)):
        return None
    if isinstance(given, (list, tuple)) and given:
        found = opener_of(given[0])
        return found if found is not None and "from_map" not in found else "midepoch.from_map_style(items)"
    if inspect.isgenerator(given) or inspect.isgeneratorfunction(given):
        return "midepoch.from_generator(function), with the function that yields the rows"
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, (str, bytes)):
        return "midepoch.from_map_style(ds)"
    return None


def instead(function: str, expected: str, given: Any) -> str:
    """Return the message for a wrong argument. It names the function that opens such an object."""
    kind = f"{type(given).__module__}.{type(given).__name__}".removeprefix("builtins.")
    opener = opener_of(given)
    if isinstance(given, str) or hasattr(given, "__fspath__"):
        remedy = "Call midepoch.from_files(path), or midepoch.load_dataset(name, split=…)."
    elif kind.startswith("midepoch."):
        remedy = "It is a dataset already: use it as it is."
    elif opener is not None and f".{function}(" not in opener:
        remedy = f"Call {opener}."
    else:
        remedy = "Pass such an object."
    return f"{function} takes {expected}, got {kind}. {remedy}"
