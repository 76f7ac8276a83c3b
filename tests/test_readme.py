"""Every command and link in the README and the documentation works: commands run here on tiny models."""

import json
import re
import shlex
import shutil

import numpy as np
import pytest
import torch
from commands import command
from torch.distributed.run import get_args_parser

from conf.entry import REPOSITORY
from conf.scripts import Benchmark, Lessons, Prepare
from model import feed_forward

PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8")
    for path in [*sorted(REPOSITORY.glob("*.md")), *sorted(REPOSITORY.glob("docs/*.md"))]
}
README = PAGES["README.md"]
LESSONS = "docs/attention.md"  # tests/insight/test_lessons.py runs what it shows


def lines_of(*pages: str) -> list[str]:
    """Returns the lines of all shell blocks of these pages, each line once."""
    blocks = [block for page in pages for block in re.findall(r"```sh\n(.*?)```", PAGES[page], re.DOTALL)]
    return list(dict.fromkeys(line for block in blocks for line in block.splitlines() if line.strip()))


def commands_of(lines: list[str]) -> list[str]:
    """Returns the commands without comments, each once."""
    return list(dict.fromkeys(line.split(" #")[0].strip() for line in lines))


LINES = lines_of(*(page for page in PAGES if page != LESSONS))
NETWORK = commands_of([line for line in LINES if "# network" in line])
COMMANDS = commands_of([line for line in LINES if "# network" not in line])
PROSE = {page: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for page, text in PAGES.items()}
INLINE = [span for text in PROSE.values() for span in re.findall(r"`([^`\n]+)`", text)]
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
TEXT = ["data=files", "data.paths=[books/*.txt]", "tokenizer.vocab_size=300"]  # as the plays need a download


@pytest.fixture(scope="module")
def trained(tmp_path_factory, llama_tokenizer):
    """A folder with books, a Llama in the Hugging Face layout, and a finished run called NAME."""
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
    """Returns the arguments of a command, followed by settings of a tiny run if it trains or prepares.

    For torchrun, returns those of train.py; tests/training/test_distributed.py starts torchrun itself.
    """
    program, *words = shlex.split(line)
    if program == "torchrun":
        at = words.index("train.py")
        assert get_args_parser().parse_args(words[: at + 1]).nproc_per_node == "8"
        program, words = "python", words[at:]
    assert program == "python", line
    if words[0] == "train.py":
        own = words[1:]
        ours = [] if {"--help", "experiment=smoke"} & set(own) else [*TRAIN, *TEXT]
        taken = {word.split("=")[0] for word in own}
        if "tokenizer=bytes" in own or "data=mixture" in own:
            taken.add("tokenizer.vocab_size")
        if any(word.startswith("epochs=") for word in own):
            taken |= {"steps", "schedule.warmup"}
        short = {"steps": "steps=6", "epochs": "epochs=0.2", "seed": "seed=0,1"}
        own = [short.get(word.split("=")[0], word) for word in own]
        if "experiment=finetune" in own:
            taken |= {"data", "tokenizer.vocab_size"}
        return [str(REPOSITORY / "train.py"), *own, *(word for word in ours if word.split("=")[0] not in taken)]
    if words[1] == "scripts.prepare":
        return [*words, *TEXT[: 2 if "tokenizer=bytes" in words else 3]]
    return words


# --- commands ---------------------------------------------------------------------------------------------------------


def test_there_are_commands():
    assert len(COMMANDS) > 30 and len(NETWORK) > 5


RUN = {(line.split()[0], *miniature(line)): line for line in COMMANDS if line.startswith(("python", "torchrun"))}


@pytest.mark.slow
@pytest.mark.parametrize("line", RUN.values(), ids=lambda line: line[:90])
def test_the_command_works(folder, line):
    assert run(folder, miniature(line), ranks=2 if line.startswith("torchrun") else 1)


