"""Audio files as float32, (channels, samples), in [-1, 1].

libsndfile (soundfile) decodes WAV, FLAC, Ogg and MP3 files: one second of stereo takes 0.2 to 4 ms, with FFmpeg (PyAV)
2 to 13 ms. FFmpeg decodes everything else, and changes sampling rates. Both release the GIL.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from midepoch.transforms.media.packages import available, missing


@dataclass(frozen=True)
class Audio:
    """Options of audio files. ``channels``: 1 for the mean of all channels, 2 for stereo, None as stored."""

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
        samples, rate = _with_soundfile(data) or _with_av(data)
        samples = _mixed(samples, self.channels)
        return samples if self.sampling_rate in (None, rate) else _resampled(samples, rate, self.sampling_rate)


def _with_soundfile(data: Any) -> tuple[Any, int] | None:
    """Return the samples and their rate, or None if libsndfile is missing or cannot decode the file."""
    if not available("soundfile"):
        return None
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return np.ascontiguousarray(file.read(dtype="float32", always_2d=True).T), file.samplerate
    except soundfile.LibsndfileError:
        if available("av"):
            return None
        raise


def _with_av(data: Any) -> tuple[Any, int]:
    if not available("av"):
        raise missing("decode of this audio file", "PyAV")
    import av

    with av.open(io.BytesIO(data)) as container:
        if not container.streams.audio:
            raise ValueError("the file has no audio")
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp")
        parts = [part.to_ndarray() for frame in container.decode(stream) for part in resampler.resample(frame)]
        rate = stream.rate
    if not parts:
        raise ValueError("the file has no audio samples")
    return np.concatenate(parts, axis=1), rate


def _resampled(samples: Any, rate: int, wanted: int | None) -> Any:
    """Return samples at another rate, each channel by itself: FFmpeg has no layouts for some numbers of channels."""
    if not available("av"):
        raise missing(f"decode of audio of {rate} Hz with sampling_rate={wanted}", "PyAV")
    if not samples.shape[1]:
        return samples
    import av

    channels = []
    for channel in samples:
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=wanted)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channel)[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        parts = [*resampler.resample(frame), *resampler.resample(None)]
        channels.append(np.concatenate([np.zeros(0, np.float32), *(part.to_ndarray()[0] for part in parts)]))
    return np.stack(channels)


def _mixed(samples: Any, channels: int | None) -> Any:
    """Return samples (channels, samples) with this number of channels."""
    if channels is None or len(samples) == channels:
        return samples
    if channels == 1:
        return samples.mean(axis=0, keepdims=True, dtype=np.float32)
    if len(samples) == 1:
        return np.repeat(samples, 2, axis=0)
    raise ValueError(f"the file has {len(samples)} channels, which cannot become stereo. Use channels=1 or None")
