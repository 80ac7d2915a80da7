"""The ledger of a run: the rows delivered to each rank, and the proof that every row was seen once.

loader = ds.loader(64, audit="runs/7")          # while training: one store for each step

from midepoch.audit import read_run
run = read_run("runs/7")                        # afterwards, or meanwhile; also `midepoch audit runs/7`
run.epochs[0].never, run.epochs[0].repeated     # 0, 0
run.rows_of_step(1000)                          # the rows of step 1,000
run.steps_of_row(123456)                        # the steps that saw a row
run.documents_of_step(1000)                     # the documents, if the loader had provenance=True
run.weight_changes                              # the weights of a mix that were set during the run
"""

from midepoch.audit.consumed import Delivery
from midepoch.audit.documents import Document
from midepoch.audit.ledger import Ledger
from midepoch.audit.naming import Overlap
from midepoch.audit.orders import WeightChange
from midepoch.audit.run import EpochProof, Run, read_run, read_runs

__all__ = ["Delivery", "Document", "EpochProof", "Ledger", "Overlap", "Run", "WeightChange", "read_run", "read_runs"]
