import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from commands import command

from conf.entry import REPOSITORY
from conf.parsing import changed
from conf.scripts import Generate
from data.tokenizer import ByteTokenizer, CharacterTokenizer
from model import GPT, ModelConfig, generate
from scripts.generate import Writer, find_prompt, talk, write_lines, write_samples
from training import checkpoint


@pytest.fixture
def model():
    shape = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 24, "max_seq_len": 64}
    model = GPT(257, ModelConfig(**shape)).eval()
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model


@pytest.fixture
def writer(model):
    return Writer(model, ByteTokenizer())


@pytest.fixture
def cfg(settings):
    def make(*overrides):
        return settings("checkpoint=x", "max_new_tokens=20", *overrides, config="generate", kind=Generate)

    return make


def alone(model, prompt: str, seed: int, n=20, **options) -> list[int]:
    options = {"temperature": 0.7, "top_p": 0.9, **options}
    columns = generate(model, [ByteTokenizer().prompt(prompt)], n, seeds=[seed], overflow="slide", **options)
    return until_stop(torch.cat(list(columns)).tolist())


def until_stop(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(256) + 1] if 256 in tokens else tokens


def text_of(tokens) -> str:
    return ByteTokenizer().decode(tokens)


# --- one prompt -----------------------------------------------------------------------------------------------------


def test_the_text_goes_to_stdout_and_a_report_to_stderr(writer, cfg, model, capsys):
    write_samples(writer, cfg("seed=3"), "To be")
    out, err = capsys.readouterr()
    assert out == "To be" + text_of(alone(model, "To be", 3)) + "\n"
    assert "20 tokens, " in err
    assert "tok/s, prompt of 5 tokens in " in err
    assert err.endswith("s, seed 3\n")


def test_samples_are_printed_in_the_order_of_their_seeds(writer, cfg, model, capsys):
    write_samples(writer, cfg("num_samples=3", "seed=5"), "ab")
    texts = [text_of(alone(model, "ab", seed)) for seed in (5, 6, 7)]
    assert capsys.readouterr().out == "".join(f"--- {i + 1} of 3\nab{text}\n" for i, text in enumerate(texts))
    assert len(set(texts)) == 3


def test_best_of_shows_the_text_that_the_model_finds_most_likely(writer, cfg, model, capsys):
    write_samples(writer, cfg("num_samples=2", "best_of=3", "temperature=1.5"), "ab")

    def score(tokens):
        whole = torch.tensor([[*ByteTokenizer().prompt("ab"), *tokens]])
        logs = model(whole).log_softmax(-1)[0]
        return sum(logs[1 + i, token].item() for i, token in enumerate(tokens)) / len(tokens)

    drawn = [alone(model, "ab", seed, temperature=1.5) for seed in range(6)]
    chosen = [max(drawn[:3], key=score), max(drawn[3:], key=score)]
    assert capsys.readouterr().out == "".join(f"--- {i + 1} of 2\nab{text_of(t)}\n" for i, t in enumerate(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 100])
def test_the_batch_size_changes_no_text(writer, cfg, batch, capsys):
    for samples in (["num_samples=5"], ["num_samples=2", "best_of=3"]):
        settings = [*samples, "temperature=1.5", "seed=3", "max_new_tokens=5"]
        write_samples(writer, cfg(*settings), "ab")
        at_once = capsys.readouterr().out
        write_samples(writer, cfg(*settings, f"batch={batch}"), "ab")
        assert capsys.readouterr().out == at_once
        assert len(writer.rows) <= batch


@pytest.mark.parametrize("setting", ["num_samples=1000000000", "best_of=1000000000"])
def test_samples_beyond_a_batch_are_generated_one_batch_after_another(writer, cfg, setting, capsys, monkeypatch):
    batches, write = [], writer.write

    def three_batches(cfg, prompts, seeds, **options):
        if len(batches) == 3:
            raise KeyboardInterrupt
        batches.append(seeds)
        yield from write(cfg, prompts, seeds, **options)

    monkeypatch.setattr(writer, "write", three_batches)
    with pytest.raises(KeyboardInterrupt):
        write_samples(writer, cfg(setting, "batch=2", "max_new_tokens=2"), "ab")
    assert batches == [range(2), range(2, 4), range(4, 6)]
    assert capsys.readouterr().out.count("ab") == (6 if "num" in setting else 1)


