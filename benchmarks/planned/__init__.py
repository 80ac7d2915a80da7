"""Batches by a budget of tokens, beside peers: `python -m benchmarks.planned`.

- `figures`: padding, cost of ranks and randomness of batches, as functions of the rows of each batch.
- `data`: log-normal lengths, and Arrow files with them.
- `contenders`: midepoch and the samplers of torch, transformers and lhotse, each with its own way to resume.
- `legs`: a run that is killed and one that resumes it, in processes of their own; rows lost and repeated.
- `rates`: tokens per second, and the share of planning.
- `first`: time to the first batch at 90 % of an epoch.

lhotse is left out, with a line that says so, where it is not installed.
"""
