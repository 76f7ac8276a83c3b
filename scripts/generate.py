"""Generates text with a trained model.  python -m scripts.generate checkpoint=runs/NAME -- To be, or not"""

import contextlib
import json
import math
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from conf.console import visible
from conf.entry import entry_point
from conf.parsing import changed
from conf.scripts import Generate
from data.continuation import Continuation
from data.readers import unescape
from data.tokenizer import Tokenizer, load_tokenizer
from kernels.decoding import pack_for_decoding
from model import GPT, generate
from model.cache import bucket
from model.generation import READ_EVERY, Step
from scripts.terminal import warn
from training import auto, checkpoint, estimate
from training.compilation import compile_step

A_ROW = 6000  # bytes of a row besides tensors: its random generator, its text
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty")


@entry_point("generate", Generate)
def main(cfg: Generate):
    folder = checkpoint.find(cfg.checkpoint, warn=warn)
    model = checkpoint.load_model(folder, auto.choose_device(cfg.device))
    if cfg.quantize == "int8" or cfg.precision == "fp32":
        model = pack_for_decoding(model, cfg.quantize == "int8", warn)
    if cfg.precision == "bf16":
        model = model.bfloat16()
    writer = Writer(model, load_tokenizer(folder / "tokenizer"))
    if cfg.interactive:
        talk(writer, cfg)
    elif cfg.prompts_file is not None:
        text = read_text(cfg.prompts_file)
        if not text:
            raise ValueError(f"{cfg.prompts_file} holds no prompt, got an empty file")
        write_lines(writer, cfg, text.split("\n"))
    else:
        write_samples(writer, cfg, find_prompt(cfg))


def find_prompt(cfg: Generate) -> str:
    if cfg.prompt_file is not None:
        return read_text(cfg.prompt_file)
    if cfg.prompt is None and not sys.stdin.isatty():
        waiting = threading.Timer(1, warn, ["reading the prompt from standard input; or give one after --"])
        waiting.daemon = True
        waiting.start()
        try:
            return sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"the prompt on standard input is not UTF-8: {error}") from error
        finally:
            waiting.cancel()
    return cfg.prompt or ""


