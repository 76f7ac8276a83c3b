"""Every command of the README runs: here in miniature, with its own overrides and small ones."""

import json
import re
import shlex
import shutil

import numpy as np
import pytest
from commands import command
from wandb.cli.cli import cli as wandb_cli

from conf.entry import REPOSITORY
from conf.scripts import Prepare

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
LINES = [
    line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line.strip()
]
COMMANDS = [line.split(" #")[0].strip() for line in LINES if "# network" not in line]
NETWORK = [line.split(" #")[0].strip() for line in LINES if "# network" in line]
TRAIN = ["steps=6", "batch_tokens=256", "seq_len=64", "schedule.warmup=2", "eval_tokens=512"]
TRAIN += [
    "model.d_model=16",
    "model.n_heads=2",
    "model.n_layers=1",
    "model.d_ff=16",
    "every.sample=6",
    "sample.tokens=5",
]
TRAIN += ["tracking.mode=disabled"]
TEXT = ["data=files", "data.paths=[books/*.txt]", "tokenizer.vocab_size=300"]  # for the plays, which pip would fetch


@pytest.fixture(scope="module")
def trained(tmp_path_factory, llama_tokenizer):
    """A folder with books, a Llama in the Hugging Face layout, and a finished run, called NAME."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "books").mkdir()
    for name in ("emma", "persuasion"):
        text = "".join(f"{name} wrote {i} letters to {i + 1} friends.\n" for i in range(60))
        (folder / "books" / f"{name}.txt").write_text(text)
    save_a_llama(folder / "llama", llama_tokenizer)
    (folder / "notes").mkdir()
    text = (folder / "books" / "emma.txt").read_text()
    (folder / "notes" / "a.jsonl").write_text("\n".join(json.dumps({"body": text + str(i)}) for i in range(20)))
    pairs = [(f"who wrote to {i} friends", f"{name} did") for i, name in enumerate(["emma", "persuasion"] * 10)]
    rows = ([{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in pairs)
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    (folder / "faq.csv").write_text("question,answer\n" + "".join(f"{one},{other}\n" for one, other in pairs))
    (folder / "prompts.txt").write_text("emma\n\npersuasion wrote 3\n")
    (folder / "tokens").mkdir()
    np.tile(np.arange(257, dtype=np.uint16), 20).tofile(folder / "tokens" / "a.ds")
    small = [*TRAIN, *TEXT, "steps=3", "hydra.run.dir=runs/20260101-000000-inkling-000000"]
    run(folder, [str(REPOSITORY / "train.py"), *small])
    for name in ("NAME", "OTHER"):
        (folder / "runs" / name).symlink_to("20260101-000000-inkling-000000")
    (folder / "runs" / "NAME" / "checkpoints" / "STEP").symlink_to("step_00000003")
    for name in "AB":
        (folder / "corpora" / name).symlink_to(next((folder / "corpora").glob("files-*")).name)
    return folder


def save_a_llama(folder, tokenizer: str):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=267, **shape)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer)


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "folder", symlinks=True)


def run(folder, arguments, ranks: int = 1) -> str:
    result = command(*arguments, cwd=folder, ranks=ranks)
    assert result.returncode == 0, result.stderr
    return result.stdout


def miniature(line: str) -> list[str]:
    """The arguments of a command, with ours behind its own where it trains or prepares."""
    program, *words = shlex.split(line)
    if program == "torchrun":
        at = words.index("train.py")
        own = miniature(shlex.join(["python", *words[at:]]))
        if "--max-restarts" not in words:  # two ranks that need not import everything anew do
            assert words[:at] == ["--nproc-per-node", "8"]
            return own
        assert words[:at] == ["--nproc-per-node", "8", "--max-restarts", "3"]
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words[2:at], *own]
    assert program == "python", line
    if words[0] == "train.py":
        own = words[1:]
        ours = [] if {"--help", "experiment=smoke"} & set(own) else [*TRAIN, *TEXT]
        taken = {word.split("=")[0] for word in own}
        if "tokenizer=bytes" in own or "data=mixture" in own:
            taken.add("tokenizer.vocab_size")
        if any(word.startswith("epochs=") for word in own):
            taken |= {"steps", "schedule.warmup"}
        short = {"steps": "steps=6", "epochs": "epochs=0.2"}
        own = [short.get(word.split("=")[0], word) for word in own]
        if "experiment=finetune" in own:
            taken |= {"data", "tokenizer.vocab_size"}
        return [str(REPOSITORY / "train.py"), *own, *(word for word in ours if word.split("=")[0] not in taken)]
    if words[1] == "scripts.prepare":
        return [*words, *TEXT[: 2 if "tokenizer=bytes" in words else 3]]
    return words


def test_there_are_commands():
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith(("python", "torchrun"))])
def test_the_command_works(folder, line):
    arguments = miniature(line)
    ranks = 2 if line.startswith("torchrun") and arguments[0] != "-m" else 1
    assert run(folder, arguments, ranks)


@pytest.mark.parametrize("line", NETWORK)
def test_what_needs_the_network_composes(settings, line):
    program, *words = shlex.split(line)
    if program == "wandb":
        assert words[0] in wandb_cli.commands
        assert all((REPOSITORY / word).is_file() for word in words if word.endswith(".yaml"))
        return
    assert program == "python"
    if words[0] == "train.py":
        settings(*words[1:])
    else:
        assert words[:2] == ["-m", "scripts.prepare"]
        settings(*(word for word in words[2:] if word != "merge"), config="prepare", kind=Prepare)


@pytest.mark.parametrize("line", [c for c in COMMANDS if not c.startswith(("python", "torchrun"))])
def test_the_other_commands_are_in_the_makefile(line):
    program, target = line.split()
    assert program == "make"
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)


def test_the_example_in_python_works(folder):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (folder / "example.py").write_text(code)
    assert run(folder, ["example.py"]).strip()


def test_every_file_that_the_readme_names_is_there():
    kept = [path for path in REPOSITORY.iterdir() if path.name[0] != "." and path.name not in ("runs", "corpora")]
    there = [path for top in kept for path in (top.rglob("*") if top.is_dir() else [top])]
    for name in re.findall(r"`([\w/]+\.(?:py|yaml|png))`|\]\((docs/[\w.]+)\)", README):
        name = "".join(name)
        if name == "config.yaml":  # a run's
            continue
        assert any(f"/{path}".endswith(f"/{name}") for path in there), name
