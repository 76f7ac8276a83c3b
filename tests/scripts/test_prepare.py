"""scripts.prepare on a run."""

from pathlib import Path

import pytest

from conf.scripts import Prepare

pytestmark = pytest.mark.slow

hardware = pytest.mark.hardware


def test_the_text_of_a_batch_can_be_shown(run, settings, capsys):
    from data.batches import make_batches
    from data.corpus import open_corpus
    from scripts import prepare as script

    folder = run("shown", "packing=documents", "data.separator='\\n'", "seed=3")
    capsys.readouterr()
    corpus = open_corpus(next(path for path in Path("corpora").iterdir() if path.is_dir()))
    cfg = script.settings_of(folder, settings("step=5", config="prepare", kind=Prepare))
    assert (cfg.seed, cfg.packing, cfg.batch_tokens) == (3, "documents", 128)
    script.show(corpus, cfg)
    shown = capsys.readouterr().out
    batch = make_batches(corpus, 4, 32, 3, "documents").batch(5)
    for row in range(4):
        first = batch["tokens"][row][batch["documents"][row] == 0]
        assert corpus.tokenizer.decode(first.tolist()) in shown
    with pytest.raises(ValueError, match="nowhere is not a run folder: config.yaml is missing"):
        script.settings_of(Path("nowhere"), cfg)