def test_a_batch_too_large_for_memory_is_refused_before_any_work(writer, cfg, model):
    with pytest.raises(ValueError, match=r"generating 1,000,000,000 rows at once needs .* GiB free"):
        write_lines(writer, cfg("best_of=1000000000"), ["a"])
    with pytest.raises(ValueError, match=r"a RoPE for 1,073,741,824 tokens needs .* GiB free"):
        write_samples(writer, cfg("max_new_tokens=1000000000", "overflow=extend"), "ab")


def test_text_is_printed_while_it_is_generated(writer, cfg, monkeypatch):
    """Each character is printed before the next is sampled."""
    seen = []
    monkeypatch.setattr("builtins.print", lambda text="", **options: seen.append((text, options.get("flush"))))
    write_samples(writer, cfg("temperature=0", "num_samples=1"), "a")
    pieces = [text for text, flush in seen if flush]
    assert len([piece for piece in pieces if piece]) > 8


def test_a_stop_string_ends_it(writer, cfg, model, capsys):
    whole = text_of(alone(model, "ab", 0))
    write_samples(writer, cfg(f"stop=['{whole[4:6]}']"), "ab")
    assert capsys.readouterr().out == "ab" + whole[: whole.index(whole[4:6])] + "\n"


def test_stop_strings_may_have_line_breaks(writer, cfg):
    list(writer.write(cfg(r"stop=['a\n']"), [[1]], [0]))
    assert writer.rows[0].stop_strings == ["a\n"]


def test_text_beyond_the_context_gives_one_warning(writer, cfg, capsys):
    for _ in range(2):
        write_samples(writer, cfg("max_new_tokens=100"), "ab")
    assert capsys.readouterr().err.count("longer than the context of 64 tokens: whenever it is full") == 1


@pytest.mark.slow
def test_the_model_is_extended_only_for_longer_texts(writer, cfg):
    assert writer.reaching(64, "extend") is writer.model
    longer = writer.reaching(65, "extend")
    assert longer.max_seq_len == 128
    assert writer.reaching(100, "extend") is longer
    list(writer.write(cfg("max_new_tokens=100", "overflow=extend", "temperature=0"), [[1, 2]], [0]))
    expected = list(generate(writer.model, [[1, 2]], 100, temperature=0, overflow="extend"))
    assert writer.rows[0].tokens == until_stop(torch.cat(expected).tolist())


def test_without_a_seed_one_is_drawn_and_reported(writer, cfg, model, capsys):
    write_samples(writer, cfg("seed=null"), "ab")
    out, err = capsys.readouterr()
    seed = int(err.split("seed ")[1])
    assert out == "ab" + text_of(alone(model, "ab", seed)) + "\n"
    write_samples(writer, cfg("seed=null"), "ab")
    assert f"seed {seed}\n" not in capsys.readouterr().err


@pytest.mark.slow
def test_the_report_does_not_count_tokens_after_a_stop_string(writer, cfg, model, capsys):
    write_samples(writer, cfg("num_samples=4", "temperature=2.0", "top_p=null", "max_new_tokens=60"), "ab")
    rows = [alone(model, "ab", seed, n=60, temperature=2.0, top_p=None) for seed in range(4)]
    assert min(map(len, rows)) < max(map(len, rows))
    assert f"\n{sum(map(len, rows))} tokens, " in "\n" + capsys.readouterr().err


def test_a_diverged_model_is_reported(writer, cfg, model):
    torch.nn.init.constant_(model.head.weight[3], float("nan"))
    with pytest.raises(ValueError, match=r"the model's probabilities are NaN"):
        write_samples(writer, cfg(), "ab")


@pytest.mark.parametrize(("stream", "stop", "reads"), [(True, [], 19), (False, ["never"], 19), (False, [], 2)])
def test_the_host_reads_each_token_only_when_text_is_streamed(writer, cfg, monkeypatch, stream, stop, reads):
    """After the first token; otherwise it reads 16 tokens at once."""
    looks, tolist = [], torch.Tensor.tolist
    writing = writer.write(cfg(f"stop={stop}", "temperature=0"), [[1], [2, 3]], [0, 1], stream=stream)
    next(writing)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: looks.append(1) or tolist(tensor))
    list(writing)
    assert [len(row.tokens) for row in writer.rows] == [20, 20]
    assert len(looks) == reads


# --- where prompts come from ----------------------------------------------------------------------------------------


