"""``midepoch index``: read footers and headers now, so that the first training job does not wait for them."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from midepoch.cli import common
from midepoch.cli.data import Config, Data, Format, Split, Storage, open_data


def index(
    data: Data,
    split: Split = None,
    config: Config = None,
    force: Annotated[bool, typer.Option(help="Recreate the index if there is one.")] = False,
    index_dir: Annotated[str | None, typer.Option(help="Folder of the indexes. [default: $MIDEPOCH_CACHE]")] = None,
    storage: Storage = None,
    format: Format = None,
    as_json: common.AsJson = False,
) -> None:
    """Create the index of some data, with progress, or check the existing one.

    Exits with 1 if it cannot be saved.

    [bold]midepoch index s3://bucket/lake/[/]

    [bold]midepoch index 'data/*.arrow' --force[/]
    """
    from midepoch.sources.index import default_index_dir

    began = time.monotonic()
    options = {} if index_dir is None else {"index_dir": index_dir}
    ds = open_data(data, split, config, storage, format, force_reindex=force, **options)
    source = ds.pipeline.source
    found: dict[str, Any] = {
        "files": len(source.files),
        "blocks": len(source.layout.block_starts) - 1,
        "rows": source.rows,
        "fingerprint": source.fingerprint,
        "index_dir": str(index_dir or default_index_dir()),
        "saved": all(one.path is not None for one in source.indexes),
        "seconds": round(time.monotonic() - began, 3),
    }
    if as_json:
        common.print_json(found)
    else:
        counts = ", ".join(common.counted(found[f"{noun}s"], noun) for noun in ("file", "block", "row"))
        saved = "indexed in" if found["saved"] else "the index could not be saved in"
        common.console.print(f"{counts}; {saved} {found['index_dir']} ({found['seconds']:.1f} s)")
    if not found["saved"]:
        raise typer.Exit(1)
