"""decode: files in a column, as bytes or paths, to arrays, one for each row; and decoders of audio and video.

Video files become frames, uint8, (frames, channels, height, width).

PyAV decodes, whose wheels contain FFmpeg; without it torchcodec, which needs FFmpeg on the machine. All 300 frames of a
video of 320 × 240 take 280 ms with PyAV and 310 to 430 ms with torchcodec, 8 of them 110 and 150 ms. Both release the
GIL and use one thread for each file. Their colors differ by up to 3 of 255: FFmpeg's conversion is not exact.

A decoder is the options of one kind of file. Its ``text`` is the options: the result of ``decode`` follows from it and
from the file. ``shape`` is that of every result, or None if it differs. Several threads may call ``decode``.

Audio files become float32, (channels, samples), in [-1, 1].

libsndfile (soundfile) decodes WAV, FLAC, Ogg and MP3 files: one second of stereo takes 0.2 to 4 ms, with FFmpeg (PyAV)
2 to 13 ms. FFmpeg decodes everything else, and changes sampling rates. Both release the GIL.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch._internal.values import integer
from midepoch.errors import ColumnError
from midepoch.transforms.batch import Batch, Encoded, check_columns
from midepoch.transforms.columns import BINARY, TEXT
from midepoch.transforms.formats import room
from midepoch.transforms.function import RunContext, failed
from midepoch.transforms.media.images import Images, Size, available, check_packages, missing


@dataclass(frozen=True)
class Video:
    """Options of video files. ``frames``: this many, evenly spaced from the first to the last, None for all."""

    frames: int | None = None
    images: Images = field(default_factory=Images)

    dtype = np.dtype(np.uint8)

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
        mode, images = self.images.mode, self.images
        return np.stack([images.laid_out(images.resized(_in_mode(picture, mode))) for picture in pictures])

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
        return [*decoder.get_frames_at(self._chosen(len(decoder)).tolist()).data.numpy()]

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
                    pictures[number] = reformatter.reformat(frame, format="rgb24").to_ndarray()
                if number == wanted[-1]:
                    break
        if wanted[-1] not in pictures:
            raise ValueError(f"the video ends before frame {wanted[-1]} of {count}")
        return [pictures[number] for number in wanted]


def _in_mode(frame: Any, mode: str) -> Any:
    from PIL import Image

    return frame if mode == "RGB" else Image.fromarray(frame).convert(mode)


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

    @property
    def text(self) -> str:
        rate = "" if self.sampling_rate is None else f" {self.sampling_rate} Hz"
        return f"audio{rate}{'' if self.channels is None else f' {self.channels} channels'}"

    def decode(self, data: Any) -> Any:
        """Return the samples of a file. Raise an exception if it is damaged."""
        samples, rate = read_samples(data)
        samples = _mixed(samples, self.channels)
        return samples if self.sampling_rate in (None, rate) else _resampled(samples, rate, self.sampling_rate)


def read_samples(data: Any) -> tuple[Any, int]:
    """Return the samples (channels, samples) of a file, and their rate. Raise an exception if it is damaged."""
    if available("soundfile"):
        import soundfile

        try:
            with soundfile.SoundFile(io.BytesIO(data)) as file:
                return np.ascontiguousarray(file.read(dtype="float32", always_2d=True).T), file.samplerate
        except soundfile.LibsndfileError:  # libsndfile cannot decode the file
            if not available("av"):
                raise
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


_OPTIONS = {"image": fields(Images), "audio": fields(Audio), "video": (*fields(Images), *fields(Video)[:1])}
_DEFAULTS = {option.name: option.default for options in _OPTIONS.values() for option in options}


def decoder_of(kind: str, options: dict[str, Any]) -> Images | Audio | Video:
    """Return the decoder of a kind of file. Raise if an option is wrong, or if no package can decode such files."""
    if kind not in _OPTIONS:
        raise ValueError(f"decode(kind=…) must be one of {', '.join(map(repr, _OPTIONS))}, got {kind!r}")
    allowed = [option.name for option in _OPTIONS[kind]]
    others = [name for name, value in options.items() if value != _DEFAULTS[name] and name not in allowed]
    if others:
        raise ValueError(f"decode: {', '.join(others)} cannot be given for {kind}. Options: {', '.join(allowed)}")
    given = {name: options[name] for name in allowed}
    for name in ("frames", "sampling_rate"):
        if given.get(name) is not None:
            given[name] = integer(given[name], f"decode({name}=…)", 1)
    if (given.get("sampling_rate") or 1000) < 1000:
        raise ValueError(f"decode(sampling_rate=…) is in Hz, as in 16_000, got {given['sampling_rate']}")
    frames = given.pop("frames", None)
    check_packages(kind)
    if kind == "audio":
        return Audio(**given)
    check_packages("image")
    images = Images(**{**given, "size": _size(given["size"], given["fit"]), "shrink": bool(given["shrink"])})
    return images if kind == "image" else Video(frames, images)


def _size(given: Any, fit: str) -> Size | None:
    if given is None:
        return None
    sides = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    if len(sides) != 2 or (fit == "shorter" and isinstance(given, (tuple, list))):
        wanted = "one number" if fit == "shorter" else "a number, or (height, width)"
        raise ValueError(f"decode(size=…) must be {wanted} with fit={fit!r}, got {given!r}")
    return integer(sides[0], "decode(size=…)", 1), integer(sides[1], "decode(size=…)", 1)


File = tuple[Any, str | None]
"""The bytes of a file, as a buffer or bytes, and its path if there is one."""


def reader_of(name: str, column: Any, root: str | None) -> Callable[[int], File]:
    """Return a function that reads the file of a row. It raises ValueError for a null, and OSError for a missing file.

    A column has bytes, paths, or structs of both as in Hugging Face's features. Arrow columns are not converted to
    Python: the bytes of a row are a view of the column.
    """
    array = column.array if isinstance(column, Encoded) else column
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not isinstance(array, pa.Array):
        return lambda i: _read(_parts(name, array[i]), root)
    kind, files, paths = array.type, None, None
    if pa.types.is_struct(kind):
        fields = dict(zip((field.name for field in kind), array.flatten(), strict=True))
        if not {"bytes", "path"} & fields.keys():
            raise ColumnError(f"decode: column {name!r} has the fields {', '.join(fields)}: there is no bytes or path.")
        files, paths = fields.get("bytes"), fields.get("path")
    elif kind in BINARY:
        files = array
    elif kind in TEXT:
        paths = array
    else:
        raise ColumnError(f"decode: column {name!r} is {kind}. It must have bytes, paths, or structs of both.")

    def parts(i: int) -> tuple[Any, str | None]:
        data = None if files is None or not files[i].is_valid else files[i].as_buffer()
        return data, None if paths is None else paths[i].as_py()

    return lambda i: _read(parts(i), root)


def _parts(name: str, value: Any) -> tuple[Any, str | None]:
    """Return the bytes and the path of a value that a function returned."""
    if value is None or isinstance(value, (bytes, bytearray, memoryview)):
        return value, None
    if isinstance(value, (str, os.PathLike)):
        return None, os.fspath(value)
    if isinstance(value, dict) and {"bytes", "path"} & value.keys():
        return value.get("bytes"), value.get("path")
    decoded = " It is decoded already: call decode once" if hasattr(value, "shape") else ""
    raise TypeError(f"column {name!r} has a value of type {type(value).__name__}, expected bytes or a path.{decoded}")


def _read(parts: tuple[Any, str | None], root: str | None) -> File:
    data, path = parts
    if data is not None:
        return data, path
    if path is None:
        raise ValueError("the value is null. Leave such rows out with filter()")
    found = path if root is None else os.path.join(root, path)
    try:
        with open(found, "rb") as file:
            return file.read(), path
    except FileNotFoundError as problem:
        asked = "" if os.path.splitext(path)[1] else "Texts are taken for paths: is this the column of the files? "
        text = f"there is no file {os.path.abspath(found)}. {asked}Relative paths begin at decode(…, root='FOLDER')"
        raise FileNotFoundError(problem.errno, text) from None


@dataclass(frozen=True)
class Decode:
    """One call of ``Dataset.decode``. ``tensors``: results are torch tensors, otherwise numpy arrays."""

    column: str
    decoder: Images | Audio | Video
    root: str | None = None
    tensors: bool = False
    on_error: str = "raise"

    @property
    def name(self) -> str:
        return f"decode({self.column})"

    @property
    def text(self) -> str:
        return f"decode[{self.column} {self.decoder.text}]"

    def apply(self, batch: Batch, run: RunContext) -> Batch:
        """Return the batch with the decoded column: one array if all rows have the same shape, else a list."""
        check_columns([self.column], list(batch.columns), "decode")
        read, shape = reader_of(self.column, batch.columns[self.column], self.root), self.decoder.shape
        stacked = None if shape is None else room((len(batch), *shape), self.decoder.dtype, run.collect)
        arrays: list[Any] = []
        kept: list[int] = []
        for i in range(len(batch)):
            path = None
            try:
                data, path = read(i)
                array = self.decoder.decode(data)
            except Exception as problem:
                file, row = "" if path is None else f" of {path}", int(batch.rows[i])
                what = f"decode({self.column!r}){file} failed on row {row} of the dataset ({run.place(row)})"
                failed(what, self.on_error, problem, run, 1, ". To leave such files out: decode(…, on_error='skip')")
                continue
            if stacked is None:
                arrays.append(_tensor(array) if self.tensors else array)
            else:
                stacked[len(kept)] = array
            kept.append(i)
        made: Any = arrays if stacked is None else stacked[: len(kept)]
        if stacked is not None and self.tensors:
            made = _tensor(made)
        if len(kept) < len(batch):
            batch = batch.keep(np.array(kept, dtype=np.int64))
        nullable = {name: paths for name, paths in batch.nullable.items() if name != self.column}
        return batch.with_columns({**batch.columns, self.column: made}, nullable)


def _tensor(array: Any) -> Any:
    import torch

    if any(stride < 0 for stride in array.strides) or not array.flags.writeable:
        array = array.copy(order="K")  # not transposed: 25 µs for 500 × 400, otherwise 190 µs
    return torch.from_numpy(array)
