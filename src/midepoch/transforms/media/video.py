"""Video files as frames, uint8, (frames, channels, height, width).

PyAV decodes, whose wheels contain FFmpeg; without it torchcodec, which needs FFmpeg on the machine. All 300 frames of a
video of 320 × 240 take 280 ms with PyAV and 310 to 430 ms with torchcodec, 8 of them 110 and 150 ms. Both release the
GIL and use one thread for each file. Their colors differ by up to 3 of 255: FFmpeg's conversion is not exact.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from midepoch.transforms.media.images import Images
from midepoch.transforms.media.packages import available, missing


@dataclass(frozen=True)
class Video:
    """Options of video files. ``frames``: this many, evenly spaced from the first to the last, None for all."""

    frames: int | None = None
    images: Images = field(default_factory=Images)

    dtype = np.dtype(np.uint8)

    def check(self) -> None:
        """Raise MidepochError unless videos can be decoded."""
        if not available("av") and not available("torchcodec.decoders"):
            raise missing("decode of videos", "PyAV or torchcodec")
        self.images.check()

    @property
    def text(self) -> str:
        return f"video {'all' if self.frames is None else self.frames} frames {self.images.text_of_frames}"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of every result, or None if it differs."""
        shape = self.images.shape
        return None if self.frames is None or shape is None else (self.frames, *shape)

    def decode(self, data: Any) -> Any:
        """Return the frames of a file. Raise an exception if it is damaged."""
        pictures = self._with_av(data) if available("av") else self._with_torchcodec(data)
        return np.stack([self.images.laid_out(self.images.resized(picture)) for picture in pictures])

    def _chosen(self, count: int) -> Any:
        """Return the numbers of the frames, of a video of so many frames."""
        if not count:
            raise ValueError("the video has no frames")
        if self.frames is None:
            return np.arange(count)
        return np.linspace(0, count - 1, self.frames).round().astype(np.int64)

    def _with_torchcodec(self, data: Any) -> list[Any]:
        from torchcodec.decoders import VideoDecoder

        decoder = VideoDecoder(bytes(data), dimension_order="NHWC", num_ffmpeg_threads=1)
        frames = decoder.get_frames_at(self._chosen(len(decoder)).tolist()).data.numpy()
        return [_in_mode(frame, self.images.mode) for frame in frames]

    def _with_av(self, data: Any) -> list[Any]:
        import av

        file = io.BytesIO(data)
        with av.open(file) as container:
            if not container.streams.video:
                raise ValueError("the file has no video")
            count = sum(packet.size > 0 for packet in container.demux(container.streams.video[0]))
        wanted = self._chosen(count).tolist()
        pictures: dict[int, Any] = {}
        reformatter = av.video.reformatter.VideoReformatter()  # one for all frames: to_ndarray makes one for each
        file.seek(0)
        with av.open(file) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for number, frame in enumerate(container.decode(stream)):
                if number in wanted:
                    picture = reformatter.reformat(frame, format="rgb24").to_ndarray()
                    pictures[number] = _in_mode(picture, self.images.mode)
                if number == wanted[-1]:
                    break
        if wanted[-1] not in pictures:
            raise ValueError(f"the video ends before frame {wanted[-1]} of {count}")
        return [pictures[number] for number in wanted]


def _in_mode(frame: Any, mode: str) -> Any:
    from PIL import Image

    return frame if mode == "RGB" else Image.fromarray(frame).convert(mode)
