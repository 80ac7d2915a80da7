"""Training loops that a loader feeds: tokens, text and images, for `benchmarks.gpu` and `benchmarks.feed`.

- `codec` encodes and decodes JPEGs.
- `work` is the work on one row (decode and crop, tokenize, filter), the same function for every loader.
- `files` makes the data, as Arrow files that both loaders map.
- `routes` are the loaders: midepoch, and torch's DataLoader doing the same.
- `models` are the models, their training steps, and a synthetic batch on the device.
- `measure` takes the figures of one loader: rows per second, time in `next()`, first batch, CPU.
- `fresh` measures in fresh processes, with `memory` (PSS of all processes) and `timeline` (calls in workers).
"""
