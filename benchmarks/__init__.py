"""Benchmarks: midepoch, its peers and the physical limit, on the same data, in one run.

- `data` makes the two datasets (text rows, token rows) once, as Hugging Face cache Arrow files and Parquet.
- `contenders/` holds one file per library; each offers its plain route and the fastest its API gives.
- `one` measures one route in a fresh process; `speed` interleaves them all and prints the table and the bars.
- `latency` measures what is not throughput: import, open, resume, the cost of a state.
- `gpu` trains on a GPU, fed by midepoch and by torch; its loops and their data are in `feeding/`.
- `planned/` measures batches by a budget of tokens: padding, balance of ranks, planning, resuming, beside samplers.
- `feed` measures what feeding costs the CPU: large batches, threads, the first batch, memory of workers.

Run `scripts/bench`, or `python -m benchmarks.speed --quick`. Compare ratios within one run; losses are printed too.
"""
