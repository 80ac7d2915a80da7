"""Listing files: sorted, each once, through links."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import midepoch
from data import numbered, write_arrow
from midepoch.sources.files import find_files


def test_listing_does_not_depend_on_the_order_of_a_folder(tmp_path: Path) -> None:
    found = []
    for order in (("m", "b", "a"), ("a", "b", "m")):
        root = tmp_path / "".join(order)
        root.mkdir()
        for name in order:
            if name == "a":
                (root / "a").symlink_to(root / "m", target_is_directory=True)
            else:
                (root / name).mkdir()
        for name in ("m", "b"):
            pq.write_table(pa.table({"x": [1]}), root / name / "x.parquet")
        found.append([entry.path.removeprefix(str(root)) for entry in find_files(root).entries])
    assert found[0] == found[1] == ["/b/x.parquet", "/m/x.parquet"]


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "data").mkdir()
    write_arrow(tmp_path / "real" / "b.arrow", numbered(5, 9), 2)
    write_arrow(tmp_path / "data" / "a.arrow", numbered(0, 5), 2)
    (tmp_path / "data" / "more").symlink_to(tmp_path / "real")
    (tmp_path / "data" / "up").symlink_to(tmp_path / "data")  # leads back: each folder is read once
    assert [row["id"] for row in midepoch.from_files(tmp_path / "data")] == list(range(9))
