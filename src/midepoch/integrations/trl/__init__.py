"""Trainers of TRL whose data resumes exactly: ``SFTTrainer``, ``DPOTrainer``, ``GRPOTrainer``. Needs ``midepoch[trl]``.

trainer = ResumableSFTTrainer(model, args, train_dataset=midepoch.load_dataset(…))
trainer.train(resume_from_checkpoint=True)
"""

from midepoch.integrations.trl.prepared import ResumableDPOTrainer, ResumablePreparation, ResumableSFTTrainer
from midepoch.integrations.trl.prompts import ResumableGRPOTrainer, ResumablePrompts

__all__ = [
    "ResumableDPOTrainer",
    "ResumableGRPOTrainer",
    "ResumablePreparation",
    "ResumablePrompts",
    "ResumableSFTTrainer",
]
