"""The doctor names each of many faults, seeded one at a time, and says nothing of healthy models."""

import copy
from dataclasses import fields

import pytest
import torch
from faults import (
    AS_THE_DEFAULT,
    FAULTS,
    MUON,
    another_optimizer,
    damaged,
    muon,
    new_model,
    off_in_float32,
    one_nan,
    patient_of,
    trained,
)
from hardware import needs_compiler
from torch import nn

from insight.doctor import CHECKS, Patient, examine, run
from kernels import build
from kernels.training import with_kernels
from model.ops import TORCH, Ops


def first_findings(patient: Patient) -> list:
    """Those of the first check that finds anything, the cause."""
    return next((result.findings for result in run(patient) if result.findings), [])


# --- healthy models -------------------------------------------------------------------------------------------------

HEALTHY = [
    {},
    {"qk_norm": True, "n_kv_heads": None, "seed": 1},
    {"tied": True, "feed_forward": "gelu", "seed": 2},
    {"pairing": "interleaved", "window": 3},
    {"rope_scaling": "yarn", "rope_factor": 4.0},
    {"positions": "learned", "norm": "layernorm"},
    {"positions": "sinusoidal", "n_kv_heads": 1, "tied": True},
    {"positions": "alibi", "n_heads": 6, "n_kv_heads": 3, "d_model": 24},
    {"positions": "none", "feed_forward": "relu2", "vocab_multiple": 8},
    {"soft_cap": 2.0, "dropout": 0.2},
    {"n_layers": 1, "n_heads": 1, "n_kv_heads": None, "max_seq_len": 2},
    AS_THE_DEFAULT,
    {"positions": "learned", "embedding_norm": True, "zero_init": True, "tied": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", HEALTHY, ids=str)
def test_a_new_model_has_no_findings_and_stays_as_it_is(arguments):
    patient = patient_of(new_model(**arguments))
    weights, state = copy.deepcopy(patient.model.state_dict()), torch.get_rng_state()
    attend = [block.attention.ops for block in patient.model.blocks]
    assert examine(patient) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in patient.model.state_dict().items())
    assert [block.attention.ops for block in patient.model.blocks] == attend
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in patient.model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [HEALTHY[1], HEALTHY[8]], ids=str)
def test_branches_and_a_head_that_begin_at_zero_are_no_finding(arguments):
    model = new_model(**arguments)
    for block in model.blocks:
        nn.init.zeros_(block.attention.wo.weight)
        nn.init.zeros_(block.feed_forward.down.weight)
    nn.init.zeros_(model.head.weight)
    assert examine(patient_of(model)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "arguments"), [(5, HEALTHY[0]), (40, HEALTHY[1]), (20, HEALTHY[3])], ids=str)
def test_a_trained_model_has_no_findings(steps, arguments):
    assert examine(patient_of(trained(steps, **arguments), trained=True)) == []


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_before_its_consequences(fault, monkeypatch):
    check, where, what, seed = FAULTS[fault]
    findings = first_findings(seed(monkeypatch))
    assert {finding.check for finding in findings} == {check}, findings
    assert any(where in finding.where and what in finding.what for finding in findings), findings
    assert all(finding.do for finding in findings)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("arguments", HEALTHY[:4], ids=str)
def test_a_model_that_trains_by_kernels_has_no_findings(arguments):
    build.load_kernels()
    patient = patient_of(new_model(**arguments))
    patient.model.use(with_kernels(TORCH))
    assert examine(patient) == []


@pytest.mark.parametrize("name", [field.name for field in fields(Ops) if field.name != "dropout"])
def test_a_kernel_that_computes_something_else_is_named(name, monkeypatch):
    """Whichever it is; dropout is compared with nothing."""
    (finding,) = CHECKS["functions"](off_in_float32(name)(monkeypatch))
    assert finding.where == f"{name} of the model's table"


@pytest.mark.slow
def test_the_rates_of_muon_are_no_finding(monkeypatch):
    for patient in (
        another_optimizer(muon(0.02))(monkeypatch),
        patient_of(new_model(**AS_THE_DEFAULT), optimizer=MUON),
    ):
        assert list(CHECKS["learning rate"](patient)) == []


def test_heads_that_have_saturated_are_named():
    """In a new model, all of them; among scores that are not too large."""
    model = new_model(n_layers=1)
    model.blocks[0].attention.wk.weight.data.mul_(3000)
    found = list(CHECKS["saturation"](patient_of(model)))
    assert found and {finding.where for finding in found} <= {f"blocks.0.attention, head {h}" for h in range(4)}


def test_every_check_finds_a_fault_of_the_tests():
    assert {check for check, *_ in FAULTS.values()} | {"saturation"} == set(CHECKS)


def test_what_raises_an_error_is_a_finding_with_its_place():
    model = new_model()
    del model.blocks[1].dropout
    (finding,) = first_findings(patient_of(model))
    assert finding.check == "head order" and "has no attribute 'dropout'" in finding.what
    assert "gpt.py" in finding.where and ", forward" in finding.where


def test_of_weights_that_are_not_finite_nothing_more_is_said(monkeypatch):
    results = list(run(damaged(one_nan)(monkeypatch)))
    assert [r.check for r in results if r.findings] == ["finite weights"]
    assert {r.not_checked for r in results[1:]} == {"first fix: finite weights"}
