"""Names and arguments of other libraries that do not exist here, with what to do instead."""

from __future__ import annotations

_LAZY = "Steps run while rows are read, and nothing is stored: omit it. For results that are stored once, use cache()."
_WORKERS = "Steps run in the workers of a loader: ds.loader(batch_size, num_workers=…)."
_STORED = {
    "num_proc": _WORKERS,
    "num_workers": _WORKERS,
    "load_from_cache_file": _LAZY,
    "cache_file_name": _LAZY,
    "cache_file_names": _LAZY,
    "keep_in_memory": _LAZY,
    "writer_batch_size": _LAZY,
    "new_fingerprint": _LAZY,
    "suffix_template": _LAZY,
    "desc": _LAZY,
}
_FUNCTION = {
    **_STORED,
    "with_rank": "Results must not depend on the worker: use with_indices=True for the number of the row.",
    "features": "Convert columns with cast({'label': 'int32'}) after it.",
    "disable_nullable": "Convert columns with cast({'label': 'int32'}) after it.",
    "fn": "It is the first argument.",
    "func": "It is the first argument.",
    "generator": "Use with_generator=True: the function gets a generator for each row.",
    "kwargs": "Use fn_kwargs={…}.",
    "args": "Use fn_kwargs={…}.",
    "try_original_type": _LAZY,
}
_SEEDED = "Use seed=…: the order is computed from it and the epoch, in every process."
_ALL_ROWS = "All rows are shuffled, without a buffer: omit it. After filter, pack and the like, use window=… (rows)."

METHODS: dict[str, dict[str, str]] = {
    "__init__": {"spec missing": "Open data with midepoch.from_files(paths), or midepoch.load_dataset(name, split=…)."},
    "map": _FUNCTION,
    "filter": {**_FUNCTION, "function": "Did you mean condition=?"},
    "flat_map": _FUNCTION,
    "shuffle": {
        "buffer_size": _ALL_ROWS,
        "buffer": _ALL_ROWS,
        "generator": _SEEDED,
        "seeds": _SEEDED,
        "rng": _SEEDED,
        "reshuffle_each_iteration": "Every epoch has another order.",
        "max_buffer_input_shards": _ALL_ROWS,
        **_STORED,
    },
    "loader": {
        "shuffle": "Shuffle the dataset: ds.shuffle(seed=…).loader(…). The order changes every epoch.",
        "sampler": "The order belongs to the dataset: ds.shuffle(seed=…) for RandomSampler, ds.weighted(weights, "
        "num_samples=…) for WeightedRandomSampler, ds.weighted(np.ones(len(ds))) for RandomSampler(replacement=True), "
        "ds.select(indices).shuffle(seed=…) for SubsetRandomSampler. Ranks are detected, which replaces "
        "DistributedSampler.",
        "batch_sampler": "Batches are batch_size rows of the dataset's order: ds.shuffle(seed=…), or "
        "ds.select(indices) for an order of your own. max_tokens=… makes batches of rows of similar lengths. "
        "ds.batch(n) and ds.pack(n) combine rows before.",
        "group_by_length": "Use max_tokens=…, which makes batches of rows of similar lengths.",
        "max_length": "Use max_tokens=… for the tokens of a batch, or shorten rows with tokenize(…, max_length=…).",
        "steps": "Use steps_per_epoch=… for the batches of a pass.",
        "generator": "The order comes from ds.shuffle(seed=…), and random functions from map(with_generator=True).",
        "seed": "Shuffle the dataset: ds.shuffle(seed=…).loader(…).",
        "epoch": "Call loader.set_epoch(epoch), or load a state.",
        "num_replicas": "Use world_size=….",
        "num_ranks": "Use world_size=….",
        "dataset": "It is a method of the dataset: ds.loader(batch_size).",
        "pin_memory_device": 'Use device="cuda": batches are on the GPU when they are requested.',
        "in_order": "Batches always come in order, so that a resume is exact.",
        "snapshot_every_n_steps": "The state is exact at every step, and costs nothing: omit it.",
        "batched": "batch_size rows make a batch. Use batch_size=None for single rows.",
        "workers": "Did you mean num_workers=?",
        "batch_size missing": "For example ds.loader(batch_size=32).",
    },
    "shard": {
        "contiguous": 'Use mode="file" for complete files, or mode="example" for every n-th row.',
        "rank": "Use index=…. A loader detects its rank by itself: ds.loader(batch_size) needs no shard().",
        "world_size": "Use num_shards=….",
        **_STORED,
    },
    "train_test_split": {
        "stratify": "Did you mean stratify_by_column=?",
        "generator": _SEEDED,
        **_STORED,
    },
    "weighted": {
        "generator": _SEEDED,
        "weight": "Did you mean weights=?",
        "weights missing": "For example ds.weighted('weight', seed=0), by the name of a column.",
    },
    "balanced": {
        "generator": _SEEDED,
        "column missing": "For example ds.balanced('label', seed=0).",
        "replacement": "Rows of rare classes have to be repeated. Use ds.weighted(weights, replacement=False).",
    },
    "sort": {
        "column": "Did you mean by=?",
        "column_names": "Did you mean by=?",
        "key": "A function of a row is the first argument. For lengths use length=True.",
        "null_placement": "Null comes last: omit it.",
        "kind": "The sort is stable: omit it.",
        **_STORED,
    },
    "with_format": {
        "output_all_columns": "All columns are delivered unless columns=[…] selects some.",
        "device": 'Use ds.loader(batch_size, device="cuda").',
        "format": "Did you mean type=?",
        "kind": "Did you mean type=?",
    },
    "select": _STORED,
    "batch": {
        "batch_size": "Did you mean size=? For batches of training use ds.loader(batch_size=…).",
        "drop_last_batch": "Did you mean drop_last=?",
        **_STORED,
    },
    "iter": {
        "drop_last": "Did you mean drop_last_batch=?",
        "num_workers": _WORKERS,
        "size": "Did you mean batch_size=?",
    },
    "pack": {
        "max_length": "Did you mean length=?",
        "max_seq_length": "Did you mean length=?",
        "seq_length": "Did you mean length=?",
        "block_size": "Did you mean length=?",
        "pad_token_id": "Did you mean pad=?",
        "eos_token_id": "Did you mean eos=?",
        "packing": "Did you mean strategy=?",
        "length missing": "For example ds.pack(2048, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id).",
    },
    "select_columns": {"columns": "Did you mean column_names=?"},
    "remove_columns": {"columns": "Did you mean column_names=?"},
    "rename_columns": {"columns": "Did you mean column_mapping=?"},
    "cast": {"features": "Did you mean columns=?", **_STORED},
    "class_encode_column": {"include_nulls": "Null stays null."},
}
"""Arguments of methods that exist."""

