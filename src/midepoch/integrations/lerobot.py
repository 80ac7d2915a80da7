"""LeRobot datasets in place: Parquet frames, videos and metadata, as ``LeRobotDataset`` returns them. Needs ``av``.

ds = from_lerobot("data/pusht", delta_timestamps={"action": [0.0, 0.1, 0.2]})
loader = ds.shuffle(seed=42).loader(batch_size=32, num_workers=4)
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from midepoch.dataset import Dataset
from midepoch.errors import DataNotFoundError, FormatError
from midepoch.open import from_files
from midepoch.transforms.media.images import available, missing

Deltas = Mapping[str, Sequence[float]]


def from_lerobot(
    root: str | os.PathLike[str],
    *,
    episodes: Iterable[int] | None = None,
    delta_timestamps: Deltas | None = None,
    tolerance_s: float = 1e-4,
    **options: Any,
) -> Dataset:
    """Return a dataset with the items of ``LeRobotDataset``, of the layouts 2.0, 2.1 and 3.0, in a local folder.

    Each frame has its columns as tensors, the text ``task``, and images and video frames as float32 (channels, height,
    width) in [0, 1].

    - ``episodes``: only these
    - ``delta_timestamps``: seconds relative to the frame, for each column: ``{"action": [0.0, 0.1]}``. Such a column
      has one more dimension, and ``action_is_pad`` is true where the time is outside of the episode
    - ``tolerance_s``: maximum distance of a video frame from its time
    - ``options``: other arguments of ``from_files``
    """
    folder = Path(root).expanduser()
    meta = Meta.read(folder)
    deltas = meta.delta_frames(delta_timestamps or {}, tolerance_s)
    frames = from_files(folder / "data", **options)
    if len(frames) != meta.starts[-1]:
        raise FormatError(
            f"{folder} has {len(frames):,} frames in data/, and {meta.starts[-1]:,} in meta/episodes. It is "
            "incomplete, or has files of another dataset. Copy it again."
        )
    if meta.places and not available("av"):
        raise missing("from_lerobot with videos", "PyAV")
    chosen = frames
    if episodes is not None:
        chosen = frames.select([frame for number in sorted(set(episodes)) for frame in range(*meta.bounds(number))])
    items = FrameItems(folder, meta, deltas, tolerance_s, frames if deltas else None)
    return chosen.map(items, fn_kwargs={"meta": meta.digest, "deltas": deltas}, seed_globals=False)


@dataclass(frozen=True)
class Meta:
    """Metadata of a dataset, the same for all layouts."""

    info: dict[str, Any]
    starts: list[int]  # first frame of each episode, and the end of the last one
    places: dict[str, list[tuple[str, float]]]  # of each video: file of each episode, and second at which it begins
    tasks: dict[int, str]
    subtasks: list[str] | None
    digest: str

    @classmethod
    def read(cls, folder: Path) -> Meta:
        """Read the metadata of a folder. Raise DataNotFoundError or FormatError if it is not a dataset of LeRobot."""
        try:
            text = (folder / "meta" / "info.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise DataNotFoundError(
                f"{folder} is not a LeRobot dataset: it has no meta/info.json. Pass the local folder of the dataset, "
                "such as ~/.cache/huggingface/lerobot/USER/NAME."
            ) from None
        try:
            return cls._parsed(folder, text)
        except (KeyError, TypeError, ValueError, OSError) as problem:  # of JSON and Arrow, too
            raise FormatError(
                f"the metadata of {folder} cannot be read: {type(problem).__name__}: {problem}. A file in meta/ is "
                "damaged or missing. Copy the dataset again."
            ) from problem

    @classmethod
    def _parsed(cls, folder: Path, text: bytes) -> Meta:
        info = json.loads(text)
        version = str(info["codebase_version"])
        if version not in ("v2.0", "v2.1", "v3.0"):
            raise FormatError(
                f"{folder} has the layout {version}, expected v2.0, v2.1 or v3.0. Convert it with LeRobot."
            )
        videos = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
        read = _read_3 if version == "v3.0" else _read_2
        lengths, places, tasks, subtasks = read(folder, info, videos)
        starts = np.cumsum([0, *lengths]).tolist()
        contents = text + json.dumps([starts, places, tasks, subtasks]).encode()
        digest = hashlib.blake2b(contents, digest_size=8).hexdigest()
        return cls(info, starts, places, tasks, subtasks, digest)

    def bounds(self, episode: int) -> tuple[int, int]:
        """Return the first frame of an episode, and the one after its last."""
        if not 0 <= episode < len(self.starts) - 1:
            raise ValueError(f"episode must be in [0, {len(self.starts) - 1}), got {episode}")
        return self.starts[episode], self.starts[episode + 1]

    def delta_frames(self, deltas: Deltas, tolerance: float) -> dict[str, list[int]]:
        """Return the deltas as numbers of frames. Raise ValueError if one is not a multiple of the frame time."""
        fps, features = self.info["fps"], self.info["features"]
        for name, seconds in deltas.items():
            if name not in features:
                raise ValueError(f"delta_timestamps: there is no column {name!r}. There are: {', '.join(features)}.")
            if not len(seconds):
                raise ValueError(f"delta_timestamps of {name!r} are empty. Leave out the column, or pass [0.0].")
            outside = [value for value in seconds if abs(value * fps - round(value * fps)) / fps > tolerance]
            if outside:
                raise ValueError(f"delta_timestamps of {name!r} must be multiples of 1/{fps} s, got {outside}")
        return {name: [round(value * fps) for value in seconds] for name, seconds in deltas.items()}


def _read_3(folder: Path, info: dict[str, Any], videos: list[str]) -> Any:
    where = ("chunk_index", "file_index", "from_timestamp")
    columns = ["episode_index", "length", *(f"videos/{name}/{column}" for name in videos for column in where)]
    paths = sorted((folder / "meta" / "episodes").glob("*/*.parquet"))
    episodes = _in_order(row for path in paths for row in pq.read_table(path, columns=columns).to_pylist())
    places: dict[str, list[tuple[str, float]]] = {name: [] for name in videos}
    for row in episodes:
        for name in videos:
            chunk, file, start = (row[f"videos/{name}/{column}"] for column in where)
            path = info["video_path"].format(video_key=name, chunk_index=chunk, file_index=file)
            places[name].append((path, start))
    names = [_names(folder / "meta" / f"{kind}.parquet") for kind in ("tasks", "subtasks")]
    return [row["length"] for row in episodes], places, dict(enumerate(names[0] or [])), names[1]


def _names(path: Path) -> list[str] | None:
    """Return the texts of a table of tasks: the index of a data frame."""
    if not path.exists():
        return None
    table = pq.read_table(path)
    text = next(name for name in table.column_names if not name.endswith("task_index"))
    names: list[str] = table.column(text).to_pylist()
    return names


def _read_2(folder: Path, info: dict[str, Any], videos: list[str]) -> Any:
    lines = [(folder / "meta" / f"{kind}.jsonl").read_text().splitlines() for kind in ("episodes", "tasks")]
    rows, tasks = ([json.loads(line) for line in each if line.strip()] for each in lines)
    episodes = _in_order(rows)
    chunks = [number // info["chunks_size"] for number in range(len(episodes))]
    places = {
        name: [
            (info["video_path"].format(episode_chunk=chunk, video_key=name, episode_index=number), 0.0)
            for number, chunk in enumerate(chunks)
        ]
        for name in videos
    }
    return [row["length"] for row in episodes], places, {row["task_index"]: row["task"] for row in tasks}, None


def _in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return episodes by their number. Raise ValueError unless they are numbered from 0."""
    episodes = sorted(rows, key=lambda row: row["episode_index"])
    for number, row in enumerate(episodes):
        if row["episode_index"] != number:
            raise ValueError(f"episode {number} of {len(episodes)} has the number {row['episode_index']}")
    return episodes


