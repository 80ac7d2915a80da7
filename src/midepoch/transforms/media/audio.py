"""Audio files as float32, (channels, samples), in [-1, 1].

libsndfile (soundfile) decodes WAV, FLAC, Ogg and MP3 files; FFmpeg (PyAV) everything else, and everything whose
sampling rate is changed. Both release the GIL.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from midepoch.transforms.media.packages import available, missing


@dataclass(frozen=True)
class Audio:
    """How audio is decoded. ``channels``: 1 for the mean of all channels, 2 for stereo, None as stored."""

    sampling_rate: int | None = None
    channels: int | None = None

    dtype = np.dtype(np.float32)
    shape = None

    def __post_init__(self) -> None:
        if self.channels not in (None, 1, 2):
            raise ValueError(f"decode(channels=…) must be 1, 2 or None, got {self.channels!r}")

    def check(self) -> None:
        """Raise MidepochError unless audio can be decoded."""
        if not available("soundfile") and not available("av"):
            raise missing("decode of audio", "soundfile or PyAV")

    @property
    def text(self) -> str:
        rate = "" if self.sampling_rate is None else f" {self.sampling_rate} Hz"
        return f"audio{rate}{'' if self.channels is None else f' {self.channels} channels'}"

    def decode(self, data: Any) -> Any:
        """Return the samples of a file. Raise an exception if it is damaged."""
        samples = self._with_soundfile(data) if available("soundfile") else None
        if samples is None:
            if not available("av"):
                wanted = "" if self.sampling_rate is None else f" at {self.sampling_rate} Hz"
                raise missing(f"decode of this audio file{wanted}", "PyAV")
            samples = self._with_av(data)
        return _mixed(samples, self.channels)

    def _with_soundfile(self, data: Any) -> Any:
        """Return the samples, or None if libsndfile does not know the format or would have to resample."""
        import soundfile

        try:
            with soundfile.SoundFile(io.BytesIO(data)) as file:
                if self.sampling_rate not in (None, file.samplerate):
                    return None
                return np.ascontiguousarray(file.read(dtype="float32", always_2d=True).T)
        except soundfile.LibsndfileError:
            if available("av"):
                return None
            raise

    def _with_av(self, data: Any) -> Any:
        import av

        with av.open(io.BytesIO(data)) as container:
            if not container.streams.audio:
                raise ValueError("the file has no audio")
            stream = container.streams.audio[0]
            resampler = av.AudioResampler(format="fltp", rate=self.sampling_rate)
            parts = [part.to_ndarray() for part in _resampled(container.decode(stream), resampler)]
        if not parts:
            raise ValueError("the file has no audio samples")
        return np.concatenate(parts, axis=1)


def _resampled(frames: Iterator[Any], resampler: Any) -> Iterator[Any]:
    for frame in frames:
        yield from resampler.resample(frame)
    yield from resampler.resample(None)


def _mixed(samples: Any, channels: int | None) -> Any:
    """Return samples (channels, samples) with this number of channels."""
    if channels is None or len(samples) == channels:
        return samples
    if channels == 1:
        return samples.mean(axis=0, keepdims=True, dtype=np.float32)
    if len(samples) == 1:
        return np.repeat(samples, 2, axis=0)
    raise ValueError(f"the file has {len(samples)} channels, which cannot become stereo. Use channels=1 or None")