_FROZEN = "Datasets do not change in place: ds = ds.{}(…)."
_WRITE = "Nothing is converted or written here. Write the rows as you iterate, or keep results with cache()."

ATTRIBUTES = {
    "set_format": _FROZEN.format("with_format"),
    "set_transform": _FROZEN.format("with_transform"),
    "reset_format": "Use ds = ds.with_format(None).",
    "formatted_as": "Use ds.with_format(…), which returns a new dataset.",
    "format": "Use ds.pipeline.format, or with_format(…) to choose one.",
    "to_iterable_dataset": "It is iterable, and resumable: for row in ds, or ds.loader(batch_size).",
    "head": "Use ds[:5], or ds.take(5).",
    "tail": "Use ds[-5:].",
    "limit": "Use ds.take(100).",
    "sample": "Use ds.shuffle(seed=0).take(100).",
    "show": "Use ds[:5], and `midepoch peek` in a shell.",
    "columns": "Use ds.column_names.",
    "to_list": "Use list(ds), or list(ds.take(100)).",
    "to_dict": "Use ds[:], or ds[:100], which are columns.",
    "to_csv": _WRITE,
    "to_json": _WRITE,
    "to_parquet": _WRITE,
    "to_sql": _WRITE,
    "to_polars": "Use polars.from_pandas(ds.to_pandas()).",
    "save_to_disk": _WRITE,
    "push_to_hub": _WRITE,
    "add_column": "Use map(lambda row, i: {'new': values[i]}, with_indices=True).",
    "add_item": "Use midepoch.concat([ds, other]).",
    "flatten": "Use map to choose the fields: map(lambda row: {'a': row['s']['a']}).",
    "flatten_indices": "Rows are computed, so there are no indices to flatten: omit it.",
    "repeat": "A loader has any number of epochs: iterate it again, or next(loader) without end.",
    "prefetch": "ds.loader(batch_size, prefetch=…).",
    "collate": "ds.loader(batch_size, collate_fn=…).",
    "to_tf_dataset": "Use with_format('numpy') and iterate the loader.",
    "data": "Use ds.schema, ds[:10], or ds.with_format('arrow').iter(batch_size=1000).",
    "info": "Use ds.features, ds.schema, ds.num_rows, and `midepoch info` in a shell.",
    "split": "Choose splits on opening: load_dataset(…, split='train[:90%]').",
    "cache_files": "Use ds.pipeline.base.source.files.",
    "n_shards": "Use ds.num_files.",
    "num_shards": "Use ds.num_files.",
    "keys": "This is one dataset, not a dict of splits: load_dataset(…, split='train').",
    "items": "This is one dataset, not a dict of splits: load_dataset(…, split='train').",
    "values": "This is one dataset, not a dict of splits: load_dataset(…, split='train').",
    "apply": "Use ds.map(function), or function(ds).",
    "dataloader": "Did you mean loader?",
    "batch_size": "Use ds.loader(batch_size=…).",
    "group_by": "Rows are read in order and never grouped by value. Use map, batch or pack.",
}
"""Attributes that do not exist."""

