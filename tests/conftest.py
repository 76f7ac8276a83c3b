"""Fixtures shared by all tests: small models, settings as the command line would compose them, and no network."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import composed
import hardware
import pytest
import torch
from miniature import SMALL

import train
from model import GPT, ModelConfig

# built once, not in each test's own home
EXTENSIONS = os.environ.get("TORCH_EXTENSIONS_DIR") or str(Path.home() / ".cache" / "torch_extensions")
COMPILED = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(Path.home() / ".cache" / "torch_inductor")


def pytest_addoption(parser):
    parser.addoption("--hardware", choices=hardware.KINDS, help="the processor to simulate, see tests/hardware.py")


def pytest_configure(config):
    if config.getoption("hardware"):
        os.environ[hardware.PLAYED] = config.getoption("hardware")
    hardware.play()


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Runs each test in its own folder, without API keys, with one thread and a fixed seed."""
    monkeypatch.chdir(tmp_path)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        folder = tmp_path / ".home" / name.lower()
        folder.mkdir(parents=True)
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", EXTENSIONS)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", COMPILED)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    if "wandb" in sys.modules:  # it remembers the environment of its first use
        sys.modules["wandb"].teardown()


@pytest.fixture(autouse=True)
def processes(request, monkeypatch):
    """Lets only tests marked slow start another Python process; git and compilers are quick."""
    if request.node.get_closest_marker("slow"):
        return
    popen = subprocess.Popen.__init__

    def start(process, arguments, *rest, **options):
        words = arguments if isinstance(arguments, str) else " ".join(map(str, arguments))
        assert sys.executable not in words, f"a test that runs {words} is slow: mark it"
        popen(process, arguments, *rest, **options)

    def refuse(process):
        raise AssertionError(f"a test that starts {process} is slow: mark it")

    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)


@pytest.fixture
def small():
    """Builds a model that is small enough for float64 and large enough for its parts to differ."""

    def make(vocab_size=17, **arguments) -> GPT:
        shape = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "max_seq_len": 32}
        model = GPT(vocab_size, ModelConfig(**{**shape, **arguments})).double()
        for parameter in model.parameters():  # larger weights than at initialisation
            torch.nn.init.normal_(parameter, std=0.3)
        return model.eval()

    return make


@pytest.fixture
def settings():
    """Returns the parsed config of a command line."""
    return composed.settings


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of published models, tokenizers and texts; tests that need it are skipped if it is missing."""
    if "REFERENCE_DATA" not in os.environ:
        pytest.skip("REFERENCE_DATA is not set")
    return Path(os.environ["REFERENCE_DATA"])


@pytest.fixture(scope="session")
def llama_tokenizer() -> str:
    """A tokenizer.json like Llama's: a few pieces with their spaces, single bytes for everything else."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["\N{LOWER ONE EIGHTH BLOCK}", "a", "t", "h", "e", "th", "the", "\N{LOWER ONE EIGHTH BLOCK}the"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("t", "h"), ("th", "e"), ("\N{LOWER ONE EIGHTH BLOCK}", "the")]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return json.dumps(json.loads(tokenizer.to_str()))


@pytest.fixture
def run(settings, tmp_path):
    """Trains with SMALL and the given overrides; returns the run's folder, and keeps the exit code in run.code."""
    (tmp_path / "words.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(50)))

    def make(name: str, *overrides: str) -> Path:
        make.code = train.train(settings(*SMALL, *overrides), tmp_path / "runs" / name)
        return tmp_path / "runs" / name

    return make