class FrameItems:
    """Function from a frame in Parquet to an item of LeRobot."""

    __name__ = "lerobot"

    def __init__(
        self, folder: Path, meta: Meta, deltas: dict[str, list[int]], tolerance: float, frames: Dataset | None
    ) -> None:
        self._folder, self._meta, self._deltas, self._tolerance = folder, meta, deltas, tolerance
        needed = [name for name in deltas if name not in meta.places]
        self._others = None if frames is None else frames.select_columns([*{*needed, "timestamp"}])

    def __call__(self, row: dict[str, Any], **_: Any) -> dict[str, Any]:
        meta, episode = self._meta, row["episode_index"]
        first, stop = meta.bounds(episode)
        item = {name: self._tensor(name, value) for name, value in row.items()}
        times = {name: [row["timestamp"]] for name in meta.places}
        for name, deltas in self._deltas.items():
            assert self._others is not None
            wanted = [row["index"] + delta for delta in deltas]
            inside = [max(first, min(stop - 1, frame)) for frame in wanted]
            found = self._others[inside]
            if name in times:
                times[name] = found["timestamp"]
            else:
                item[name] = torch.stack([self._tensor(name, value) for value in found[name]])
            item[f"{name}_is_pad"] = torch.tensor([not first <= frame < stop for frame in wanted])
        for name, seconds in times.items():
            path, start = meta.places[name][episode]
            pictures = frames_at(self._folder / path, [start + second for second in seconds], self._tolerance)
            item[name] = _image(pictures).squeeze(0)
        item["task"] = meta.tasks[row["task_index"]]
        if meta.subtasks is not None and "subtask_index" in row:
            item["subtask"] = meta.subtasks[row["subtask_index"]]
        return item

    def _tensor(self, name: str, value: Any) -> Any:
        if value is not None and self._meta.info["features"].get(name, {}).get("dtype") == "image":
            return _image(_picture(value, self._folder))
        return value if value is None or isinstance(value, str) else torch.tensor(value)


