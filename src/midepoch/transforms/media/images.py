"""Images: JPEG, PNG, WebP and whatever else Pillow opens, as uint8.

Pillow is the reference. A faster decoder of JPEGs is used where one is installed, for the same pixels; a file that it
refuses is decoded by Pillow, so that the same files are damaged with every decoder. Pillow also resizes (bilinear,
antialiased: 1.4 ms from 500 × 400 to 224 × 224, torch takes 4 ms). All of this releases the GIL.

All decoders of JPEGs contain libjpeg-turbo and are called with the same settings (accurate DCT, smooth upsampling),
so that the pixels do not depend on which of them is installed. Images per second of 40 KB (500 × 400), one thread of an
Arm server, in batches of 64: simplejpeg 700, torchvision 790, Pillow 490; if each array is freed before the next, 850,
790 and 590. simplejpeg is first: only it can decode at a smaller scale, and it needs no torch.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from midepoch.errors import MidepochError

Decoder = Callable[[Any, str, "Header", int], Any]
"""Function of the file, the mode, the header and the scale. It returns an array (height, width, channels) or raises."""

_SCAN, _END, _EXIF = 0xDA, 0xD9, 0xE1
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset([0x01, *range(0xD0, 0xD8)])  # markers without a length


class Header(NamedTuple):
    """The part of a JPEG header that decoding depends on. ``orientation``: as in EXIF, 1 for upright."""

    width: int
    height: int
    components: int
    bits: int
    orientation: int


def header_of(data: Any) -> Header | None:
    """Return the header of a JPEG file, or None for other files and damaged ones. 8 µs, Pillow takes 44."""
    if bytes(data[:3]) != b"\xff\xd8\xff":
        return None
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
            orientation = _orientation_of_jpeg(body)
        at += 2 + length
    return None if frame is None or not frame[0] * frame[1] else Header(*frame, orientation)


def _orientation_of_jpeg(data: Any) -> int:
    """Return the orientation in the EXIF data of a JPEG file, 1 if there is none or if it is damaged."""
    from PIL import Image

    exif = Image.Exif()
    try:
        exif.load(bytes(data))
        return _orientation(exif)
    except Exception:  # of any kind, from the bytes of the file
        return 1


def _orientation(exif: Any) -> int:
    value = exif.get(0x0112, 1)
    return value if value in range(1, 9) else 1


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
        return _by_simplejpeg
    return _by_torchvision if available("torchvision") else None


def _by_simplejpeg(data: Any, mode: str, header: Header, scale: int) -> Any:
    from simplejpeg import decode_jpeg

    height, width = (-(-side // scale) if scale > 1 else 0 for side in (header.height, header.width))
    color = "RGB" if mode == "RGB" else "GRAY"
    return decode_jpeg(data, color, fastdct=False, fastupsample=False, min_height=height, min_width=width)


def _by_torchvision(data: Any, mode: str, header: Header, scale: int) -> Any:  # noqa: ARG001
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    if scale > 1:
        raise ValueError("torchvision cannot decode at a smaller scale")
    file = torch.from_numpy(np.frombuffer(data, np.uint8).copy())  # a tensor over read-only memory is a warning
    color = ImageReadMode.RGB if mode == "RGB" else ImageReadMode.GRAY
    return decode_jpeg(file, mode=color).permute(1, 2, 0).numpy()


@lru_cache(maxsize=32)
def available(name: str) -> bool:
    """Return True if a package can be imported. Some are installed and fail, such as torchvision for another torch."""
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def installed(name: str) -> bool:
    """Return True if a package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def missing(what: str, packages: str) -> MidepochError:
    return MidepochError(f"{what} needs {packages}. Install with `pip install midepoch[media]`.")


def check_packages(kind: str) -> None:
    """Raise MidepochError unless a package that decodes such files can be imported."""
    what, names, packages = _PACKAGES[kind]
    if not any(map(available, packages)):
        raise missing(what, names)


_PACKAGES = {
    "image": ("decode of images", "Pillow", ["PIL"]),
    "audio": ("decode of audio", "soundfile or PyAV", ["soundfile", "av"]),
    "video": ("decode of videos", "PyAV or torchcodec", ["av", "torchcodec.decoders"]),
}

FITS = ("crop", "stretch", "shorter")
MODES = {"RGB": 3, "L": 1}
LAYOUTS = ("CHW", "HWC")
_DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow's modes of 16-bit images

Size = tuple[int, int]


