"""The model that each framework trains."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH, BATCH = 1024, 8


class Blocks(nn.Module):
    """Square layers of `mb` MB in float32; returns the loss in a dict, as trainers ask for it."""

    def __init__(self, mb: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        num_layers = max(1, round(mb * 1e6 / (4 * WIDTH * WIDTH)))
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(inputs).square().mean()}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random inputs, enough for `num_steps` steps on `num_ranks` ranks."""

    def __init__(self, num_steps: int, num_ranks: int) -> None:
        self._rows = torch.randn(num_steps * num_ranks * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._rows[index]}
