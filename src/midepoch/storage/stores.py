"""One small interface with retries for files on a local disk, in an object store, or in any fsspec file system.

Errors of the underlying libraries are converted here: the errors raised have their text without credentials and are not
chained to them.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as fs

from midepoch._internal.hints import hinted_methods
from midepoch._internal.values import integer, reason
from midepoch.errors import CorruptBlockError, DataNotFoundError, FetchError, MidepochError
from midepoch.storage.address import Address, Secrets
from midepoch.storage.damage import PAUSES, changed, is_damage, refusal, retry_after
from midepoch.storage.hub import Hub
from midepoch.storage.open_files import Entry as Entry
from midepoch.storage.open_files import FsspecHandler, ShortError, checked_file, is_foreign, options_of
from midepoch.storage.open_files import OpenFile as OpenFile

T = TypeVar("T")
_log = logging.getLogger("midepoch")

_REFUSALS = (
    "AccessDenied InvalidAccessKeyId SignatureDoesNotMatch InvalidSignature IncompleteSignature InvalidClientTokenId "
    "UnrecognizedClient MissingAuthenticationToken MissingSecurityHeader ExpiredToken InvalidToken RequestExpired "
    "RequestTimeTooSkewed TokenRefreshRequired OptInRequired NotSignedUp AccountProblem AllAccessDisabled "  # S3
    "AuthenticationFailed AuthorizationFailure AuthorizationPermissionMismatch InvalidAuthenticationInfo "
    "NoAuthenticationInformation InsufficientAccountPermissions AccountIsDisabled "  # Azure
    "PermissionDenied Unauthenticated Unauthorized Forbidden"  # Google, and the web
)
"""Names of refusals for which a retry is useless. SDKs also write them as ``ACCESS_DENIED``."""
_SPELLED = "|".join(re.sub(r"(?<=[a-z])(?=[A-Z])", "[_ ]?", name) for name in _REFUSALS.split())
_DENIED = re.compile(rf"HTTP status 40[13]|\b(?:{_SPELLED})\b", re.IGNORECASE)
_NETWORK = re.compile(r"AWS Error|curl|HTTP|[Cc]onnection|[Tt]imed? ?out|status")
_GONE = re.compile(r"NO_SUCH_KEY|NoSuchKey|NO_SUCH_BUCKET|NoSuchBucket|HTTP status 404|Path does not exist")


@hinted_methods({})
@dataclass(frozen=True)
class Retry:
    """Retry policy: ``attempts`` within ``budget`` seconds, with doubling pauses and jitter."""

    attempts: int = 6
    first_pause: float = 0.2
    longest_pause: float = 10.0
    budget: float = 120.0

    def __post_init__(self) -> None:
        integer(self.attempts, "Retry(attempts=…)", 1)

    def pause(self, attempt: int) -> float:
        """Return the seconds to wait after an attempt that failed, counted from 0."""
        return random.uniform(0.5, 1.0) * float(min(self.longest_pause, self.first_pause * 2.0**attempt))

    def pause_asked(self, seconds: float, spent: float) -> float | None:
        """Return the seconds to wait if a server asked for some: as many, and up to 10 % more, so that ranks do not
        return together. None if this exceeds the budget.
        """
        latest = min(seconds + random.uniform(0.0, max(1.0, seconds / 10)), self.budget - spent)
        return latest if latest >= seconds else None


@dataclass(frozen=True, eq=False)
class Store:
    """Files of one file system. Pickles include its credentials, for worker processes. Nothing else saves them."""

    given: fs.FileSystem | Hub
    scheme: str = ""
    secrets: Secrets = field(default_factory=Secrets)
    retry: Retry = field(default_factory=Retry)
    reader: str = ""
    """Name of a library that reads the files with its own threads, which do not survive a fork. Empty if none does."""
    owner: int = field(default_factory=os.getpid)

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.given, self.scheme, self.secrets, self.retry, self.reader)

    @property
    def filesystem(self) -> Any:
        """The file system. Raise MidepochError in a forked process, which has the connections without their threads and
        would wait indefinitely.
        """
        if self.owner != os.getpid() and self.forked_is_fatal:
            raise MidepochError(
                f"{self.reader or self.scheme or 'this store'} cannot be read in a forked process. "
                "Use ds.loader(num_workers=…), which does not fork its workers, or pass "
                "multiprocessing_context='spawn' to DataLoader."
            )
        return self.given

    @property
    def _special(self) -> Hub | FsspecHandler | None:
        """The file system if it is not one of pyarrow's own."""
        special = self.given.handler if isinstance(self.given, fs.PyFileSystem) else self.given
        return special if isinstance(special, Hub | FsspecHandler) else None

    @property
    def forked_is_fatal(self) -> bool:
        """True if the file system has threads that do not survive a fork, or files with a shared position."""
        if self._special is not None:
            return bool(self.reader) or not self._special.survives_fork
        return bool(self.reader) or not (self.local or isinstance(self.given, fs.PyFileSystem))

    @property
    def local(self) -> bool:
        return isinstance(self.given, fs.LocalFileSystem)

    @property
    def identity(self) -> str:
        """Name that distinguishes this store from others, without secrets. It is part of the key of an index."""
        filesystem, place = self.filesystem, ""
        if self._special is not None:
            place = self._special.place
        elif isinstance(filesystem, fs.S3FileSystem):
            place = str(options_of(filesystem).get("endpoint_override", "")).rpartition("@")[2]
        return f"{self.scheme}{filesystem.type_name} {place}"

    def name(self, path: str) -> str:
        """Return a path as it is shown."""
        return Address(f"{self.scheme}{path}").public

    def list(self, folder: str) -> list[Entry]:
        """Return all files below a folder, at any depth, from one listing."""
        if isinstance(self.given, Hub):
            return self.given.below(folder, partial(self.persist, folder, "listed"))
        below = fs.FileSelector(folder, recursive=True, allow_not_found=True)
        infos = self.persist(folder, "listed", lambda: self.filesystem.get_file_info(below))
        return [self._listed(info) for info in infos if _is_file(info)]

    def _listed(self, info: fs.FileInfo) -> Entry:
        """Return the entry of a listed file. Listings of web servers have no sizes."""
        entry = self.stat(info.path) if info.size is None else _entry(info)
        if entry is None:
            raise DataNotFoundError(f"{self.name(info.path)} was listed, but does not exist.")
        return entry

    def stat(self, path: str) -> Entry | None:
        """Return the entry of a file, or None if the path is not a file."""
        if isinstance(self.given, Hub):
            return self.given.stat(path, partial(self.persist, path, "looked at"))
        info = self.persist(path, "looked at", lambda: self.filesystem.get_file_info(path))
        return _entry(info) if _is_file(info) else None

    def is_folder(self, path: str) -> bool:
        if isinstance(self.given, Hub):
            return bool(self.list(path))
        info = self.persist(path, "looked at", lambda: self.filesystem.get_file_info(path))
        return bool(info.type == fs.FileType.Directory)

    def open(self, entry: Entry) -> OpenFile:
        """Open a file for random access, without retries: the caller retries its complete action.

        Raise DataChangedError if the file does not match the entry.
        """
        if self.local:
            self._compare(entry, _local_entry(entry.path))
            return OpenFile(pa.OSFile(entry.path))  # not mapped: truncation of the file would crash the process
        if isinstance(self.given, Hub):  # compared with the entry when it is read
            return OpenFile(pa.PythonFile(self.given.open(entry), mode="r"), entry.etag)
        native = self.filesystem.open_input_file(entry.path)
        special = self._special
        etag = special.version(entry.path) if isinstance(special, FsspecHandler) else _etag(native)
        self._compare(entry, Entry(entry.path, native.size(), 0, etag))
        return OpenFile(pa.PythonFile(checked_file(native), mode="r"), etag)

    def check(self, expected: Entry) -> None:
        """Raise DataChangedError if a file has changed since it was indexed."""
        if self.local:
            self._compare(expected, _local_entry(expected.path))
        elif not isinstance(self.given, Hub):  # files of a commit do not change
            self.open(expected).close()

    @property
    def earlier(self) -> str:
        """Versions of the files that were opened before on this machine, if the store keeps them."""
        return self.given.earlier if isinstance(self.given, Hub) else ""

    def refresh(self) -> None:
        """Look up again what this process, or another one of this machine, looked up a moment ago."""
        if self._special is not None:
            self._special.refresh()

    def _compare(self, expected: Entry, found: Entry) -> None:
        if found.size != expected.size:
            difference = f"it has {found.size} bytes and had {expected.size}"
        elif found.etag and expected.etag and found.etag != expected.etag:
            difference = "its ETag differs"
        elif found.mtime_ns and expected.mtime_ns and found.mtime_ns != expected.mtime_ns:
            difference = "its modification time differs"
        else:
            return
        raise changed(self.name(expected.path), difference)

    def persist(self, path: str, what: str, action: Callable[[], T]) -> T:
        """Run an action, and retry it after a pause if that may help. Raise FetchError with the attempts made."""
        started, attempt = time.monotonic(), 0
        while True:
            try:
                return action()
            except Exception as problem:
                if not isinstance(problem, (MidepochError, OSError, pa.ArrowException)) and not is_foreign(problem):
                    raise
                text, spent = self.secrets.clean(reason(problem)), time.monotonic() - started
                cause = self._cause(problem, text.replace(path, ""))
                pause = self._pause(problem, cause, attempt, spent)
                attempt += 1
                if pause is None:
                    tried = f"{attempt} attempt{'s' if attempt > 1 else ''} in {spent:.1f} s"
                    failure = self._failure(problem, cause, path, what, tried)
            if pause is None:
                raise failure  # outside of the handler: a chained error would be shown with its credentials
            _log.warning("%s could not be %s, trying again in %.1f s: %s", self.name(path), what, pause, text)
            time.sleep(pause)

    def _cause(self, problem: Exception, text: str) -> str:
        """Return what a problem means: the file is "gone", access is "denied", the bytes are "damaged", the "network"
        or the "machine" failed, or pyarrow cannot do it ("unsupported").
        """
        damage = is_damage(problem)
        if isinstance(problem, (FileNotFoundError, NotADirectoryError)) or _GONE.search(text):
            return "gone"
        if isinstance(problem, PermissionError) or _DENIED.search(text):
            return "denied"
        if isinstance(problem, pa.ArrowInvalid) or (self.local and damage):
            return "damaged"
        if is_foreign(problem):
            return "network"
        if not damage and not isinstance(problem, OSError):
            return "unsupported"
        if isinstance(problem, (ConnectionError, TimeoutError, ShortError)) or _NETWORK.search(str(problem)):
            return "machine" if self.local else "network"
        return "damaged" if damage else "machine"

    def _pause(self, problem: Exception, cause: str, attempt: int, spent: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None if a retry is useless."""
        if isinstance(problem, MidepochError) or cause in ("gone", "denied", "unsupported"):
            return None
        if self.local:
            return None if cause == "damaged" or attempt == len(PAUSES) else PAUSES[attempt]
        if attempt + 1 == self.retry.attempts:
            return None
        pause, asked = self.retry.pause(attempt), retry_after(problem)
        if asked is not None:
            return self.retry.pause_asked(max(asked, pause), spent)
        return None if spent + pause > self.retry.budget else pause

    def _failure(self, problem: Exception, cause: str, path: str, what: str, tried: str) -> Exception:
        """Return the error for a problem that retries cannot solve."""
        if isinstance(problem, MidepochError):
            return self._cleaned(problem)
        name, text = self.name(path), self.secrets.clean(reason(problem))
        if cause == "gone":
            said = "" if isinstance(problem, (FileNotFoundError, NotADirectoryError)) else f": {text}"
            remedy = " Restore it, or open the dataset again with force_reindex=True." if what == "read" else ""
            return DataNotFoundError(f"{name} does not exist{said}.{remedy}")
        if cause == "denied":
            remedy = "its permissions" if self.local else "the credentials in the environment or in storage_options"
            return FetchError(f"{name} cannot be {what}: access is denied ({text}). Check {remedy}.")
        if cause == "damaged":
            remedy = "It is damaged, or its name does not say what it is: copy it again, or rename it."
            return CorruptBlockError(f"{name} cannot be read ({tried}): {text}. {remedy}")
        text = f"{name} could not be {what} ({tried}): {text}"
        if (seconds := retry_after(problem)) is not None:
            text += (
                f". The server asks to wait {seconds:.0f} s, but retries may take {self.retry.budget:.0f} s. Wait, or "
                "pass a larger retry=midepoch.Retry(budget=…)."
            )
        elif cause == "network":
            text += ". Check the address and the network."
        return FetchError(text) if cause == "network" else refusal(problem, text)

    def _cleaned(self, problem: MidepochError) -> MidepochError:
        """Return an error without the credentials that it may quote or show through its chain."""
        text = self.secrets.clean(str(problem))
        if text != str(problem):
            return type(problem)(text)
        if problem.__suppress_context__:
            problem.__context__ = None
        return problem


def _local_entry(path: str) -> Entry:
    stat = os.stat(path)
    return Entry(path, stat.st_size, stat.st_mtime_ns)


def _is_file(info: fs.FileInfo) -> bool:
    return bool(info.type == fs.FileType.File)


def _etag(native: pa.NativeFile) -> str:
    """Return the version of an open file. Empty if the store has none."""
    try:
        metadata = native.metadata()
    except (OSError, pa.ArrowException):
        return ""
    etag = {str(name).lower(): value for name, value in (metadata or {}).items()}.get("etag", b"")
    return etag.decode(errors="replace") if isinstance(etag, bytes) else str(etag)


def _entry(info: fs.FileInfo) -> Entry:
    return Entry(info.path, info.size or 0, info.mtime_ns or 0)
