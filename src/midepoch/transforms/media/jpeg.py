"""JPEG files: the header, and the decoders that may be installed.

All decoders here contain libjpeg-turbo and are called with the same settings (accurate DCT, smooth upsampling), so that
the pixels do not depend on which of them is installed. Images per second of 40 KB (500 × 400), one thread of an Arm
server, in batches of 64: simplejpeg 700, torchvision 790, Pillow 490; if each array is freed before the next, 850, 790
and 590. simplejpeg is first: only it can decode at a smaller scale, and it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from midepoch.transforms.media.packages import available

Decoder = Callable[[Any, str, "Header", int], Any]
"""Function of the file, the mode, the header and the scale. It returns an array (height, width, channels) or raises."""

_SCAN, _END, _EXIF = 0xDA, 0xD9, 0xE1
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset([0x01, *range(0xD0, 0xD8)])  # markers without a length
_LONG = 4
_ORIENTATION = 0x0112


class Header(NamedTuple):
    """The part of a JPEG header that decoding depends on. ``orientation``: as in EXIF, 1 for upright."""

    width: int
    height: int
    components: int
    bits: int
    orientation: int


def is_jpeg(data: Any) -> bool:
    return bytes(data[:3]) == b"\xff\xd8\xff"


def header_of(data: Any) -> Header | None:
    """Return the header of a JPEG file, or None if it is damaged. 8 µs, Pillow takes 44."""
    at, frame, orientation = 2, None, 1
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF or marker in _ALONE:
            at += 1 if marker == 0xFF else 2
            continue
        if marker in (_SCAN, _END):
            break
        length = (data[at + 2] << 8) + data[at + 3]
        body = data[at + 4 : at + 2 + length]
        if marker in _FRAMES and len(body) >= 6:
            frame = ((body[3] << 8) + body[4], (body[1] << 8) + body[2], body[5], body[0])
        elif marker == _EXIF and bytes(body[:6]) == b"Exif\0\0":
            orientation = _orientation(body[6:])
        at += 2 + length
    return None if frame is None or not frame[0] * frame[1] else Header(*frame, orientation)


def _orientation(exif: Any) -> int:
    """Return the orientation in EXIF data, 1 if there is none."""
    exif = bytes(exif)
    order = {b"II": "little", b"MM": "big"}.get(exif[:2])
    if order is None:
        return 1

    def number(at: int, size: int) -> int:
        return int.from_bytes(exif[at : at + size], order)  # type: ignore[arg-type]

    start = number(4, 4)
    for entry in range(start + 2, min(start + 2 + 12 * number(start, 2), len(exif)), 12):
        if number(entry, 2) == _ORIENTATION:
            value = number(entry + 8, 4 if number(entry + 2, 2) == _LONG else 2)
            return value if 1 <= value <= 8 else 1
    return 1


def scale_for(width: int, height: int, least: tuple[int, int] | None) -> int:
    """Return the largest divisor (1, 2, 4 or 8) that leaves at least the (height, width) of ``least``."""
    if least is None:
        return 1
    fits = (scale for scale in (8, 4, 2) if height // scale >= least[0] and width // scale >= least[1])
    return next(fits, 1)


@lru_cache(maxsize=1)
def fast_decoder() -> Decoder | None:
    """Return the fastest decoder that is installed besides Pillow."""
    if available("simplejpeg"):
        return _simplejpeg()
    return _torchvision() if available("torchvision") else None


def _simplejpeg() -> Decoder:
    from simplejpeg import decode_jpeg

    def decode(data: Any, mode: str, header: Header, scale: int) -> Any:
        height, width = (-(-side // scale) for side in (header.height, header.width))
        return decode_jpeg(
            data,
            "RGB" if mode == "RGB" else "GRAY",
            fastdct=False,
            fastupsample=False,
            min_height=height if scale > 1 else 0,
            min_width=width if scale > 1 else 0,
        )

    return decode


def _torchvision() -> Decoder:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    modes = {"RGB": ImageReadMode.RGB, "L": ImageReadMode.GRAY}

    def decode(data: Any, mode: str, header: Header, scale: int) -> Any:  # noqa: ARG001
        if scale > 1:
            raise ValueError("torchvision cannot decode at a smaller scale")
        file = torch.from_numpy(np.frombuffer(data, np.uint8).copy())  # a tensor over read-only memory is a warning
        return decode_jpeg(file, mode=modes[mode]).permute(1, 2, 0).numpy()

    return decode
