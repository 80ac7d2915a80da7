"""Type of the file system of a folder."""

from __future__ import annotations

from pathlib import Path

_NETWORK = ("nfs", "cifs", "smb", "lustre", "fuse", "gpfs", "beegfs", "9p", "ceph")


def file_system(folder: Path) -> str | None:
    """Return the type of a folder's file system, by the longest mount point above it. None if it is unknown."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    path = str(folder.resolve())
    above = [(point, kind) for point, kind in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return max(above, key=lambda mount: len(mount[0]))[1] if above else None


def is_network(folder: Path) -> bool:
    """Return True if other machines may access the same files."""
    return (file_system(folder) or "").startswith(_NETWORK)