def _picture(value: Any, folder: Path) -> Any:
    """Return the pixels of an image: of Hugging Face's feature, or of a file as bytes or path."""
    from PIL import Image

    if isinstance(value, Mapping):
        data = value["bytes"]
        value = Image.open(folder / value["path"] if data is None else io.BytesIO(data))
    with value as image:
        pixels = np.array(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _image(pixels: Any) -> torch.Tensor:
    """Return images (…, height, width, channels) of uint8 as float32 (…, channels, height, width) in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, -1, -3))).to(torch.float32) / 255


def frames_at(path: Path, seconds: Sequence[float], tolerance: float) -> Any:
    """Return the frames of a video that are nearest to these times, uint8 (frames, height, width, channels).

    Frames are decoded from the key frame before the first time to the last time.
    """
    import av

    try:
        nearest = _nearest(path, seconds)
    except av.FFmpegError as problem:
        raise ValueError(
            f"{path} cannot be decoded at {min(seconds):.4f} s: {problem}. Copy the file again."
        ) from problem
    for second, (distance, frame) in zip(seconds, nearest, strict=True):
        if frame is None:
            raise ValueError(f"{path} cannot be decoded at {second:.4f} s: it ends before. Copy the file again.")
        if not distance < tolerance:
            raise ValueError(
                f"{path} has no frame within {tolerance} s of {second:.4f} s: the nearest is {distance:.4f} s away. "
                "Pass a larger tolerance_s, or leave out the episode."
            )
    pictures: dict[int, Any] = {}
    for _, frame in nearest:
        if id(frame) not in pictures:
            pictures[id(frame)] = frame.to_ndarray(format="rgb24")
    return np.stack([pictures[id(frame)] for _, frame in nearest])


def _nearest(path: Path, seconds: Sequence[float]) -> list[tuple[float, Any]]:
    """Return the nearest frame to each time, with its distance."""
    import av

    nearest: list[tuple[float, Any]] = [(float("inf"), None)] * len(seconds)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        container.seek(int(min(seconds) / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            time = float(frame.pts * stream.time_base)
            for number, second in enumerate(seconds):
                if abs(time - second) < nearest[number][0]:
                    nearest[number] = (abs(time - second), frame)
            if time >= max(seconds):
                break
    return nearest
