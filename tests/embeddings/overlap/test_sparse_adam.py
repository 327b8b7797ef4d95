"""Adam on CPU, which the overlap engine runs by itself."""

from __future__ import annotations

import torch

from lightning_freescale.embeddings.sparse_adam import new_state, update_rows


def test_adam_of_all_rows_is_torchs_adamw() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, gradients = torch.randn(7, 4, generator=draw), torch.randn(9, 7, 4, generator=draw)
    expected = torch.nn.Parameter(weight.clone())
    optimizer, state = torch.optim.AdamW([expected], lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2), new_state(weight)
    arguments = {"lr": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.2}
    for step, gradient in enumerate(gradients):
        expected.grad = gradient
        optimizer.step()
        update_rows(weight, state, torch.arange(7), gradient, arguments, step)
        torch.testing.assert_close(weight, expected.detach(), rtol=1e-6, atol=1e-7)
    for name, value in state.items():
        torch.testing.assert_close(value, optimizer.state[expected][name], rtol=1e-6, atol=1e-7)
