"""The arguments of ``Dataset.decode``, checked."""

from __future__ import annotations

from typing import Any

from midepoch._internal.checks import integer
from midepoch.transforms.media.audio import Audio
from midepoch.transforms.media.images import Images, Size
from midepoch.transforms.media.video import Video

KINDS = ("image", "audio", "video")

_DEFAULTS: dict[str, Any] = {
    "size": None,
    "fit": "crop",
    "mode": "RGB",
    "layout": "CHW",
    "shrink": True,
    "frames": None,
    "sampling_rate": None,
    "channels": None,
}
_OF_IMAGES = ("size", "fit", "mode", "layout", "shrink")
_OPTIONS = {"image": _OF_IMAGES, "video": (*_OF_IMAGES, "frames"), "audio": ("sampling_rate", "channels")}


def decoder_of(kind: str, options: dict[str, Any]) -> Images | Audio | Video:
    """Return the decoder of a kind of file. Raise if an option is wrong, or if no package can decode such files."""
    if kind not in KINDS:
        raise ValueError(f"decode(kind=…) must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    others = [name for name, value in options.items() if value != _DEFAULTS[name] and name not in _OPTIONS[kind]]
    if others:
        raise ValueError(
            f"decode: {', '.join(others)} cannot be given for {kind}. Options: {', '.join(_OPTIONS[kind])}"
        )
    decoder: Images | Audio | Video
    if kind == "audio":
        rate = options["sampling_rate"]
        decoder = Audio(None if rate is None else integer(rate, "decode(sampling_rate=…)", 1), options["channels"])
    else:
        size = _size(options["size"], options["fit"])
        decoder = Images(size, options["fit"], options["mode"], options["layout"], bool(options["shrink"]))
        if kind == "video":
            frames = options["frames"]
            decoder = Video(None if frames is None else integer(frames, "decode(frames=…)", 1), decoder)
    decoder.check()
    return decoder


def _size(given: Any, fit: str) -> Size | None:
    if given is None:
        return None
    sides = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    if len(sides) != 2 or (fit == "shorter" and isinstance(given, (tuple, list))):
        wanted = "one number" if fit == "shorter" else "a number, or (height, width)"
        raise ValueError(f"decode(size=…) must be {wanted} with fit={fit!r}, got {given!r}")
    return integer(sides[0], "decode(size=…)", 1), integer(sides[1], "decode(size=…)", 1)