def read_text(path: str) -> str:
    """The text of a file without the final line break, which editors add."""
    try:
        return Path(path).read_text(encoding="utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


class Writer:
    """Generates text with a model and its tokenizer, and measures the time since the last report."""

    def __init__(self, model: GPT, tokenizer: Tokenizer):
        self.tokenizer, self.model = tokenizer, model
        self.models = {model.max_seq_len: model}  # by max_seq_len: this one, and those with an extended RoPE
        self.steps: dict[int, Step] = {}  # compiled, by max_seq_len
        self.compiled_rows = 0
        self.rows: list[Continuation] = []  # of the last call of write
        self.slid = False
        self.n_prompt = self.n_first = self.n_later = 0
        self.prompt_seconds = self.later_seconds = 0.0

    def ids(self, prompt: str) -> list[int]:
        try:
            return self.tokenizer.prompt(prompt)
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is not UTF-8 text, got {prompt!r}") from error

    def write(
        self, cfg: Generate, prompts: list[list[int]], seeds: Sequence[int], *, stream: bool = False, longest: int = 0
    ) -> Iterator[list[Continuation]]:
        """Continues prompts: yields the continuations, `rows`, as they grow, and once more when all have ended.

        It yields after every token with `stream` or stop strings, else after every 16th. `longest`: the length of the
        longest prompt of other batches, so that all batches extend RoPE by the same factor.
        """
        stop = [unescape(text) for text in cfg.stop]
        self.rows = [Continuation(self.tokenizer, prompt, stop) for prompt in prompts]
        reach = max(longest, *map(len, prompts)) + cfg.max_new_tokens - 1
        return self._write(cfg, self.reaching(reach, cfg.overflow), prompts, seeds, stream or len(stop) > 0)

    def _write(self, cfg: Generate, model: GPT, prompts, seeds, stream: bool) -> Iterator[list[Continuation]]:
        columns = generate(
            model,
            prompts,
            cfg.max_new_tokens,
            seeds=seeds,
            overflow="slide" if cfg.overflow == "slide" else "error",
            log_probabilities=True,
            step=self.compiled(model, len(prompts)) if cfg.compile else None,
            **{name: getattr(cfg, name) for name in SAMPLING},
        )
        began = time.perf_counter()
        first, last = True, began
        while part := list(islice(columns, 1 if first or stream else READ_EVERY)):
            before = sum(len(row.tokens) for row in self.rows)
            pairs = torch.stack([torch.stack([token.double(), value.double()], dim=1) for token, value in part])
            for column in pairs.tolist():  # the only wait for the device
                for row, (token, value) in zip(self.rows, column, strict=True):
                    if math.isnan(value):
                        raise ValueError("the model's probabilities are NaN: did the training diverge?")
                    row.push(int(token), value)
            now = time.perf_counter()
            if first:
                self.n_prompt += sum(map(len, prompts))
                self.n_first += len(prompts)
                self.prompt_seconds += now - began
            else:
                self.n_later += sum(len(row.tokens) for row in self.rows) - before
                self.later_seconds += now - last
            first, last = False, now
            yield self.rows
            if all(row.finish_reason for row in self.rows):
                return
        for row in self.rows:
            row.finish()
        yield self.rows

    def check_memory(self, rows: int, longest: int):
        """ValueError if `rows` rows at once, with prompts of up to `longest` tokens, do not fit into memory."""
        weight = self.model.embedding.weight
        if weight.device.type != "cpu":
            return  # torch reports it
        slots = min(bucket(longest + 1, self.model.max_seq_len), self.model.max_seq_len)
        a_row = estimate.keys_and_values(self.model, slots) + 16 * self.model.vocab_size + A_ROW
        estimate.check_fits(f"generating {rows:,} rows at once", rows * a_row)

    def reaching(self, n: int, overflow: str) -> GPT:
        """The model for a context of n tokens: the same, or one with an extended RoPE."""
        if overflow == "extend":
            reach = self.model.max_seq_len
            while reach < n:
                reach *= 2
            if reach not in self.models:
                n_parameters, n_bytes = estimate.size(
                    self.model.vocab_size, replace(self.model.config, max_seq_len=reach)
                )
                estimate.check_fits(f"a RoPE for {reach:,} tokens", n_bytes - estimate.WEIGHT * n_parameters)
                self.models[reach] = self.model.extended(reach)
            return self.models[reach]
        if overflow == "slide" and n > self.model.max_seq_len and not self.slid:
            half = max(1, self.model.max_seq_len // 2)
            context = f"the context of {self.model.max_seq_len} tokens"
            warn(f"longer than {context}: whenever it is full, generation continues from the last {half}")
            self.slid = True
        return self.model

    def compiled(self, model: GPT, rows: int) -> Step | None:
        """The compiled step of a model, compiled on first use; None for a last batch of fewer rows."""
        self.compiled_rows = self.compiled_rows or rows
        if rows != self.compiled_rows:
            return None
        if model.max_seq_len not in self.steps:
            began = time.perf_counter()
            self.steps[model.max_seq_len] = compile_step(model, rows, warn)
            warn(f"compiled in {time.perf_counter() - began:.1f} s")
        return self.steps[model.max_seq_len]

    def report(self, seed: int):
        speed = f", {self.n_later / self.later_seconds:.1f} tok/s" if self.n_later else ""
        prompt = f"prompt of {self.n_prompt} tokens in {self.prompt_seconds:.2f} s"
        warn(f"{self.n_first + self.n_later} tokens{speed}, {prompt}, seed {seed}")
        self.n_prompt = self.n_first = self.n_later = 0
        self.prompt_seconds = self.later_seconds = 0.0


def draw_seed(cfg: Generate) -> int:
    return secrets.randbelow(2**31) if cfg.seed is None else cfg.seed


def best(rows: list[Continuation], n: int) -> list[Continuation]:
    """Of every n rows the one with the highest mean log-probability."""
    return [max(rows[i : i + n], key=lambda row: row.mean_log_probability) for i in range(0, len(rows), n)]


# --- one prompt -----------------------------------------------------------------------------------------------------


class Printer:
    """Prints texts one after the other: each as it grows, once those before it have ended."""

    def __init__(self, prompt: str, n: int):
        self.prompt, self.n = prompt, n
        self.current, self.shown = 0, None

    def show(self, rows: list[Continuation], first: int):
        """Prints what is new in `rows`, which are the texts from index `first` on."""
        while self.current - first < len(rows):
            row = rows[self.current - first]
            text = row.text
            if self.shown is None:
                title = f"--- {self.current + 1} of {self.n}\n" if self.n > 1 else ""
                print(title + visible(self.prompt), end="", flush=True)
                self.shown = 0
            print(visible(text[self.shown :]), end="", flush=True)
            self.shown = len(text)
            if row.finish_reason is None:
                return
            print(flush=True)
            self.current, self.shown = self.current + 1, None


def write_samples(writer: Writer, cfg: Generate, prompt: str):
    """Prints num_samples continuations of a prompt, `batch` rows at once; after Ctrl-C what there is of them."""
    ids, seed, n = writer.ids(prompt), draw_seed(cfg), cfg.num_samples * cfg.best_of
    writer.check_memory(min(cfg.batch, n), len(ids))
    printer, best_yet = Printer(prompt, cfg.num_samples), []  # best_yet: of a sample whose best_of are not all drawn
    try:
        for start in range(0, n, cfg.batch):
            seeds = range(seed + start, seed + min(start + cfg.batch, n))
            writer.rows = []
            try:
                for rows in writer.write(cfg, [ids] * len(seeds), seeds, stream=cfg.best_of == 1):
                    if cfg.best_of == 1:
                        printer.show(rows, start)
            finally:
                for row in writer.rows:
                    row.finish()
                if all(row.tokens for row in writer.rows):
                    for i, row in enumerate(writer.rows, start):
                        best_yet = best([*best_yet, row], 2)
                        if (i + 1) % cfg.best_of == 0:
                            printer.show(best_yet, i // cfg.best_of)
                            best_yet = []
    finally:
        try:
            if best_yet:  # after Ctrl-C
                printer.show(best_yet, printer.current)
        finally:
            if writer.n_first:
                writer.report(seed)


# --- a prompt per line ----------------------------------------------------------------------------------------------


def write_lines(writer: Writer, cfg: Generate, lines: list[str]):
    """Prints num_samples lines of JSON for each line, in order, as soon as their batch has ended."""
    seed, reach = draw_seed(cfg), writer.model.max_seq_len
    prompts = [writer.ids(line) for line in lines]  # all at once, so that errors come before any work
    longest = max(map(len, prompts))
    for i, prompt in enumerate(prompts):
        if cfg.overflow == "error" and len(prompt) + cfg.max_new_tokens - 1 > reach:
            raise ValueError(
                f"line {i + 1}: {len(prompt)} prompt tokens and {cfg.max_new_tokens} new ones exceed "
                f"max_seq_len {reach}: give fewer, or overflow=slide"
            )
    n_jobs, at_once = len(lines) * cfg.num_samples, max(1, cfg.batch // cfg.best_of)
    writer.check_memory(min(at_once, n_jobs) * cfg.best_of, longest)
    unicode = sys.stdout.encoding.lower().startswith("utf")
    console = Console(stderr=True)
    try:
        for start in track(range(0, n_jobs, at_once), "generating", console=console, disable=not sys.stderr.isatty()):
            jobs = [job // cfg.num_samples for job in range(start, min(start + at_once, n_jobs))]
            n, first = len(jobs) * cfg.best_of, seed + start * cfg.best_of
            of_batch = [prompts[i] for i in jobs for _ in range(cfg.best_of)]
            writing = writer.write(cfg, of_batch, range(first, first + n), longest=longest)
            try:
                for _ in writing:
                    pass
            finally:  # after Ctrl-C too: prints what there is
                for row in writer.rows:
                    row.finish("interrupted")
                if all(row.tokens for row in writer.rows):
                    for i, row in zip(jobs, best(writer.rows, cfg.best_of), strict=True):
                        line = {"prompt": lines[i], "text": row.text, "tokens": row.tokens}
                        line |= {"log_probabilities": row.log_probabilities, "finish_reason": row.finish_reason}
                        print(json.dumps(line, ensure_ascii=not unicode), flush=True)
    finally:
        writer.report(seed)


# --- interactive ----------------------------------------------------------------------------------------------------

TUNABLE = (*SAMPLING, "max_new_tokens", "stop", "seed")
HELP = f"""What you type is added to the text, and the model continues it. Ctrl-C stops the model, Ctrl-D quits.
/reset             starts a new text
/temperature 0.7   changes the temperature; likewise {", ".join(f"/{name}" for name in SAMPLING[1:])},
                   /max_new_tokens 50, /seed 3 and /stop ["one","two"]
/help              prints this; a line that starts with / is always a command"""


def talk(writer: Writer, cfg: Generate):
    with contextlib.suppress(ImportError):  # line editing and history, where the system has it
        import readline  # noqa: F401
    warn(HELP)
    text = ""
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        try:
            if line.startswith("/"):
                text, cfg = obey(line[1:], text, cfg)
            else:
                text = f"{text}\n{line}" if text else line
                text += continue_text(writer, cfg, text)
        except ValueError as error:
            warn(f"error: {error}")


def obey(command: str, text: str, cfg: Generate) -> tuple[str, Generate]:
    """Carries out the command after a slash -> the text and the settings from now on."""
    name, _, value = command.strip().partition(" ")
    if name == "reset":
        return "", cfg
    if name == "help":
        warn(HELP)
        return text, cfg
    if name not in TUNABLE:
        raise ValueError(f"unknown command /{name}: give /reset, /help, {', '.join(f'/{known}' for known in TUNABLE)}")
    if not value:
        warn(f"{name} is {getattr(cfg, name)}")
        return text, cfg
    return text, changed(cfg, name, value)


def continue_text(writer: Writer, cfg: Generate, text: str) -> str:
    """Prints and returns a continuation; after Ctrl-C what there is of it."""
    seed, shown = draw_seed(cfg), 0
    writing = writer.write(cfg, [writer.ids(text)], [seed], stream=True)
    (row,) = writer.rows
    try:
        for _ in writing:
            print(visible(row.text[shown:]), end="", flush=True)
            shown = len(row.text)
    except KeyboardInterrupt:
        row.finish()
        print(visible(row.text[shown:]), end="")
    print(flush=True)
    writer.report(seed)
    return row.text


if __name__ == "__main__":
    main()
