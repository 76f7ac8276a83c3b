from dataclasses import fields

import torch

from training.gate import Gate, Guard, GuardConfig
from training.optimizer import OptimizerConfig, build_optimizer
from training.state import TrainState

CPU = torch.device("cpu")
LRS = {"lr": 1.0, "lr_embedding": 1.0, "lr_head": 1.0, "lr_norm": 1.0}


def test_every_field_of_the_state_is_in_a_checkpoint(small):
    """Except the weights and the step, which other files hold, and the gate, whose losses the guard saves."""
    model = small().float()
    optimizer = build_optimizer(model, OptimizerConfig("adamw", **LRS, betas=[0.9, 0.9], eps=1e-8, weight_decay=0.0))
    gate = Gate(CPU, GuardConfig("stop", 1, "count", spike_sigmas=1.0, spike_window=2, skip_batches=[]))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = TrainState(3, model, optimizer, scaler, Guard(), gate=gate)
    gate.open([1.0, 2.0])
    memory = state.memory()
    assert {one.name for one in fields(TrainState)} - memory.keys() == {"step", "model", "gate"}
    assert memory["guard"]["losses"] == [1.0, 2.0]
