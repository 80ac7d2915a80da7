"""The manifest: what a step holds, for people to read and for programs to check everything else against."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from midepoch.checkpoint.files import PIECE, Sums
from midepoch.errors import CheckpointDamagedError, CheckpointError

VERSION = 1
NAME = "manifest.json"
KEY = "midepoch_checkpoint"
LARGEST = 256 << 20
"""Bytes: a manifest longer than this is not read into memory."""
MOST_STEPS = 2**62

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,99}\Z")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?\Z")


@dataclass(frozen=True)
class Manifest:
    """Everything about a step but its contents. ``sequence`` counts commits: the latest step has the largest."""

    step: int
    sequence: int
    time: float
    backend: str
    world_size: int
    files: Mapping[str, Sums]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    """By name, what wrote a part: its class, and the backend's own notes."""
    folder: str = ""
    """Where the files lie below the step, in an object store: every attempt to save has a folder of its own."""

    @property
    def nbytes(self) -> int:
        return sum(sums.size for sums in self.files.values())


def to_bytes(manifest: Manifest, when: str) -> bytes:
    """As JSON text that sums itself in its last line. ``when`` is its time in words."""
    files = {
        name: {"size": sums.size, "crc32": [f"{crc:08x}" for crc in sums.crc32]}
        for name, sums in sorted(manifest.files.items())
    }
    content = {
        KEY: VERSION,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "saved": when,
        "time": manifest.time,
        "backend": manifest.backend,
        "world_size": manifest.world_size,
        "metadata": manifest.metadata,
        "versions": manifest.versions,
        "parts": manifest.parts,
        "folder": manifest.folder,
        "piece": PIECE,
        "files": files,
    }
    return _lines({**content, "sha256": _digest(content)}).encode()


def from_bytes(data: bytes) -> Manifest:
    """Read a manifest. CheckpointDamagedError if it is not what was written, CheckpointError if it is newer."""
    try:
        content = json.loads(data)
        digest = content.pop("sha256")
        if digest != _digest(content):
            raise CheckpointDamagedError("the manifest is damaged: its sum is another")
        if type(content[KEY]) is int and content[KEY] > VERSION:
            raise CheckpointError(
                f"the checkpoint is of version {content[KEY]}, this midepoch reads up to {VERSION}: upgrade midepoch "
                "to restore it."
            )
        return _parse(content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointDamagedError(f"the manifest cannot be read: {problem!r:.200}") from None


def _parse(content: dict[str, Any]) -> Manifest:
    if content[KEY] != VERSION or content["piece"] != PIECE:
        raise ValueError(f"version {content[KEY]!r:.40}, pieces of {content['piece']!r:.40}")
    step, sequence, world = content["step"], content["sequence"], content["world_size"]
    if any(type(number) is not int or not 0 <= number < MOST_STEPS for number in (step, sequence, world)):
        raise ValueError(f"step {step!r:.40}, sequence {sequence!r:.40}, world_size {world!r:.40}")
    files = {_checked_path(name): _sums(entry) for name, entry in content["files"].items()}
    for name in ("metadata", "versions", "parts"):
        if not isinstance(content[name], dict):
            raise ValueError(f"{name} is {content[name]!r:.40}")
    folder = content["folder"]
    if folder:
        _checked_path(folder)
    return Manifest(
        step=step,
        sequence=sequence,
        time=float(content["time"]),
        backend=str(content["backend"]),
        world_size=world,
        files=files,
        metadata=content["metadata"],
        versions=content["versions"],
        parts=content["parts"],
        folder=folder,
    )


def _sums(entry: dict[str, Any]) -> Sums:
    size, crc32 = entry["size"], tuple(int(crc, 16) for crc in entry["crc32"])
    if type(size) is not int or not 0 <= size < MOST_STEPS or len(crc32) != -(-size // PIECE):
        raise ValueError(f"a file of {size!r:.40} bytes with {len(crc32)} sums")
    return Sums(size, crc32)


def checked_name(name: Any, what: str = "extra") -> str:
    """The name of a part, if it can be the name of a file everywhere and nothing else; ValueError otherwise."""
    if not isinstance(name, str) or not _PART.match(name) or _RESERVED.match(name):
        raise ValueError(
            f"{what}: the name {name!r:.80} cannot be used: expected up to 100 letters, digits and _ . + = @ -, not "
            "beginning with a dot."
        )
    return name


def _checked_path(path: str) -> str:
    """The path of a file below its step: backends have folders of their own."""
    parts = path.split("/")
    if len(path) > 1000 or any(
        part in ("", ".", "..") or "\\" in part or "\0" in part or ":" in part for part in parts
    ):
        raise ValueError(f"a file named {path!r:.80}")
    return path


def _lines(content: Mapping[str, Any]) -> str:
    """As JSON with a line for each entry, and for each file: json's own indentation costs as much as an fsync."""
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
