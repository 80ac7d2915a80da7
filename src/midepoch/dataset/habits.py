"""Names and arguments of other libraries that do not exist here, with what to do instead."""

from __future__ import annotations

from midepoch._internal.hints import NAMES, each_name

_STORED = each_name(
    {
        "num_proc, num_workers, num_parallel_calls": "Steps run in the workers of a loader: ds.loader(batch_size, "
        "num_workers=…).",
        "load_from_cache_file, cache_file_name, cache_file_names, keep_in_memory, writer_batch_size, new_fingerprint, "
        "suffix_template, desc, try_original_type": "Steps run while rows are read, and nothing is stored: omit it. "
        "For results that are stored once, use cache().",
    }
)
_FUNCTION = {
    "with_rank": "Results must not depend on the worker: use with_indices=True for the number of the row.",
    "features, disable_nullable": "Convert columns with cast({'label': 'int32'}) after it.",
    "fn, func": "It is the first argument.",
    "generator": "Use with_generator=True: the function gets a generator for each row.",
    "kwargs, args": "Use fn_kwargs={…}.",
}
_SEEDED = "Use seed=…: the order is computed from it and the epoch, in every process."

_METHODS: dict[str, dict[str, str]] = {
    "map": _FUNCTION,
    "decode": {"too many": "The column, then the kind: decode('image', 'image', mode='RGB')."},
    "filter": {**_FUNCTION, "function": "Did you mean condition=?"},
    "flat_map": _FUNCTION,
    "shuffle": {
        "buffer_size, buffer, max_buffer_input_shards": "All rows are shuffled, without a buffer: omit it. After "
        "filter, pack and the like, use window=… (rows).",
        "generator, seeds, rng": _SEEDED,
        "reshuffle_each_iteration": "Every epoch has another order.",
        "seed twice": "The first argument is the seed. All rows are shuffled, without a buffer: ds.shuffle(seed=42).",
    },
    "loader": {
        "epochs, num_epochs": "Iterate the loader once for each epoch.",
        "shuffle, seed": "Omit it: rows come in the dataset's order. For another one in every epoch, shuffle the "
        "dataset: ds.shuffle(seed=…).loader(…).",
        "sampler": "Omit it if it is None. The order belongs to the dataset: ds.shuffle(seed=…) for RandomSampler, "
        "ds.weighted(weights, num_samples=…) for WeightedRandomSampler, ds.weighted(np.ones(len(ds))) for "
        "RandomSampler(replacement=True), ds.select(indices).shuffle(seed=…) for SubsetRandomSampler. "
        "Ranks are detected, which replaces DistributedSampler.",
        "batch_sampler": "Omit it if it is None. Batches are batch_size rows of the dataset's order: "
        "ds.shuffle(seed=…), or ds.select(indices) for an order of your own. max_tokens=… makes batches of rows of "
        "similar lengths. ds.batch(n) and ds.pack(n) combine rows before.",
        "group_by_length": "Use max_tokens=…, which makes batches of rows of similar lengths.",
        "max_length": "Use max_tokens=… for the tokens of a batch, or shorten rows with tokenize(…, max_length=…).",
        "steps": "Use steps_per_epoch=… for the batches of a pass.",
        "generator": "The order comes from ds.shuffle(seed=…), and random functions from map(with_generator=True).",
        "epoch": "Call loader.set_epoch(epoch), or load a state.",
        "num_replicas, num_ranks": "Use world_size=….",
        "global_batch_size": "batch_size is of each rank: divide by midepoch.distributed.world.find_world().size.",
        "dataset": "It is a method of the dataset: ds.loader(batch_size).",
        "pin_memory_device": 'Use device="cuda": batches are on the GPU when they are requested.',
        "in_order": "Batches always come in order, so that a resume is exact.",
        "snapshot_every_n_steps": "The state is exact at every step, and costs nothing: omit it.",
        "batched": "batch_size rows make a batch. Use batch_size=None for single rows.",
        "transform": "Use ds.map(function).loader(…), or collate_fn=….",
        "dtype": "Use ds.cast({'x': 'float32'}).loader(…), or convert batches on the device.",
        "return_tensors": "Batches are tensors of torch already: omit it.",
        "padding": "Use layout='padded'.",
        "local_rank": "Omit it: the rank is detected. Otherwise pass rank= and world_size= over all machines.",
    },
    "shard": {
        "contiguous": 'Use mode="file" for complete files, or mode="example" for every n-th row.',
        "rank": "Use index=…. A loader detects its rank by itself: ds.loader(batch_size) needs no shard().",
        "world_size": "Use num_shards=….",
    },
    "train_test_split": {
        "stratify": "Did you mean stratify_by_column=?",
        "shuffle": "For 3 parts, split twice.",
        "generator": _SEEDED,
    },
    "weighted": {
        "generator": _SEEDED,
        "weights missing": "For example ds.weighted('weight', seed=0), by the name of a column.",
    },
    "balanced": {
        "generator": _SEEDED,
        "column missing": "For example ds.balanced('label', seed=0).",
        "replacement": "Rows of rare classes have to be repeated. Use ds.weighted(weights, replacement=False).",
    },
    "sort": {
        "column, column_names": "Did you mean by=?",
        "key": "A function of a row is the first argument. For lengths use length=True.",
        "null_placement": "Null comes last: omit it.",
        "kind": "The sort is stable: omit it.",
        "descending": "Did you mean reverse=?",
        "ascending": "Ascending is the default, reverse=True is descending.",
    },
    "with_format": {
        "dtype": "Use ds.cast({'label': 'float32'}).",
        "output_all_columns": "All columns are delivered unless columns=[…] selects some.",
        "device": 'Use ds.loader(batch_size, device="cuda").',
        "format, kind": "Did you mean type=?",
    },
    "batch": {
        "batch_size": "Did you mean size=? For batches of training use ds.loader(batch_size=…).",
    },
    "iter": {"size": "Did you mean batch_size=?"},
    "pack": {
        "block_size": "Did you mean length=?",
        "pad_token_id": "Did you mean pad=?",
        "eos_token_id": "Did you mean eos=?",
        "packing": "Did you mean strategy=?",
        "return_attention_mask": "Omit it: rows have position_ids and segment_ids, which name their documents.",
    },
    "select": {"too many": "For a range, use ds.slice(5, 10). For columns, use ds.select_columns(['id', 'text'])."},
    "rename_column": {"new_column_name missing": "For a dict of names, use rename_columns."},
    "rename_columns": {
        "columns": "Did you mean column_mapping=?",
        "too many": "For one column, use ds.rename_column('old', 'new').",
    },
    "cast": {"features": "Did you mean columns=?"},
    "class_encode_column": {"include_nulls": "Null stays null."},
}
METHODS = {
    "__init__": {"spec missing": "Open data with midepoch.from_files(paths), or midepoch.load_dataset(name, split=…)."},
    **{name: {**_STORED, **each_name(table)} for name, table in _METHODS.items()},
}
"""Arguments of methods that exist."""

