"""The toy model that stands for the one in the texts' examples, as a part of the scripts that run them."""

MODEL = """
import warnings; warnings.filterwarnings("ignore")
import torch, torch.nn as nn

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, batch):
        SEEN.append(batch["number"].tolist())
        return self.layer(batch["number"].float().reshape(-1, 1)).mean()

SEEN = []
torch.manual_seed(0)
model = MyModel()
optimizer = torch.optim.AdamW(model.parameters())
"""
