"""Decoding of videos: the frames in their order, evenly spaced, in the requested size, with either decoder."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from midepoch.errors import MidepochError
from midepoch.transforms.media import decoders, images
from midepoch.transforms.media.decoders import Video
from midepoch.transforms.media.images import Images, available

av = pytest.importorskip("av")

FRAMES = 20


def file_of(container: str = "mp4", coding: str = "libx264", frames: int = FRAMES) -> bytes:
    """Frame i has the grey level 10 i, and its left eighth is white."""
    stream = io.BytesIO()
    with av.open(stream, "w", format=container) as file:
        track = file.add_stream(coding, rate=10)
        track.width, track.height, track.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            pixels = np.full((48, 64, 3), 10 * number, np.uint8)
            pixels[:, :8] = 255
            file.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(track.encode(None))
    return stream.getvalue()


def levels(frames: Any) -> Any:
    """The grey level of each frame, at its center."""
    return frames[:, 0, frames.shape[2] // 2, frames.shape[3] // 2].astype(int)


def only(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    if not available(package):
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(decoders, "available", lambda name: name == package)


@pytest.mark.parametrize("package", ["av", "torchcodec.decoders"])
@pytest.mark.parametrize(("container", "coding"), [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("matroska", "mpeg4")])
def test_frames_in_order(monkeypatch: pytest.MonkeyPatch, package: str, container: str, coding: str) -> None:
    only(monkeypatch, package)
    data = file_of(container, coding)
    frames = Video().decode(data)
    assert frames.dtype == np.uint8 and frames.shape == (FRAMES, 3, 48, 64)
    assert np.abs(levels(frames) - 10 * np.arange(FRAMES)).max() <= 5
    assert frames[:, :, 24, 2].min() > 240
    assert np.abs(levels(Video(5).decode(data)) - [0, 50, 100, 140, 190]).max() <= 5
    assert np.abs(levels(Video(1).decode(data))).max() <= 5
    assert len(Video(30).decode(data)) == 30  # more than there are: some repeat


def test_size_mode_and_layout() -> None:
    data = file_of()
    small = Video(4, Images((16, 20)))
    assert small.decode(data).shape == small.shape == (4, 3, 16, 20)
    last = Video(4, Images((16, 20), mode="L", layout="HWC"))
    assert last.decode(data).shape == last.shape == (4, 16, 20, 1)
    assert Video(4).shape is None and Video(None, Images((16, 20))).shape is None


@pytest.mark.parametrize("package", ["av", "torchcodec.decoders"])
def test_a_damaged_file_is_an_error(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    only(monkeypatch, package)
    for broken in (b"", b"no video", file_of()[:200]):
        with pytest.raises((OSError, ValueError, RuntimeError)):
            Video().decode(broken)


def test_a_decoder_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "available", lambda name: False)
    with pytest.raises(MidepochError, match="needs PyAV or torchcodec"):
        images.check_packages("video")
