"""Complete miniature runs; tests/training has more of them."""

import math

import pytest
from miniature import final, rows, same

hardware = pytest.mark.hardware


def test_a_prompt_that_cannot_be_encoded_is_refused_before_training(run, tmp_path):
    with pytest.raises(ValueError, match="sample.prompt: .* does not know the characters 'Z'"):
        run("one", "tokenizer=chars", "sample.prompt=Z")
    assert not (tmp_path / "runs" / "one").exists()


@hardware
def test_evaluation_sampling_and_logging_do_not_change_training(run):
    often = run("often", "every.evaluate=1", "every.sample=1", "every.checkpoint=1")
    rarely = run("rarely", "every.evaluate=8", "every.sample=8", "every.log=8")
    assert same(final(often)[0], final(rarely)[0])


def test_another_seed_gives_another_run(run):
    assert not same(final(run("one"))[0], final(run("two", "seed=1"))[0])


def test_a_context_longer_than_the_corpus_is_refused_with_both_numbers(run):
    with pytest.raises(ValueError, match=r"seq_len 60000 needs at least 60001 tokens, but the training text has \d+"):
        run("long", "seq_len=60000", "batch_tokens=240000")


def test_the_validation_text_may_be_shorter_than_the_context(run):
    folder = run("long", "seq_len=60", "batch_tokens=240", "data.validation_share=0.01")
    assert all(math.isfinite(row["val_loss"]) for row in rows(folder) if "val_loss" in row)
