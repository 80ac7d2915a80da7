"""Values of a row in words: images, audio and video by their sizes, numbers of labels with their names.

describe_media(png, {"_type": "Image"})          # Media("image", "PNG, 640 × 480, RGB", {"width": 640, …})
label_names(1, {"_type": "ClassLabel", "names": ["cat", "dog"]})      # "dog"
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from midepoch.transforms.media.decoders import read_samples
from midepoch.transforms.media.images import available, check_packages, missing

_KINDS = {"Image": "image", "Audio": "audio", "Video": "video"}
_NAMES = 8
_SIGNATURES = {
    "image": (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\x00", b"MM\x00*"),
    "audio": (b"fLaC", b"OggS", b"ID3"),
    "video": (b"\x1aE\xdf\xa3",),
}
_LATER = {b"WEBP": "image", b"WAVE": "audio", b"AVI ": "video"}
"""Kinds of RIFF files, named by the bytes 8 to 12."""


class Media(NamedTuple):
    """A file in a column. ``text``: its contents in words. ``details``: the same, JSON-able."""

    kind: str
    text: str
    details: dict[str, Any]


def describe_media(value: Any, feature: Any = None) -> Media | None:
    """Return the contents of an image, audio or video file, or None if a value is none.

    ``value`` is bytes, or a mapping with ``bytes`` and ``path``. A file that cannot be decoded is described by the
    reason.
    """
    named = _KINDS.get(feature.get("_type", "")) if isinstance(feature, Mapping) else None
    path = None
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        path, value = value.get("path"), value.get("bytes")
    elif isinstance(value, str):
        path, value = value, None
    try:
        if value is None and path is not None and named is not None:
            value = Path(path).read_bytes()
        if not isinstance(value, bytes):
            return None
        if (kind := named or _kind_of(value)) is None:
            return None
        return {"image": _image, "audio": _audio, "video": _video}[kind](value)
    except Exception as problem:  # decoders raise anything: Pillow a SyntaxError for some damaged PNGs
        return Media(named or "file", f"cannot be decoded: {problem}", {"problem": str(problem)})


def _kind_of(data: bytes) -> str | None:
    if data[:4] == b"RIFF":
        return _LATER.get(data[8:12])
    if data[4:8] == b"ftyp":
        return "video"
    return next((kind for kind, starts in _SIGNATURES.items() if data.startswith(starts)), None)


def _image(data: bytes) -> Media:
    check_packages("image")
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        image.load()
        width, height = image.size
        details = {"format": image.format, "width": width, "height": height, "mode": image.mode}
    return Media("image", f"{details['format']}, {width} × {height}, {details['mode']}", details)


def _audio(data: bytes) -> Media:
    check_packages("audio")
    samples, rate = read_samples(data)
    channels, seconds = len(samples), samples.shape[1] / rate
    text = f"{seconds:.2f} s, {rate:,} Hz, {channels} channel{'s' * (channels != 1)}"
    return Media("audio", text, {"seconds": round(seconds, 3), "sampling_rate": rate, "channels": channels})


def _video(data: bytes) -> Media:
    if not available("av"):
        raise missing("a look at videos", "PyAV")
    import av

    with av.open(io.BytesIO(data)) as container:
        if not container.streams.video:
            return _audio(data)
        stream = container.streams.video[0]
        frames = sum(1 for _ in container.decode(stream))
        details = {"frames": frames, "width": stream.width, "height": stream.height}
    return Media("video", f"{frames:,} frames, {stream.width} × {stream.height}", details)


def label_names(value: Any, feature: Any) -> Any:
    """Return the names of the labels of a value: a name, a list of them, or None where there are none."""
    if isinstance(feature, list) and len(feature) == 1:  # how old versions of datasets write a list
        feature = {"_type": "List", "feature": feature[0]}
    if not isinstance(feature, Mapping):
        return None
    if isinstance(value, list):
        inner = [label_names(one, feature.get("feature")) for one in value]
        return inner if any(one is not None for one in inner) else None
    names = feature.get("names")
    if feature.get("_type") != "ClassLabel" or not isinstance(names, list) or not isinstance(value, int):
        return None
    return names[value] if 0 <= value < len(names) else None


def feature_text(feature: Any) -> str | None:
    """Return a Hugging Face feature in words, or None if it says no more than the Arrow type.

    >>> feature_text({"_type": "ClassLabel", "names": ["cat", "dog"]})
    'ClassLabel: cat, dog'
    """
    if isinstance(feature, list) and len(feature) == 1:
        feature = {"_type": "List", "feature": feature[0]}
    if not isinstance(feature, Mapping) or feature.get("_type", "Value") == "Value":
        return None
    name = str(feature["_type"])
    if name == "ClassLabel" and isinstance(feature.get("names"), list):
        names = feature["names"]
        more = f", … ({len(names):,} names)" if len(names) > _NAMES else ""
        return f"ClassLabel: {', '.join(map(str, names[:_NAMES]))}{more}"
    if name == "Audio" and feature.get("sampling_rate"):
        return f"Audio, {feature['sampling_rate']:,} Hz"
    if "feature" in feature:
        inner = feature_text(feature["feature"])
        return None if inner is None else f"{name} of {inner}"
    return name