_RANKS = "Ranks and workers are detected by ds.loader(batch_size), and share the rows equally: omit it."
_NESTED = "map(lambda row: {'a': row['s']['a']})"

OPENERS = {
    **{
        name: f"Use midepoch.{name}(…), a function of the package."
        for name in ("from_dict", "from_list", "from_generator", "from_pandas", "from_files", "from_hf")
    },
    **{name: f"Use midepoch.{name}(…), a function of the package." for name in ("load_dataset", "load_from_disk")},
    **{name: NAMES[name] for name in ("from_polars", "from_parquet", "from_csv", "from_json", "from_text")},
    "from_file": "Use midepoch.from_files(path).",
}
"""Class methods of other libraries' datasets."""

ATTRIBUTES = OPENERS | each_name(
    {
        "set_format, reset_format, formatted_as": "Datasets do not change in place: ds = ds.with_format(…), and "
        "with_format(None) for the default.",
        "set_transform": "Datasets do not change in place: ds = ds.with_transform(…).",
        "format": "Use ds.pipeline.format, or with_format(…) to choose one.",
        "to_iterable_dataset, to_iter_dataset": "It is iterable, and resumable: for row in ds, or "
        "ds.loader(batch_size).",
        "len": "Use len(ds).",
        "head, show": "Use ds[:5], ds.take(5), or `midepoch peek` in a shell.",
        "tail": "Use ds[-5:].",
        "limit": "Use ds.take(100).",
        "sample": "Use ds.train_test_split(test_size=100, seed=0)['test'], which is 100 rows at random.",
        "drop, drop_columns": "Use ds.remove_columns(names).",
        "rename": "Use ds.rename_columns({'old': 'new'}).",
        "sort_values": "Use ds.sort(column).",
        "fillna": "Use ds.map(lambda row: {'x': row['x'] or 0}).",
        "isna": "Use ds.filter(lambda row: row[column] is None).",
        "dropna": "Use ds.filter(lambda row: row[column] is not None).",
        "query, loc, set_index": "Use ds.filter(pyarrow.compute.field('id') == 3) for rows by a value, and ds[3] for a "
        "row by its number.",
        "reset_index": "Rows are numbered in their order: omit it.",
        "to_torch, iter_torch_batches": "Use ds.loader(batch_size), whose batches are tensors, or "
        "ds.with_format('torch').",
        "to_batches, iter_batches": "Use ds.iter(batch_size), or ds.loader(batch_size).",
        "steps_per_epoch, with_epoch": "Use len(ds.loader(batch_size)), or choose the number of batches of a pass: "
        "ds.loader(batch_size, steps_per_epoch=…).",
        "repeat, cycle, num_epochs": "A loader has any number of epochs: for epoch in range(3): for batch in loader.",
        "groupby, group_by": "Rows are read in order and never grouped by value. Use map, batch or pack.",
        "columns": "Use ds.column_names.",
        "rows, take_all, to_list, to_dicts": "Use list(ds), or list(ds.take(100)). Their number is ds.num_rows.",
        "to_dict": "Use ds[:], or ds[:100], which are columns.",
        "to_csv, to_json, to_parquet, to_sql, save_to_disk, push_to_hub, write": "Nothing is converted or written "
        "here. Write the rows as you iterate, or keep results with cache().",
        "to_polars": "Use polars.from_pandas(ds.to_pandas()).",
        "to_arrow": "Use ds.with_format('arrow')[:].",
        "to_numpy": "Use ds.with_format('numpy')[:].",
        "to_tf_dataset, as_numpy_iterator": "Use ds.with_format('numpy'), and iterate it or its loader.",
        "add_column": "Use map(lambda row, i: {'new': values[i]}, with_indices=True).",
        "with_columns, with_column, assign": "Use ds.map(lambda row: {'new': …}).",
        "add_item": "Use midepoch.concat([ds, other]).",
        "flatten, unnest": f"Use map to choose the fields: {_NESTED}.",
        "flatten_indices": "Rows are computed, so there are no indices to flatten: omit it.",
        "_distributed": f"split_dataset_by_node is for other datasets. {_RANKS}",
        "sharding_filter, split_by_node, streaming_split, distribute": _RANKS,
        "prefetch, collate, collate_fn, num_workers": "Use ds.loader(batch_size, num_workers=…, collate_fn=…, "
        "prefetch=…).",
        "enumerate, with_row_index, with_indices, map_with_index": "Use ds.map(function, with_indices=True), or "
        "enumerate(ds).",
        "batch_size, with_batch_size, to_dataloader, get_dataloader": "Use ds.loader(batch_size).",
        "join": "Rows are not joined by values: join tables in pandas or polars. Side by side: midepoch.zip([a, b]).",
        "merge": "Use midepoch.zip([a, b]) for columns side by side, or midepoch.concat([a, b]) for more rows.",
        "explode": "Use ds.unbatch(), or ds.flat_map(function).",
        "random_split": "Use ds.train_test_split(test_size=0.1, seed=0).",
        "pad, padded_batch": "Use ds.loader(batch_size, layout='padded').",
        "truncate": "Use ds.tokenize(tokenizer, max_length=…), or map(lambda row: {'ids': row['ids'][:512]}).",
        "chunk": "Use ds.pack(length) for tokens, or ds.flat_map(function), which makes several rows of one.",
        "apply, pipe": "Use ds.map(function), or function(ds).",
        "compose": "Chain the steps: ds.map(…).filter(…).",
        "persist, materialize": "Use ds.cache().",
        "lazy, collect": "Steps run while rows are read, and nothing has to be started: iterate ds, or "
        "ds.loader(batch_size).",
        "data": "Use ds.schema, ds[:10], or ds.with_format('arrow').iter(batch_size=1000).",
        "info, describe": "Use print(ds), ds.features, ds.schema, ds.num_rows, and `midepoch info` in a shell.",
        "dtypes, element_spec": "Use ds.schema, or ds.features.",
        "split, keys, items, values": "This is one dataset, not a dict of splits. Choose one on opening: "
        "load_dataset(…, split='train[:90%]').",
        "cache_files": "Use ds.pipeline.base.source.files.",
        "n_shards, num_shards": "Use ds.num_files.",
        "iloc": "Use ds[3], ds[10:20], or ds.select(rows).",
        "value_counts": "Use ds.to_pandas()[column].value_counts().",
        "iterrows": "Use: for row in ds.",
        "next, get_batch": "Use next(iter(ds)), ds[:32], or loader = ds.loader(32) and next(loader).",
        "count, cardinality, size, length, num_examples": "Use len(ds), or ds.estimated_len after filter, pack and the "
        "like.",
        "drop_duplicates": "Rows are not compared with each other. Remove duplicates when you write the data.",
        "astype": "Use ds.cast({'label': 'int32'}).",
        "random_map": "Use ds.map(function, with_generator=True), which gives the function a generator.",
        "map_batches": "Use ds.map(function, batched=True, batch_size=…).",
        "map_dict": "Use ds.map(lambda row: {'image': function(row['image'])}).",
        "seed, random_shuffle": "Use ds.shuffle(seed=…), and map(with_generator=True) for random functions.",
        "window": "Use ds.shuffle(seed=…, window=…) for shuffling, ds.batch(n) to combine rows.",
        "union, concat, concatenate": "Use midepoch.concat([a, b]).",
        "mix, interleave": "Use midepoch.mix([a, b], weights=…).",
        "batched": "Use ds.loader(64) for batches of training, ds.iter(64) for others, ds.batch(4) for rows of lists.",
        "bucket_by_sequence_length, group_by_length": "Use ds.loader(max_tokens=…), which makes batches of rows of "
        "similar lengths.",
        "set_weights, exclude, lease, stats, on_stats, progress": "It is a method of the loader: loader = "
        "ds.loader(8), then loader.set_weights(…), loader.stats() and the like.",
        "to_tuple": "Rows are dicts: row['image'], row['label']. To name columns, use select_columns.",
        "cuda, to": 'Use ds.loader(batch_size, device="cuda").',
        "steps": "Use loader = ds.loader(batch_size) and loader.steps.",
        "reset": "Use ds.set_epoch(epoch), which begins an epoch at its first row.",
        "save": "Use ds.state_dict() for the position, ds.cache() for computed rows.",
        "load": "Use ds.load_state_dict(state).",
    }
)
"""Attributes that do not exist."""

