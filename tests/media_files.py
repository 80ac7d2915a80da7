"""Small images and sounds as files, and the rows of a dataset of them without decoding."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import midepoch


def image(number: int) -> bytes:
    """A PNG that no other number has."""
    pixels = np.random.default_rng(number).integers(0, 255, (4 + number % 3, 5, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "png")
        return file.getvalue()


def sound(number: int) -> bytes:
    with io.BytesIO() as file:
        with wave.open(file, "wb") as writer:
            writer.setparams((1, 2, 8000, 0, "NONE", "NONE"))
            writer.writeframes(np.arange(number, number + 20 + number % 3, dtype=np.int16).tobytes())
        return file.getvalue()


def write(root: Path, names: list[str]) -> Path:
    """A file for each name, which is a sound if it ends with wav."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sound(number) if name.endswith("wav") else image(number))
    return root


def raw(ds: midepoch.Dataset) -> list[dict[str, Any]]:
    """All rows in order, with files as dicts of bytes and path."""
    return [row for batch in ds.with_format("arrow").loader(16) for row in batch.to_pylist()]