@pytest.mark.parametrize("line", NETWORK)
def test_commands_that_need_the_network_compose(settings, line):
    program, *words = shlex.split(line)
    if program == "wandb":
        from wandb.cli.cli import cli as wandb_cli

        assert words[0] in wandb_cli.commands
        assert all((REPOSITORY / word).is_file() for word in words if word.endswith(".yaml"))
        return
    assert program == "python"
    if words[0] == "train.py":
        settings(*words[1:])
    else:
        assert words[:2] == ["-m", "scripts.prepare"]
        settings(*(word for word in words[2:] if word != "merge"), config="prepare", kind=Prepare)


def test_the_commands_of_the_lessons_compose(settings):
    lines = commands_of(lines_of(LESSONS))
    assert len(lines) > 3
    for line in lines:
        program, *words = shlex.split(line)
        assert [program, *words[:2]] == ["python", "-m", "scripts.lessons"]
        settings(*(word for word in words[2:] if "=" in word), config="lessons", kind=Lessons)


def test_the_other_commands_are_in_the_makefile():
    others = [line for line in COMMANDS if not line.startswith(("python", "torchrun"))]
    assert others
    for line in others:
        program, target = line.split()
        assert program == "make"
        assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)


def test_settings_in_the_text_compose(settings):
    """Both `python train.py ...` in a sentence and settings alone in a table of experiments."""
    spans = [span.removeprefix("python train.py") for span in INLINE if re.match("python train.py [^-]", span)]
    spans.remove(" model.feed_forward=silu")  # the README's example of a change, tested below
    log = PAGES["docs/log.md"]
    spans += [span for span in INLINE if f"| `{span}`" in log and re.fullmatch(r"([\w.]+=\S+ ?)+", span)]
    assert len(spans) > 30
    for span in spans:
        words = shlex.split(span)
        settings(*words, *TEXT[:2] * any(word.startswith("data.paths=") for word in words))


def test_the_benchmarks_in_the_text_compose(settings):
    spans = [shlex.split(span) for span in INLINE if span.startswith("python -m scripts.benchmark ")]
    assert {words[3] for words in spans} == {"train", "length", "learn", "generate", "data"}
    for words in spans:
        settings(*words[4:], config="benchmark", kind=Benchmark)


@pytest.mark.slow
def test_the_example_in_python_works(folder):
    (code,) = [code for text in PAGES.values() for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    (folder / "example.py").write_text(code)
    assert run(folder, ["example.py"]).strip()


def test_the_change_of_the_model_in_the_readme_works():
    """Its removed lines are in the files, and the change adds an activation that the settings accept."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    changed = {}
    for name, hunk in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", diff, re.DOTALL | re.MULTILINE):
        source = (REPOSITORY / name).read_text(encoding="utf-8")
        (removed,) = re.findall(r"^-(.*)$", hunk, re.MULTILINE)
        added = "\n".join(re.findall(r"^\+(.*)$", hunk, re.MULTILINE))
        assert source.count(removed) == 1
        changed[name] = {"__name__": feed_forward.__name__}
        exec(source.replace(removed, added), changed[name])
    silu = changed["model/feed_forward.py"]["FEED_FORWARDS"]["silu"](8, 16)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(silu(x), silu.down(torch.nn.functional.silu(silu.up(x))))
    shape = {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 16, "max_seq_len": 4}
    assert changed["model/config.py"]["ModelConfig"](**shape, feed_forward="silu").feed_forward == "silu"


# --- pages and links --------------------------------------------------------------------------------------------------


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_every_page_is_in_the_contents_of_the_readme():
    assert set(PAGES) - {"README.md"} <= set(re.findall(r"\]\(([\w/]+\.md)\)", README))


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_has_a_target(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        path = (REPOSITORY / page).parent / target if target else REPOSITORY / page
        assert path.is_file(), link
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), link


def test_every_file_named_on_a_page_exists():
    kept = [path for path in REPOSITORY.iterdir() if path.name[0] != "." and path.name not in ("runs", "corpora")]
    existing = [path for top in kept for path in (top.rglob("*") if top.is_dir() else [top])]
    names = {span for span in INLINE if re.fullmatch(r"[\w/]+\.(py|cpp|yaml|png|md)", span)}
    assert len(names) > 30
    for name in names - {"config.yaml"}:  # in a run's folder
        assert any(f"/{path}".endswith(f"/{name}") for path in existing), name
