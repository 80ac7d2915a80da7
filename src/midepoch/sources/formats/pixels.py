"""Raw images of MDS and LitData (``pil``) as image files, which ``Dataset.decode`` reads."""

from __future__ import annotations

import io

import numpy as np

from midepoch.errors import MidepochError

_PLAIN = {"L": (b"P5", 1), "RGB": (b"P6", 3)}
_CONVERTED = {"HSV": "RGB", "RGBa": "RGBA", "La": "LA"}
"""Modes that no file has, and the modes that Pillow converts them to."""


def image_file(value: bytes) -> bytes:
    """Return a raw image (width, height and length of the mode as uint32, the mode, the pixels) as a file.

    Greyscale and RGB become PNM: its header is followed by the same bytes. Other modes become TIFF, some of
    them converted.
    """
    if len(value) < 12:
        raise ValueError(f"a raw image of {len(value)} bytes has no header")
    width, height, size = np.frombuffer(value[:12], "<u4").tolist()
    mode, pixels = value[12 : 12 + size].decode("latin-1"), value[12 + size :]
    if mode in _PLAIN:
        magic, channels = _PLAIN[mode]
        if len(pixels) != width * height * channels or not pixels:
            raise ValueError(f"a raw image of {width} × {height} {mode} does not have {len(pixels)} bytes")
        return b"%s %d %d 255\n" % (magic, width, height) + pixels
    try:
        from PIL import Image
    except ImportError:
        raise MidepochError(
            f"raw images of mode {mode!r} need Pillow, which is not installed. Run: pip install midepoch[media]"
        ) from None
    out = io.BytesIO()
    try:
        image = Image.frombytes(mode.replace("I;16N", "I;16"), (width, height), pixels)  # the same bytes
        image.convert(_CONVERTED.get(mode, image.mode)).save(out, "TIFF")
    except (ValueError, OSError, KeyError, MemoryError) as problem:
        raise ValueError(f"a raw image of {width} × {height} {mode!r} cannot be read: {problem}") from None
    return out.getvalue()
