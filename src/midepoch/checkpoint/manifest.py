"""Manifests: the contents of each step, readable by people, against which programs check all other files.

Also the rules by which old steps are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from midepoch._internal.hints import hinted_methods
from midepoch._internal.values import integer
from midepoch.checkpoint.arrays import is_array
from midepoch.checkpoint.files import PIECE, Checksums
from midepoch.errors import CheckpointDamagedError, CheckpointError

_log = logging.getLogger("midepoch")

VERSION = 1
NAME = "manifest.json"
KEY = "midepoch_checkpoint"
LARGEST = 256 << 20
"""Bytes: a manifest longer than this is not read into memory."""
_LARGEST_INT = 2**62
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,99}\Z")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?\Z")


@dataclass(frozen=True)
class Manifest:
    """Everything about a step except its contents. ``sequence`` orders commits: the latest step has the largest."""

    step: int
    sequence: int
    time: float
    backend: str
    world_size: int
    files: Mapping[str, Checksums]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    """By name, the class that a part was saved from."""
    place: str = field(default="", compare=False)
    """Folder below the store that it was read from."""

    @property
    def nbytes(self) -> int:
        return sum(sums.size for sums in self.files.values())


_TYPES: dict[str, type] = {
    "step": int, "sequence": int, "time": float, "backend": str, "world_size": int, "files": dict, "metadata": dict,
    "versions": dict, "parts": dict,
}  # fmt: skip
"""Types of the fields of a manifest in its JSON text."""


def to_bytes(manifest: Manifest) -> bytes:
    """Return the manifest as JSON text that ends with a checksum of itself."""
    files = {
        name: {"size": sums.size, "crc32": [f"{crc:08x}" for crc in sums.crc32]}
        for name, sums in sorted(manifest.files.items())
    }
    saved = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.time))
    fields = {name: getattr(manifest, name) for name in _TYPES}
    content = {KEY: VERSION, "saved": saved, "piece": PIECE, **fields, "files": files}
    return _to_lines({**content, "sha256": _digest(content)}).encode()


def from_bytes(data: bytes, step: int) -> Manifest:
    """Parse the manifest of a step. CheckpointDamagedError if it is not what was written, CheckpointError if newer."""
    try:
        content = json.loads(data)
        digest = content.pop("sha256")
        if digest != _digest(content):
            raise CheckpointDamagedError("the manifest is damaged: its checksum differs")
        if type(content[KEY]) is int and content[KEY] > VERSION:
            raise CheckpointError(
                f"the checkpoint is of version {content[KEY]}, this midepoch reads up to {VERSION}. Upgrade midepoch "
                "to restore it."
            )
        manifest = _parse(content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointDamagedError(f"the manifest cannot be read: {problem!r:.200}") from None
    if manifest.step != step:
        raise CheckpointDamagedError(f"the manifest is that of step {manifest.step}")
    return manifest


def _parse(content: dict[str, Any]) -> Manifest:
    if content[KEY] != VERSION or content["piece"] != PIECE:
        raise ValueError(f"version {content[KEY]!r:.40}, pieces of {content['piece']!r:.40}")
    for name, expected in _TYPES.items():
        if type(content[name]) is not expected or (expected is int and not 0 <= content[name] < _LARGEST_INT):
            raise ValueError(f"{name} is {content[name]!r:.40}")
    for path in content["files"]:
        _check_path(path)
    files = {name: _checksums(entry) for name, entry in content["files"].items()}
    return Manifest(**{name: content[name] for name in _TYPES} | {"files": files})


def _checksums(entry: dict[str, Any]) -> Checksums:
    size, crc32 = entry["size"], tuple(int(crc, 16) for crc in entry["crc32"])
    if type(size) is not int or not 0 <= size < _LARGEST_INT or len(crc32) != -(-size // PIECE):
        raise ValueError(f"a file of {size!r:.40} bytes with {len(crc32)} checksums")
    return Checksums(size, crc32)


def checked_name(name: Any) -> str:
    """Return the name of an extra if it is a valid file name on every system; ValueError otherwise."""
    if not isinstance(name, str) or not _PART.match(name) or _RESERVED.match(name):
        raise ValueError(
            f"extra: the name {name!r:.80} cannot be used: expected up to 100 letters, digits and _ . + = @ -, not "
            "beginning with a dot."
        )
    return name


def _check_path(path: str) -> None:
    """Raise ValueError unless the path of a file below its step is valid; backends have folders of their own."""
    parts = path.split("/")
    if len(path) > 1000 or any(part in ("", ".", "..") or set(part) & set("\\\0:") for part in parts):
        raise ValueError(f"a file named {path!r:.80}")


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as JSON values: numbers of any library become Python's. TypeError for any other value."""
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a dict, got a {type(metadata).__qualname__}")
    return {str(key): _json_value(value, f"metadata.{key}") for key, value in metadata.items()}


