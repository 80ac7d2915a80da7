"""The object store of checkpoints, and the key-value store of the ranks of a start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any, TypeVar

from midepoch.checkpoint.store import Object
from midepoch.errors import FetchError
from simulation.cluster import Cluster

T = TypeVar("T")


class Bucket:
    """Objects of a history. They survive everything."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.content: dict[str, tuple[bytes, float]] = {}

    def request(self, name: str, action: Callable[[], T], *, reads: bool = False) -> T:
        """Run a request: it may be slow, fail before or after it is done, or be done twice."""
        fault = self.cluster.operation("store", name, reads=reads)
        kind = None if fault is None else fault.kind
        if kind == "slow":
            self.cluster.sleep(30.0)
        if kind == "throttle":
            raise FetchError(f"sim://bucket/{name}: 503 SlowDown")
        result = action()
        if kind == "twice":
            result = action()
        if kind == "lost answer":
            raise FetchError(f"sim://bucket/{name}: connection reset")
        return result


def objects_of(bucket_now: Callable[[], Bucket]) -> type:
    """Return a class with the interface of ``midepoch.checkpoint.remote.Objects``."""

    class Objects:
        poll_interval = 0.5

        def __init__(self, address: str, storage_options: Mapping[str, Any] | None = None) -> None:
            del storage_options
            self.name, self._bucket = address, bucket_now()

        def list(self, below: str = "") -> dict[str, Object]:
            bucket = self._bucket

            def found() -> dict[str, Object]:
                inside = f"{below}/" if below else ""
                names = sorted(name for name in bucket.content if name.startswith(inside))
                return {name: Object(len(bucket.content[name][0]), bucket.content[name][1]) for name in names}

            return bucket.request(f"list {below}", found, reads=True)

        def size(self, name: str) -> int:
            data = self.get(name)
            if data is None:
                raise FileNotFoundError(name)
            return len(data)

        def get(self, name: str) -> bytes | None:
            content = self._bucket.content
            return self._bucket.request(f"get {name}", lambda: content.get(name, (None, 0.0))[0], reads=True)

        def has_ranges(self, name: str) -> bool:
            del name
            return True

        def read_into(self, name: str, data: memoryview, offset: int) -> int:
            whole = self.get(name)
            if whole is None:
                raise FileNotFoundError(name)
            part = whole[offset : offset + len(data)]
            data[: len(part)] = part
            return len(part)

        def put(self, name: str, data: bytes) -> None:
            bucket = self._bucket

            def write() -> None:
                bucket.content[name] = (bytes(data), bucket.cluster.time())

            bucket.request(f"put {name}", write)

        @contextmanager
        def writer(self, name: str) -> Iterator[BytesIO]:
            buffer = BytesIO()
            yield buffer
            self.put(name, buffer.getvalue())

        def delete(self, names: Sequence[str]) -> None:
            bucket = self._bucket

            def remove() -> None:
                for name in names:
                    bucket.content.pop(name, None)

            if names:
                bucket.request(f"delete {sorted(names)[0]}", remove)

    return Objects


class KeyValues:
    """The store of torch.distributed, as far as the library uses it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        current = self.values.get(name)
        if current == expected.encode() or (current is None and not expected):
            self.values[name] = value.encode()
        return self.values.get(name, expected.encode())

    def set(self, name: str, value: str) -> None:
        self.values[name] = value.encode()

    def check(self, names: list[str]) -> bool:
        return all(name in self.values for name in names)

    def delete_key(self, name: str) -> bool:
        return self.values.pop(name, None) is not None