def test_a_prompt_comes_from_the_command_a_file_or_standard_input(cfg, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("from a\nfile\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert find_prompt(cfg("prompt=given")) == "given"
    assert find_prompt(cfg("prompt=''")) == ""
    assert find_prompt(cfg(f"prompt_file={tmp_path}/p.txt")) == "from a\nfile"
    assert find_prompt(cfg()) == "from a pipe"
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfmarked\r\n")  # as some editors do
    assert find_prompt(cfg(f"prompt_file={tmp_path}/p.txt")) == "marked"
    (tmp_path / "p.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"p.txt is not UTF-8"):
        find_prompt(cfg(f"prompt_file={tmp_path}/p.txt"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prompt=a", "prompt_file=b"], "in one way.*prompt, prompt_file"),
        (["prompt=a", "interactive=true"], "in one way.*prompt, interactive"),
        (["interactive=true", "num_samples=2"], "generates one text at a time"),
        (["best_of=2", "temperature=0"], "a temperature above 0"),
        (["stop=['']"], "strings of at least one character"),
        (["top_k=0"], "top_k must be at least 1, got 0"),
        (["temperature=nan"], "temperature must be a number, got nan"),
        (["repetition_penalty=0"], "repetition_penalty must be at least 1e-06, got 0"),
        (["frequency_penalty=inf"], "frequency_penalty must be finite"),
        (["frequency_penalty=1e39"], "frequency_penalty must be at most 1000000.0"),
        (["seed=99999999999999999999"], "seed"),
        (["stop=x"], r"stop: must be a list, such as \[one,two\]"),
        (["overflow=slid"], "did you mean slide"),
        (["quantize=int4"], "quantize must be one of int8, got int4"),
    ],
)
def test_senseless_settings_are_refused(cfg, overrides, message):
    with pytest.raises(ValueError, match=message):
        cfg(*overrides)


# --- one prompt per line --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_prompt_gives_the_same_lines_of_json_in_any_batch(writer, cfg, model, capsys):
    lines = ["To be", "", "a longer prompt than the others", "ü"]
    found = []
    for batch in (1, 3, 16):
        write_lines(writer, cfg("num_samples=2", f"batch={batch}", "max_new_tokens=60", "seed=4"), lines)
        out, err = capsys.readouterr()
        found.append([json.loads(line) for line in out.splitlines()])
        assert "seed 4" in err
    for rows in found:
        assert [row["prompt"] for row in rows] == [line for line in lines for _ in range(2)]
        for i, row in enumerate(rows):
            tokens = alone(model, row["prompt"], 4 + i, n=60)
            assert row["tokens"] == tokens
            assert row["text"] == text_of(tokens)
            assert row["finish_reason"] == ("stop" if 256 in tokens else "length")
            assert len(row["log_probabilities"]) == len(tokens)
    for rows in found[1:]:
        for row, other in zip(found[0], rows, strict=True):
            assert row["log_probabilities"] == pytest.approx(other["log_probabilities"], abs=1e-4)


def test_an_invalid_line_is_refused_before_any_work(cfg, model, capsys):
    writer = Writer(model, CharacterTokenizer("abc"))
    with pytest.raises(ValueError, match="does not know the characters 'x'"):
        write_lines(writer, cfg(), ["abc", "x"])
    with pytest.raises(ValueError, match=r"line 2: 60 prompt tokens and 20 new ones.*max_seq_len 64"):
        write_lines(writer, cfg("overflow=error"), ["abc", "a" * 60])
    assert capsys.readouterr().out == ""


def test_ctrl_c_keeps_the_text_generated_for_the_batch(writer, cfg, monkeypatch, capsys):
    original = writer._write

    def interrupted(*arguments):
        for i, rows in enumerate(original(*arguments)):
            yield rows
            if i == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_lines(writer, cfg("batch=2", "max_new_tokens=60"), ["ab", "cd", "ef"])
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["ab", "cd"]
    assert {row["finish_reason"] for row in rows} <= {"stop", "interrupted"}
    assert max(len(row["tokens"]) for row in rows) == 17
    assert "seed 0" in err


@pytest.mark.slow
def test_a_file_without_prompts_is_refused(folder, tmp_path):
    (tmp_path / "empty.txt").touch()
    result = command("-m", "scripts.generate", f"checkpoint={folder}", f"prompts_file={tmp_path}/empty.txt")
    assert "empty.txt holds no prompt" in result.stderr
    assert result.returncode == 2


# --- interactive prompts --------------------------------------------------------------------------------------------


def converse(writer, cfg, monkeypatch, *lines):
    lines = iter(lines)

    def answer(prompt):
        line = next(lines, EOFError)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr("builtins.input", answer)
    talk(writer, cfg)


def test_typed_text_continues_the_text(writer, cfg, model, monkeypatch, capsys):
    converse(writer, cfg(), monkeypatch, "ab", "cd", "/reset", "ab")
    first = text_of(alone(model, "ab", 0))
    second = text_of(alone(model, f"ab{first}\ncd", 0))
    assert capsys.readouterr().out == f"{first}\n{second}\n{first}\n\n"


def test_settings_can_be_changed_in_a_chat_and_mistakes_change_nothing(writer, cfg, model, monkeypatch, capsys):
    commands = [
        "/temperature 0",
        "/top_p null",
        "/max_new_tokens 5",
        "/seed 3",
        "/top_k -1",
        "/nothing",
        "/top_k x",
        "/seed",
    ]
    converse(writer, cfg(), monkeypatch, *commands, KeyboardInterrupt, "/reset", "ab", "/help")
    out, err = capsys.readouterr()
    assert out == "\n" + text_of(alone(model, "ab", 3, n=5, temperature=0)) + "\n\n"
    assert "error: top_k must be at least 1, got -1" in err
    assert "error: unknown command /nothing" in err
    assert "error: top_k: Value x of type str could not be converted to a whole number" in err
    assert "seed is 3" in err
    assert err.count("/reset  ") == 2  # at the start and for /help


def test_ctrl_c_ends_the_generation_and_keeps_its_text(writer, cfg, model, monkeypatch, capsys):
    """Including text that was held back as a possible start of a stop string."""
    original, expected = writer._write, text_of(alone(model, "ab", 0, n=7))

    def interrupted(*arguments):
        for i, rows in enumerate(original(*arguments)):
            yield rows
            if i == 6:
                raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write", interrupted)
    for stop in ("[]", json.dumps([expected[-1] + "never"])):
        converse(writer, changed(cfg(), "stop", stop), monkeypatch, "ab")
        out, err = capsys.readouterr()
        assert out == expected + "\n\n"
        assert "7 tokens" in err


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(model, tmp_path):
    weights, about = checkpoint.snapshot(model)
    about |= {"step": 1, "seq_len": 64, "precision": "fp32"}
    checkpoint.save(tmp_path / "step", weights, ByteTokenizer().save, about)
    return tmp_path / "step"


def start(folder, *overrides, **options) -> subprocess.Popen:
    words = [sys.executable, "-m", "scripts.generate", f"checkpoint={folder}", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options)


@pytest.mark.slow
def test_a_prompt_may_be_piped_in_and_a_closed_pipe_is_no_error(folder):
    process = start(folder, "max_new_tokens=100000", stdin=subprocess.PIPE)
    process.stdin.write(b"To be\n")
    process.stdin.close()
    assert process.stdout.read(5) == b"To be"
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(60) == 0
    assert "Error" not in errors
    assert "error" not in errors
    assert "seed 0" in errors


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_prints_the_text_so_far(folder):
    process = start(folder, "max_new_tokens=100000", "num_samples=2", "--", "To be")
    began = process.stdout.read(40)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    whole = (began + out).decode(errors="replace")
    assert process.returncode == 130
    assert whole.startswith("--- 1 of 2\nTo be")
    assert "\n--- 2 of 2\nTo be" in whole  # the second sample's text so far
    assert whole.endswith("\n")
    assert "seed 0" in errors.decode()
    assert "Traceback" not in errors.decode()


@pytest.mark.slow
def test_a_seed_decides_the_text_and_int8_generates_too(folder):
    generate = "-m", "scripts.generate", f"checkpoint={folder}", "max_new_tokens=50"
    runs = [command(*generate, *more, "--", "To be") for more in ([], [], ["seed=1"], ["quantize=int8"])]
    assert [result.returncode for result in runs] == [0] * 4
    first, same, other, int8 = (result.stdout for result in runs)
    assert first == same != other
    assert int8.startswith("To be")
    assert len(int8) > 10


@pytest.mark.slow
def test_prompt_and_prompt_file_together_are_refused(folder):
    result = command("-m", "scripts.generate", f"checkpoint={folder}", "prompt_file=a.txt", "--", "To be")
    assert "error: give the prompt in one way only" in result.stderr
    assert result.returncode == 2