def _json_value(value: Any, path: str) -> Any:
    if is_array(value) and not getattr(value, "ndim", 0):
        value = value.item()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json_value(inner, f"{path}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner, f"{path}.{number}") for number, inner in enumerate(value)]
    if isinstance(value, PathLike):
        return str(value)
    kind = type(value).__qualname__
    raise TypeError(f"{path}: metadata is plain JSON, got a {kind}. Use extra for arrays, and vars(…) for objects.")


def _to_lines(content: Mapping[str, Any]) -> str:
    """Return JSON with a line per entry and per file: json's own indentation costs as much as an fsync."""
    lines = []
    for name, value in content.items():
        if name == "files":
            inner = ",\n".join(f"  {json.dumps(file)}: {json.dumps(sums)}" for file, sums in value.items())
            lines.append(f' "files": {{\n{inner}\n }}')
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_LARGER_IS_BETTER = re.compile(r"(?:^|[_/])(acc|accuracy|f1|bleu|rouge\w*|reward|auc)$", re.IGNORECASE)


@hinted_methods({})
@dataclass(frozen=True)
class Keep:
    """Retention rules. A step is kept if any rule keeps it. Without a rule, all steps are kept.

    ``last``: the newest steps, this many. ``every``: steps whose number is divisible by it. ``best``: this many steps
    with the best ``metadata[metric]``, the smallest or (``mode="max"``) the largest. ``hours``: steps no older.

    >>> Keep(last=3, every=10_000)
    Keep(last=3, every=10000, best=None, metric=None, mode='min', hours=None)
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: str = "min"
    hours: float | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            if getattr(self, name) is not None:
                integer(getattr(self, name), f"Keep({name}=…)", 1)
        if (self.best is None) != (self.metric is None):
            raise ValueError(f"Keep: give best and metric together, got best={self.best}, metric={self.metric!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"Keep: mode is 'min' or 'max', got {self.mode!r}")
        if self.mode == "min" and _LARGER_IS_BETTER.search(self.metric or ""):
            _log.warning(
                "Keep(metric=%r) keeps the steps with the smallest value. For the largest, add mode='max'.", self.metric
            )
        if self.hours is not None and not (isinstance(self.hours, (int, float)) and self.hours > 0):
            raise ValueError(f"Keep: hours must be a number above 0, got {self.hours!r}")

    def dropped(self, intact: Sequence[Manifest], now: float) -> list[int]:
        """Return the steps that no rule keeps, of the intact ones in commit order. The newest is always kept."""
        if not intact or all(rule is None for rule in (self.last, self.every, self.best, self.hours)):
            return []
        kept = {manifest.step for manifest in intact[-(self.last or 1) :]}
        if self.every:
            kept |= {manifest.step for manifest in intact if not manifest.step % self.every}
        if self.hours is not None:
            kept |= {manifest.step for manifest in intact if manifest.time >= now - 3600 * self.hours}
        if self.best:
            scored = [manifest for manifest in intact if _score(manifest, self.metric) is not None]
            scored.sort(key=lambda manifest: _score(manifest, self.metric), reverse=self.mode == "max")
            kept |= {manifest.step for manifest in scored[: self.best]}
        return [manifest.step for manifest in intact if manifest.step not in kept]


def parse_keep(keep: int | Keep | None, name: str) -> Keep:
    """Return the rules that an argument stands for: ``keep=3`` keeps the last three steps."""
    if isinstance(keep, Keep):
        return keep
    if keep is None:
        return Keep()
    return Keep(last=integer(keep, name, 1, hint="To keep all steps, omit keep." if keep == 0 else ""))


def _score(manifest: Manifest, metric: str | None) -> Any:
    value = manifest.metadata.get(metric or "")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None