@dataclass(frozen=True)
class Images:
    """Options of image files. ``size`` is (height, width), or the shorter side twice if ``fit`` is "shorter"."""

    size: Size | None = None
    fit: str = "crop"
    mode: str = "RGB"
    layout: str = "CHW"
    shrink: bool = True

    dtype = np.dtype(np.uint8)

    def __post_init__(self) -> None:
        for name, allowed in (("fit", FITS), ("mode", tuple(MODES)), ("layout", LAYOUTS)):
            if (given := getattr(self, name)) not in allowed:
                raise ValueError(f"decode({name}=…) must be one of {', '.join(map(repr, allowed))}, got {given!r}")

    @property
    def text(self) -> str:
        return f"image {self.text_of_frames}"

    @property
    def text_of_frames(self) -> str:
        if self.size is None:
            return f"{self.mode} {self.layout}"
        size = str(self.size[0]) if self.fit == "shorter" else "x".join(map(str, self.size))
        return f"{self.mode} {self.layout} {size} {self.fit}{'' if self.shrink else ' full'}"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of every image, or None if it differs."""
        if self.size is None or self.fit == "shorter":
            return None
        return (MODES[self.mode], *self.size) if self.layout == "CHW" else (*self.size, MODES[self.mode])

    def decode(self, data: Any) -> Any:
        """Return an image as an array in the layout, possibly a view. Raise an exception if it is damaged."""
        view = memoryview(data).cast("B")  # the buffers of Arrow have signed bytes
        header = header_of(view)
        pixels, orientation = self._fast(view, header) or self._slow(view, header)
        return self.laid_out(self.resized(pixels, orientation), orientation)

    def _fast(self, data: memoryview, header: Header | None) -> tuple[Any, int] | None:
        """Decode with the fastest decoder. Return None if there is none for this file."""
        decoder = fast_decoder()
        if decoder is None or header is None or header.components not in (1, 3) or header.bits != 8:
            return None
        from PIL import Image

        most = Image.MAX_IMAGE_PIXELS  # Pillow warns of larger images, or refuses them
        if most is not None and header.width * header.height > most:
            return None
        try:
            return decoder(data, self.mode, header, self._scale(header)), header.orientation
        except (ValueError, RuntimeError):
            return None

    def _scale(self, header: Header) -> int:
        least = self.size if self.shrink else None
        if least is not None and header.orientation >= 5:
            least = least[::-1]
        return scale_for(header.width, header.height, least)

    def _slow(self, data: memoryview, header: Header | None) -> tuple[Any, int]:
        """Decode with Pillow."""
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            orientation = _orientation(image.getexif()) if header is None else header.orientation
            if header is not None:
                scale = self._scale(header)
                image.draft(self.mode, (header.width // scale, header.height // scale))
            image.load()
            return _converted(image, self.mode), orientation

    def resized(self, pixels: Any, orientation: int = 1) -> Any:
        """Return pixels (an array or a Pillow image) in the size, before they are turned upright, as an array."""
        from PIL import Image

        if self.size is None:
            return _array(pixels)
        width, height = pixels.size if isinstance(pixels, Image.Image) else pixels.shape[1::-1]
        wanted, box = self._target(width, height, self.size if orientation < 5 else self.size[::-1])
        if wanted == (width, height):
            return _array(pixels)
        image = pixels if isinstance(pixels, Image.Image) else _image(pixels)
        return _array(image.resize(wanted, Image.Resampling.BILINEAR, box))

    def _target(self, width: int, height: int, size: Size) -> tuple[Size, tuple[float, float, float, float]]:
        """Return the (width, height) of the result, and the box of the image that it shows."""
        if self.fit == "shorter":
            ratio = size[0] / min(width, height)
            return (max(size[0], round(width * ratio)), max(size[0], round(height * ratio))), (0, 0, width, height)
        shown: tuple[float, float] = (width, height)
        if self.fit == "crop" and width * size[0] <= height * size[1]:
            shown = (width, width * size[0] / size[1])
        elif self.fit == "crop":
            shown = (height * size[1] / size[0], height)
        left, top = (width - shown[0]) / 2, (height - shown[1]) / 2
        return (size[1], size[0]), (left, top, min(left + shown[0], width), min(top + shown[1], height))

    def laid_out(self, pixels: Any, orientation: int = 1) -> Any:
        """Return an array (height, width, channels) upright and in the layout, as a view."""
        upright = _upright(pixels, orientation)
        return upright.transpose(2, 0, 1) if self.layout == "CHW" else upright


def _image(pixels: Any) -> Any:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0]))


def _array(pixels: Any) -> Any:
    array = np.asarray(pixels)
    return array if array.ndim == 3 else array[:, :, None]


def _converted(image: Any, mode: str) -> Any:
    """Return a Pillow image in a mode. Transparency is dropped; images of 16 bits keep the upper 8."""
    if image.mode in _DEEP:
        from PIL import Image

        deep = np.asarray(image)
        image = Image.fromarray((np.clip(deep, 0, 65535) >> 8).astype(np.uint8))
    if image.mode == mode:
        return image
    if image.mode in ("P", "PA"):  # Pillow warns if transparency is dropped from a palette
        image = image.convert("RGBA" if "transparency" in image.info or image.mode == "PA" else "RGB")
    if image.mode == "LAB":  # which Pillow does not convert to L
        image = image.convert("RGB")
    return image.convert(mode)


def _upright(pixels: Any, orientation: int) -> Any:
    """Return the view of an image that EXIF's orientation asks for."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
