"""JPEGs by torchvision, or by Pillow where torchvision does not import: its wheels for CUDA need a torch for CUDA."""

from __future__ import annotations

import io
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch


class Codec(Protocol):
    """``encode`` and ``decode`` take and return uint8 tensors of [3, height, width]. Both may be called by threads."""

    name: str

    def encode(self, image: Any, quality: int) -> bytes: ...

    def decode(self, jpeg: bytes) -> Any: ...


class TorchvisionCodec:
    name = "torchvision"

    def __init__(self) -> None:
        from torchvision import io

        self._io = io

    def encode(self, image: Any, quality: int) -> bytes:
        return bytes(self._io.encode_jpeg(image, quality).numpy().tobytes())

    def decode(self, jpeg: bytes) -> Any:
        return self._io.decode_jpeg(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8), self._io.ImageReadMode.RGB)


class PillowCodec:
    name = "Pillow"

    def __init__(self) -> None:
        from PIL import Image

        self._image = Image

    def encode(self, image: Any, quality: int) -> bytes:
        sink = io.BytesIO()
        self._image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(sink, "JPEG", quality=quality)
        return sink.getvalue()

    def decode(self, jpeg: bytes) -> Any:
        with self._image.open(io.BytesIO(jpeg)) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@cache
def codec() -> Codec:
    """Return the fastest codec that imports, found once in a process."""
    try:
        return TorchvisionCodec()
    except (ImportError, OSError, RuntimeError):  # RuntimeError: built for another torch
        return PillowCodec()
