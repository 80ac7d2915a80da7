"""Tar archives for tests: ordinary ones, and every kind of member that an archive can hold."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
EXTENSIONS = ("jpg", "cls", "JSON", "seg.png", "txt", "")


def write_tar(path: Path, files: Iterable[tuple[str, bytes]], form: str = "gnu", mode: str = "w") -> Path:
    """Write an archive with these files in order."""
    with tarfile.open(path, mode, format=FORMATS[form]) as archive:
        for name, data in files:
            add(archive, name, data)
    return path


def add(archive: tarfile.TarFile, name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **about: object) -> None:
    """Add a member of any kind."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    for attribute, value in about.items():
        setattr(info, attribute, value)
    archive.addfile(info, io.BytesIO(data))


def samples(count: int, first: int = 0, size: int = 700) -> list[tuple[str, bytes]]:
    """Files of samples with an image and a class. The size of the image depends on the number."""
    files = []
    for number in range(first, first + count):
        files.append((f"{number:06d}.jpg", bytes([number % 251]) * (size + number % 13)))
        files.append((f"{number:06d}.cls", str(number).encode()))
    return files


def write_random(path: Path, seed: int) -> None:
    """Write an archive with names, sizes and members of all kinds, in a random format."""
    draw = np.random.default_rng(seed)
    form = list(FORMATS)[int(draw.integers(3))]
    with tarfile.open(path, "w", format=FORMATS[form]) as archive:
        for number in range(int(draw.integers(0, 30))):
            key = _key(draw, number, long=form != "ustar")
            if draw.random() < 0.2:
                _add_other(draw, archive, key)
            for extension in draw.permutation(EXTENSIONS)[: int(draw.integers(1, 5))].tolist():
                size = int(draw.choice([0, 1, 511, 512, 513, 1024, 1500, int(draw.integers(0, 9000))]))
                about = {"pax_headers": {"comment": "é" * 40}} if form == "pax" and draw.random() < 0.2 else {}
                add(archive, f"{key}.{extension}", draw.bytes(size), **about)
                if draw.random() < 0.1:
                    _add_other(draw, archive, key)


def _key(draw: np.random.Generator, number: int, *, long: bool) -> str:
    folder = str(draw.choice(["", "", "a/", "./", "a.b/c/", "x/y.z/", "/", "__x__y/"]))
    name = str(draw.choice(["{0}", "{0:06d}", "né{0}", "a b{0}", "_{0}_"])).format(number)
    return folder + name + ("w" * int(draw.integers(60, 400)) if long and draw.random() < 0.2 else "")


def _add_other(draw: np.random.Generator, archive: tarfile.TarFile, key: str) -> None:
    """Add a member that is not part of a sample, or that makes an unusual one."""
    choice = int(draw.integers(9))
    if choice == 0:
        add(archive, "folder.d", kind=tarfile.DIRTYPE)
    elif choice == 1:
        add(archive, f"{key}.lnk", kind=tarfile.SYMTYPE, linkname="x.jpg")
    elif choice == 2:
        add(archive, f"{key}.hard", kind=tarfile.LNKTYPE, linkname="x" * 150 if archive.format else "x")
    elif choice == 3:
        add(archive, f"noextension{int(draw.integers(99))}", b"ignored")
    elif choice == 4:
        add(archive, str(draw.choice(["__meta__", "__a__/x.jpg", "__info.json__", "__a.b__/c.d"])), b"ignored")
    elif choice == 5:
        add(archive, f"h{int(draw.integers(99))}/.hidden.jpg", b"a key that ends with a slash, or none")
    elif choice == 6:
        add(archive, f"{key}.fifo", kind=tarfile.FIFOTYPE)
    elif choice == 7:
        add(archive, f"{key}.cont", b"contiguous", kind=tarfile.CONTTYPE)
    else:
        add(archive, f"{key}.odd", b"of an unknown type" * 60, kind=b"Z")
