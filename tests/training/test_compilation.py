import pytest
import torch
from hardware import needs_torch_compile

from model import GPT, ModelConfig, generate
from training.compilation import compile_step

pytestmark = pytest.mark.slow


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def random_model(**arguments) -> GPT:
    shape = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 24, "max_seq_len": 600}
    model = GPT(17, ModelConfig(**shape, **arguments)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@needs_torch_compile
def test_one_compilation_serves_all_cache_sizes_of_one_model_only():
    """Rows of different lengths grow through all sizes of the cache, and slide; then comes another model."""
    model, rows = random_model(), [[3], [1, 2, 3, 4, 5]]
    plain = [column.tolist() for column in generate(model, rows, 700, overflow="slide")]
    warnings, before = [], compilations()
    step = compile_step(model, 2, warnings.append)
    assert compilations() == before + 1
    sizes, real = set(), step

    def watched(model, tokens, cache):
        sizes.add(cache.n_slots)
        return real(model, tokens, cache)

    text = [column.tolist() for column in generate(model, rows, 700, overflow="slide", step=watched)]
    assert text == plain
    assert sizes == {128, 256, 512, 600}
    assert compilations() == before + 1

    other = random_model(positions="alibi")
    own = compile_step(other, 2, warnings.append)
    expected = [column.tolist() for column in generate(other, rows, 200)]
    assert [column.tolist() for column in generate(other, rows, 200, step=own)] == expected
    assert [column.tolist() for column in generate(other, rows, 20, step=step)] == expected[:20]  # uncompiled
    assert compilations() == before + 2
    assert warnings == []


def test_generation_runs_uncompiled_if_compiling_fails(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no compiler here\nat all")

    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    model, warnings = random_model(), []
    step = compile_step(model, 1, warnings.append)
    assert warnings == ["torch.compile failed, continuing without it: RuntimeError: no compiler here"]
    plain = list(generate(model, [[1]], 10))
    assert list(generate(model, [[1]], 10, step=step)) == plain
