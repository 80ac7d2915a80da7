"""Iterating a dataset in one process: rows or batches, with a state that follows delivery.

*RowSource*: rows of this process from a cursor on, by positions or from lanes. *RowIterator*, *BatchIterator*: the
results of ``iter()``. *IterationState*: the only mutable part of a dataset, also in torch's DataLoader workers.
"""
