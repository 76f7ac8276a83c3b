"""scripts.evaluate on a run."""

import shutil

import pytest
from commands import command
from miniature import rows

from data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.slow

hardware = pytest.mark.hardware


@hardware
def test_a_checkpoint_is_evaluated_without_its_tokenizer_file(run, tmp_path):
    ByteTokenizer().save(tmp_path / "elsewhere")
    folder = run("borrowed", "tokenizer=saved", f"tokenizer.path={tmp_path / 'elsewhere'}")
    shutil.rmtree(tmp_path / "elsewhere")
    result = command("-m", "scripts.evaluate", f"checkpoint={folder}")
    assert result.returncode == 0, result.stderr
    assert f"loss           {rows(folder)[-1]['val_loss']:.4f}" in result.stdout