OPENERS = {
    **{
        name: f"Use midepoch.{name}(…), a function of the package."
        for name in ("from_dict", "from_list", "from_generator", "from_pandas", "from_files", "from_hf", "load_dataset")
    },
    "from_polars": "Use midepoch.from_pandas(frame), which also takes frames of polars.",
    "from_parquet": "Use midepoch.from_files('*.parquet').",
    "from_csv": "Use midepoch.from_files('*.csv').",
    "from_json": "Use midepoch.from_files('*.jsonl').",
    "from_file": "Use midepoch.from_files(path).",
    "from_text": "Use midepoch.load_dataset('text', data_files=…, split='train').",
    "load_from_disk": "Use midepoch.load_from_disk(folder).",
}
"""Class methods of other libraries' datasets."""

ATTRIBUTES |= OPENERS

_OPEN_SPLIT = "Choose one, also in part: split='train', split='train[:90%]+validation'."

_FEATURES = "Use schema={'label': 'int64'}, or from_hf(datasets.Dataset.from_dict(data, features=…))."
_IN_MEMORY = {
    "batch_size": "Use .loader(batch_size=…) of the result.",
    "shuffle": "Use .shuffle(seed=…) of the result.",
    "info": "Omit it.",
    "split": "Slice the result: ds.slice(None, '90%').",
    "keep_in_memory": "Rows are mapped from a file of the cache: omit it.",
}

