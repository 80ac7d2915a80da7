"""Decoding of audio: the samples of the file, with either decoder, at another rate, as mono and stereo."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile

from midepoch.errors import MidepochError
from midepoch.transforms.media import decoders, images
from midepoch.transforms.media.decoders import Audio
from midepoch.transforms.media.images import available

RATE = 16_000
EXACT = [("WAV", "FLOAT"), ("WAV", "PCM_16"), ("FLAC", "PCM_16")]
LOSSY = [("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")]


def tones(channels: int = 2, seconds: float = 0.25) -> Any:
    """Sine waves, (channels, samples): 440 Hz in the first channel, 880 Hz in the second …"""
    at = np.arange(int(RATE * seconds)) / RATE
    return np.stack([np.sin(2 * np.pi * 440 * (i + 1) * at) / (i + 2) for i in range(channels)]).astype(np.float32)


def file_of(samples: Any, kind: str = "WAV", coding: str = "FLOAT") -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, samples.T, RATE, format=kind, subtype=coding)
    return stream.getvalue()


def only(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    if not available(package):
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(decoders, "available", lambda name: name == package)


@pytest.mark.parametrize("package", ["soundfile", "av"])
@pytest.mark.parametrize(("kind", "coding"), EXACT + LOSSY)
def test_the_samples_of_the_file(monkeypatch: pytest.MonkeyPatch, package: str, kind: str, coding: str) -> None:
    only(monkeypatch, package)
    samples = tones()
    found = Audio().decode(file_of(samples, kind, coding))
    assert found.dtype == np.float32 and found.shape[0] == 2 and abs(found.shape[1] - samples.shape[1]) < 200
    inner = slice(1000, 3000)  # lossy formats ring at the ends
    np.testing.assert_allclose(found[:, inner], samples[:, inner], atol=1e-4 if (kind, coding) in EXACT else 0.05)


@pytest.mark.parametrize("wanted", [8_000, 22_050, 48_000])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_another_sampling_rate_keeps_the_tones(wanted: int, channels: int) -> None:
    samples = tones(channels)
    found = Audio(wanted).decode(file_of(samples))
    assert found.dtype == np.float32 and found.shape[0] == channels
    assert abs(found.shape[1] - samples.shape[1] * wanted / RATE) <= 2
    for number, channel in enumerate(found):
        spectrum = np.abs(np.fft.rfft(channel))
        assert np.argmax(spectrum) / len(channel) * wanted == pytest.approx(440 * (number + 1), abs=5)


@pytest.mark.parametrize("samples", [0, 1, 2, 5])
def test_files_of_almost_no_samples_can_be_resampled(samples: int) -> None:
    found = Audio(8_000).decode(file_of(tones()[:, :samples]))
    assert found.dtype == np.float32 and found.shape[0] == 2 and found.shape[1] <= samples


def test_the_rate_of_the_file_is_not_changed_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "soundfile")
    np.testing.assert_array_equal(Audio(RATE).decode(file_of(tones())), tones())


def test_mono_and_stereo() -> None:
    samples = tones()
    np.testing.assert_allclose(Audio(channels=1).decode(file_of(samples)), samples.mean(0, keepdims=True), atol=1e-6)
    np.testing.assert_array_equal(Audio(channels=2).decode(file_of(samples[:1])), np.repeat(samples[:1], 2, 0))
    with pytest.raises(ValueError, match="3 channels"):
        Audio(channels=2).decode(file_of(tones(3)))


def test_without_ffmpeg_another_rate_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "soundfile")
    with pytest.raises(MidepochError, match=r"16000 Hz with sampling_rate=8000 needs PyAV.*midepoch\[media\]"):
        Audio(8_000).decode(file_of(tones()))


@pytest.mark.parametrize("package", ["soundfile", "av"])
def test_a_damaged_file_is_an_error(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    only(monkeypatch, package)
    for broken in (b"", b"no audio", file_of(tones(), "FLAC", "PCM_16")[:20]):
        with pytest.raises((OSError, ValueError, RuntimeError)):
            Audio().decode(broken)


def test_a_decoder_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "available", lambda name: False)
    with pytest.raises(MidepochError, match="needs soundfile or PyAV"):
        images.check_packages("audio")
