"""Iterating a dataset in one process: rows or batches, with a state that follows delivery.

*RowSource*: rows of this process from a cursor on, by positions or out of lanes. *RowIterator*, *BatchIterator*: what
``iter()`` returns. *IterationState*: the one mutable part of a dataset, also in torch's DataLoader workers.
"""