OPEN = {
    "load_dataset": {
        "split missing": _OPEN_SPLIT,
        "num_workers": "Did you mean num_proc=? It is for the conversion of files that are not Arrow.",
        "batch_size": "Use load_dataset(…).loader(batch_size=…).",
        "shuffle": "Use load_dataset(…).shuffle(seed=…).",
        "seed": "Use load_dataset(…).shuffle(seed=…).",
        "transform": "Use load_dataset(…).map(function), or with_transform(function).",
    },
    "load_from_disk": {
        "keep_in_memory": "Files are mapped, not read into memory: omit it.",
        "storage_options": "Local folders only. Use from_files for an object store.",
        "dataset_path": "Did you mean path=?",
    },
    "from_files": {
        "split": "Use load_dataset(…, split=…), or slice: from_files(…).slice(None, '90%').",
        "data_files": "Did you mean paths=?",
        "path": "Did you mean paths=?",
        "pattern": "Did you mean paths=?",
        "num_proc": "Files are indexed by threads: omit it.",
        "streaming": "Files are read in place, never downloaded first: omit it.",
        "token": "Use storage_options={'token': …}, or set HF_TOKEN.",
        "revision": "Write it into the address: hf://datasets/ORG/NAME@REVISION/….",
        "batch_size": "Use from_files(…).loader(batch_size=…).",
        "shuffle": "Use from_files(…).shuffle(seed=…).",
        "block_size": "Use from_tokens(path, block_size): the tokens of LitData, cut into rows.",
        "item_loader": "The index.json names it: omit it. For TokensLoader, use from_tokens(path, block_size).",
        "remote": "Did you mean paths=? Data is read in place: there is no local copy.",
        "local": "Did you mean paths=? Data is read in place: there is no local copy.",
        "input_dir": "Did you mean paths=?",
        "sep": "Did you mean delimiter=? For .tsv files, its default is a tab.",
        "data_dir": "Did you mean paths=?",
        "root": "Did you mean paths=?",
        "transform": "Use from_files(…).decode('image', …).map(function).",
        "drop_labels": "Use from_files(…).remove_columns('label').",
        "drop_metadata": "Use a glob that does not match it: from_files('photos/*/*.jpg').",
        "sample_by": "Rows of text are lines. Combine them with from_files(…).batch(…), or in a map.",
        "field": "Use load_dataset('json', data_files=…, field=…, split='train').",
        "urls": "Did you mean paths=?",
        "shardshuffle": "Use from_files(…).shuffle(seed=…).",
        "nodesplitter": "Ranks and workers are detected, and share the rows equally: omit it.",
        "workersplitter": "Ranks and workers are detected, and share the rows equally: omit it.",
        "resampled": "Use from_files(…).weighted(…) to draw rows with replacement, or omit it.",
        "handler": "Use on_error='skip'.",
    },
    "from_tokens": {
        "block_size": "Did you mean sequence_length=?",
        "seq_len": "Did you mean sequence_length=?",
        "seq_length": "Did you mean sequence_length=?",
        "max_length": "Did you mean sequence_length=?",
        "sequence_length missing": "Pass the number of tokens of a row: from_tokens(paths, 1024).",
    },
    "from_megatron": {
        "data_path": "Did you mean blend=?",
        "prefix": "Did you mean blend=?",
        "sequence_length": "Rows are documents. Use from_megatron(…).pack(sequence_length).",
        "split": "Use from_megatron(…).slice(None, '90%').",
    },
    "from_delta": {
        "table_uri": "Did you mean uri=?",
        "timestamp": "Did you mean version=? It takes a time, too.",
        "snapshot_id": "Did you mean version=?",
    },
    "from_iceberg": {
        "version": "Did you mean snapshot_id=?",
        "catalog_name": "Put it before the name: 'catalog.namespace.table'.",
    },
    "from_lance": {
        "path": "Did you mean uri=?",
        "tag": "Did you mean version=? It takes a tag, too.",
        "asof": "Did you mean version=?",
    },
    "from_dict": {"features": _FEATURES, "mapping": "It is the first argument.", **_IN_MEMORY},
    "from_list": {"features": _FEATURES, "mapping": "It is the first argument.", **_IN_MEMORY},
    "from_arrow": {"table": "It is the first argument.", **_IN_MEMORY},
    "from_pandas": {"features": _FEATURES, "df": "It is the first argument.", **_IN_MEMORY},
    "from_hf": {
        "transform": "Use from_hf(ds).map(function), or with_transform(function).",
        "dataset": "It is the first argument.",
        **_IN_MEMORY,
    },
    "from_generator": {
        "generator": "It is the first argument: the function, not called.",
        "features": "Use schema={'label': 'int64'}.",
        "num_proc": "The function runs once, in one process. Write shards with several programs for more.",
        "streaming": "Rows are stored once, so that a resume finds them: omit it.",
        "args": "Use gen_kwargs={…}.",
        "kwargs": "Use gen_kwargs={…}.",
        **_IN_MEMORY,
    },
    "from_map_style": {
        "dataset": "It is the first argument.",
        "version": "Did you mean fingerprint=?",
        "name": "Did you mean fingerprint=?",
        "sampler": "The order belongs to the dataset: from_map_style(ds).shuffle(seed=…).",
        "transform": "Use from_map_style(ds, columns=[…]).map(function).",
        **_IN_MEMORY,
    },
    "mix": {
        "probabilities": "Did you mean weights=?",
        "datasets": "Did you mean sources=?",
        "stopping_strategy": "Did you mean stop=? It is 'first', 'all' or 'never'.",
    },
    "concat": {
        "axis": "Use midepoch.zip([a, b]) to combine columns.",
        "datasets": "Did you mean sources=?",
        "dsets": "Did you mean sources=?",
    },
    "interleave_datasets": {
        "info": "Omit it.",
        "split": "Omit it.",
        "weights": "Did you mean probabilities=?",
    },
}
"""Arguments of functions of the package."""