_OPENED = {
    "batch_size": "Use .loader(batch_size=…) of the result.",
    "shuffle, shardshuffle, seed": "Use .shuffle(seed=…) of the result.",
    "transform": "Use .map(function) of the result, or .with_transform(function).",
    "split": "Slice the result: ds.slice(None, '90%').",
    "limit, nrows": "Use .take(100) of the result.",
    "keep_in_memory": "Rows are mapped from files, not read into memory: omit it.",
    "info": "Omit it.",
}
"""Arguments of all functions that open data."""
_COLUMNS = {
    "features": "Use schema={'label': 'int64'}, or from_hf(datasets.Dataset.from_dict(data, features=…)).",
    "mapping, df, table": "It is the first argument.",
}

_OPEN: dict[str, dict[str, str]] = {
    "load_dataset": {
        "split missing": "Choose one, also in part: split='train', split='train[:90%]+validation'.",
        "num_workers": "Did you mean num_proc=? It is for the conversion of files that are not Arrow.",
    },
    "load_from_disk": {
        "storage_options": "Local folders only. Use from_files for an object store.",
    },
    "from_files": {
        "too many": "Pass several files as a list: from_files(['a.parquet', 'b.parquet']).",
        "split": "Use load_dataset(…, split=…), or slice: from_files(…).slice(None, '90%').",
        "data_files, pattern, input_dir, data_dir, root, urls": "Did you mean paths=?",
        "remote, local": "Did you mean paths=? Data is read in place: there is no local copy.",
        "num_proc, num_workers": "Files are indexed by threads; loaders have workers: .loader(batch_size, "
        "num_workers=…).",
        "streaming": "Files are read in place, never downloaded first: omit it.",
        "token": "Use storage_options={'token': …}, or set HF_TOKEN.",
        "revision": "Write it into the address: hf://datasets/ORG/NAME@REVISION/….",
        "block_size, item_loader": "LitData's index.json names the loader: omit it. For rows of tokens, use "
        "from_tokens(path, block_size).",
        "sep": "Did you mean delimiter=? For .tsv files, its default is a tab.",
        "transform": "Use from_files(…).decode('image', …).map(function).",
        "drop_labels": "Use from_files(…).remove_columns('label').",
        "drop_metadata": "Use a glob that does not match it: from_files('photos/*/*.jpg').",
        "sample_by": "Rows of text are lines. Combine them with from_files(…).batch(…), or in a map.",
        "field": "Use load_dataset('json', data_files=…, field=…, split='train').",
        "nodesplitter, workersplitter": "Ranks and workers are detected, and share the rows equally: omit it.",
        "resampled": "Use from_files(…).weighted(…) to draw rows with replacement, or omit it.",
        "handler": "Use on_error='skip'.",
        "skiprows": "Use from_files(…).skip(10) for rows, and remove lines before the header from the file.",
        "usecols": "Did you mean columns=?",
        "header, names, encoding": "Files are UTF-8, and CSV has a header. For others: "
        "midepoch.from_pandas(pandas.read_csv(path, header=None, names=[…], encoding=…)).",
        "dtype, schema, features": "Use from_files(…).cast({'label': 'int32'}).",
        "engine": "There is one reader for each format: omit it.",
        "lines": "JSON lines and arrays of objects are recognized: omit it.",
        "recursive": "Folders are searched at any depth: omit it.",
    },
    "from_tokens": {
        "too many": "Several files are a list: from_tokens(['a.bin', 'b.bin'], 1024, dtype='uint16').",
        "block_size, seq_len, max_length": "Did you mean sequence_length=?",
        "sequence_length missing": "Pass the number of tokens of a row: from_tokens(paths, 1024).",
    },
    "from_megatron": {
        "data_path, prefix": "Did you mean blend=?",
        "sequence_length": "Rows are documents. Use from_megatron(…).pack(sequence_length).",
    },
    "from_delta": {
        "table_uri": "Did you mean uri=?",
        "timestamp, snapshot_id": "Did you mean version=? It takes a time, too.",
    },
    "from_iceberg": {
        "version": "Did you mean snapshot_id=?",
        "catalog_name": "Put it before the name: 'catalog.namespace.table'.",
    },
    "from_lance": {"path": "Did you mean uri=?", "tag, asof": "Did you mean version=? It takes a tag, too."},
    "from_dict": _COLUMNS,
    "from_list": _COLUMNS,
    "from_arrow": {**_COLUMNS, "too many": "For several: midepoch.concat([from_arrow(a), from_arrow(b)])."},
    "from_pandas": {**_COLUMNS, "too many": "For several: midepoch.concat([from_pandas(a), from_pandas(b)])."},
    "from_hf": {"dataset": "It is the first argument."},
    "from_generator": {
        "generator": "It is the first argument: the function, not called.",
        "features": "Use schema={'label': 'int64'}.",
        "num_proc": "The function runs once, in one process. Write shards with several programs for more.",
        "streaming": "Rows are stored once, so that a resume finds them: omit it.",
        "args, kwargs": "Use gen_kwargs={…}.",
        "too many": "For arguments of the function, use gen_kwargs={'path': …}.",
    },
    "from_map_style": {
        "dataset": "It is the first argument.",
        "version, name": "Did you mean fingerprint=?",
        "sampler": "The order belongs to the dataset: from_map_style(ds).shuffle(seed=…).",
        "transform": "Use from_map_style(ds, columns=[…]).map(function).",
    },
}
OPEN = {
    **{name: each_name({**_OPENED, **table}) for name, table in _OPEN.items()},
    "mix": {
        "probabilities": "Did you mean weights=?",
        "datasets": "Did you mean sources=?",
        "stopping_strategy": "Did you mean stop=? It is 'first', 'all' or 'never'.",
        "weights twice": "Datasets are passed as a list: mix([a, b], weights=…).",
    },
    "concat": {
        "axis": "Use midepoch.zip([a, b]) to combine columns.",
        **dict.fromkeys(("datasets", "dsets"), "Did you mean sources=?"),
    },
    "interleave_datasets": {
        **dict.fromkeys(("info", "split"), "Omit it."),
        "weights": "Did you mean probabilities=?",
    },
}
"""Arguments of functions of the package."""
