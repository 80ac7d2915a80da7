"""The ranks of a run: which one this is, and what they agree on.

*World*: rank and size of data parallelism, from torch.distributed, JAX, Ray Train or the launcher. *Rendezvous*: values
that ranks exchange through a key-value store. *Seeds*: drawn once for all ranks.
"""
