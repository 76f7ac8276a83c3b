import copy
import json
import math
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from conf.entry import REPOSITORY
from conf.parsing import parse
from conf.schema import Train
from conf.scripts import Doctor, Evaluate, Explain, Generate, ImportHF, Lessons, Prepare
from data.config import Name, PathName
from model import GPT, ModelConfig
from model.feed_forward import FEED_FORWARDS
from model.norm import NORMS
from model.positions import SCALINGS, SCHEMES
from training import checkpoint
from training.optimizer import build_optimizer
from training.schedule import lr_factor

CONF = REPOSITORY / "conf"


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


GROUPS = [path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__"]
EVERY_YAML = [f"{group}={name}" for group in GROUPS for name in choices(group)]
NEEDS = {
    "data=files": ["data.paths=[README.md]"],
    "data=tokens": ["data.paths=[a.ds]", "tokenizer=bytes"],
    "data=hub": ["data.repo=owner/name"],
    "data=corpus": ["data.paths=[corpora/a]"],
    "data=mixture": ["data.corpora={corpora/a: 0.5, corpora/b: 0.5}"],
    "tokenizer=json": ["tokenizer.path=tokenizer.json"],
    "experiment=tinyshakespeare": ["data.paths=[tinyshakespeare.txt]"],
    "tokenizer=saved": ["tokenizer.path=corpora/a/tokenizer"],
    "data=chat": ["data.paths=[chat.jsonl]"],
    "model=from_checkpoint": ["init_from=begun"],
    "tokenizer=from_checkpoint": ["init_from=begun"],
    "experiment=finetune": ["init_from=begun", "data.paths=[chat.jsonl]"],
}


@pytest.mark.slow
@pytest.mark.parametrize("override", EVERY_YAML)
def test_every_yaml_composes_and_builds(settings, override):
    needs = NEEDS.get(override, [])
    if "init_from=begun" in needs:
        begun = checkpoint.arguments_of(GPT(300, settings("model=nano").model))
        Path("begun").mkdir()
        Path("begun/model.json").write_text(json.dumps({"arguments": begun, "seq_len": 128}))
    cfg = settings(override, *needs)
    model = GPT(300, cfg.model)
    build_optimizer(model, cfg.optimizer)
    for step in range(0, cfg.steps, 7):
        assert lr_factor(step, cfg.steps, cfg.schedule) > 0
    tokens = torch.randint(300, (1, 32))
    loss, count = model(tokens, targets=tokens)
    assert torch.isfinite(loss) and count == 32


def test_the_scripts_settings_compose(settings):
    assert settings("checkpoint=x", config="generate", kind=Generate).num_samples == 1
    assert settings("checkpoint=x", config="evaluate", kind=Evaluate).data is None
    assert settings("checkpoint=x", "data=shakespeare", config="evaluate", kind=Evaluate).data.source == "shakespeare"
    assert settings("source=a", "target=b", config="import_hf", kind=ImportHF).target == "b"
    assert settings("tokenizer=bytes", config="prepare", kind=Prepare).tokenizer.kind == "bytes"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+typo=1", "unknown setting typo"),
        ("+model.n_head=3", "unknown setting model.n_head: did you mean model.n_heads"),
        ("+modle=nano", r"did you mean model\?"),
        ("+d_modl=3", "did you mean model.d_model"),
        ("model.n_heads=many", "model.n_heads: Value many .* could not be converted"),
        ("model.n_heads=7", "multiple of model.n_heads, got 128 and 7"),
        ("model.n_heads=128", "even, got 128 / 128 = 1"),
        ("model.n_kv_heads=3", "multiple of model.n_kv_heads"),
        ("model.positions=ropes", r"one of rope, learned, .*got ropes \(did you mean rope\?\)"),
        ("model.rope_scaling=yarm", r"one of interpolation, ntk, yarn, got yarm \(did you mean yarn\?\)"),
        ("model.rope_scaling=yarn", "go together.*got yarn and 1.0"),
        ("model.rope_factor=2", "go together.*got None and 2.0"),
        (
            ["model.rope_scaling=ntk", "model.rope_factor=2", "model.positions=alibi"],
            "needs model.positions=rope.*alibi",
        ),
        (["model.rope_scaling=ntk", "model.rope_factor=2", "model.n_heads=64"], "at least 4, got 128 / 64 = 2"),
        (["model.positions=sinusoidal", "model.d_model=3", "model.n_heads=3"], "even model.d_model, got 3"),
        (["model.soft_cap=30", "attention=fused"], "attention=fused has no soft cap, got model.soft_cap 30"),
        ("model.window=0", "model.window must be at least 1, got 0"),
        ("model.vocab_multiple=0", "model.vocab_multiple must be at least 1, got 0"),
        ("model.dropout=1", "below 1, got 1"),
        ("model.theta=1", "model.theta must be above 1, got 1.0"),
        ("model.soft_cap=inf", "model.soft_cap must be finite, got inf"),
        ("optimizer.lr=nan", "optimizer.lr must be a number, got nan"),
        ("steps=true", "steps must be a number, got true"),
        ("optimizer.betas=[0.9]", "two numbers"),
        ("optimizer.betas=[0.9,1.5]", "optimizer.betas must be below 1, got 1.5"),
        ("steps=0", "at least 1, got 0"),
        ("model.max_seq_len=64", "at most model.max_seq_len, got 128 and 64"),
        ("batch_tokens=1000", "batch_tokens must be a multiple of seq_len, got 1000"),
        ("micro_batch=7", "micro_batch must divide"),
        (["seq_len_warmup=0.5", "seq_len=126", "batch_tokens=1008"], "must be a multiple of 4, got 126"),
        ("micro_batch=much", "micro_batch must be auto or a number"),
        ("compile=perhaps", "compile must be auto, true or false"),
        ("schedule.warmup=1000000", "schedule.warmup must be below steps"),
        ("data=files", "data=files needs data.paths"),
        ("data=tokens", "data=tokens needs data.paths"),
        (["data=tokens", "data.paths=[a.ds]"], "needs the tokenizer that made them.*got bpe"),
        (["data=mixture", "data.corpora={a: 1}", "data.max_tokens=9"], "max_tokens has no effect with data=mixture"),
        ("tokenizer.vocab_size=256", "vocab_size must be at least 257, got 256"),
        (["tokenizer.vocab_size=260", "tokenizer.special=[a,b,c,d,e]"], "vocab_size must be at least 261, .* got 260"),
        ("data=mixture", "data=mixture needs data.corpora"),
        ("data=hub", "data=hub needs data.repo"),
        ("tokenizer=json", "tokenizer=json needs tokenizer.path"),
        ("tokenizer=saved", "tokenizer=saved needs tokenizer.path"),
        (["tokenizer=tiktoken", "tokenizer.encoding=null"], "needs tokenizer.encoding"),
        ("data.separator=''", "data.separator must have at least one character"),
        ("data.encoding_errors=ignore", "data.encoding_errors must be one of strict, replace, got ignore"),
        ("tokenizer.special=[]", "tokenizer.special must be different names"),
        (["tokenizer=chars", "tokenizer.parse_special=true"], "tokenizer=bpe, tiktoken or json, got chars: it has"),
        (["tokenizer=bytes", "tokenizer.parse_special=true"], "tokenizer=bpe, tiktoken or json, got bytes: it has"),
        (
            ["tokenizer=saved", "tokenizer.path=a", "tokenizer.parse_special=true"],
            "got saved: a saved one keeps its own setting",
        ),
        (
            ["tokenizer.parse_special=true", "tokenizer.special=[a,b,ab]"],
            "no name may start with another, got ab and a",
        ),
        ("steps=${nope}", "steps: Interpolation key nope not found"),
        ("model.d_ff=${oc.env:NOPE}", "model.d_ff: .*NOPE"),
        ("data.paths=['a','${nope}']", "data.paths.*: Interpolation key nope not found"),
        ("data.corpora=[1]", "data.corpora: "),
        (["data=mixture", "data.corpora={a: -1}"], "data.corpora must be above 0, got -1"),
        ("data.paths=['a\nb']", "data.paths must not be empty or contain control characters, got 'a.nb'"),
        ("sample.prompt='a\0b'", "sample.prompt must not contain the character NUL"),
        ("seed=18446744073709551616", "seed must be at most 4611686018427387904, got 18446744073709551616"),
        (["steps=1000000000000", "batch_tokens=128000000"], "steps x batch_tokens must be at most"),
        ("sample.temperature=1e-6", "sample.temperature must be 0, or at least 1e-5, got 1e-06"),
        ("tokenizer.special=['']", "tokenizer.special must be different names, at least one and none empty"),
        ("packing=rows", "packing must be one of stream, documents, got rows"),
        ("tokenizer.vocab_size=null", "needs tokenizer.vocab_size"),
    ],
)
def test_impossible_settings_are_refused_with_their_values(settings, override, message):
    with pytest.raises(ValueError, match=message):
        settings(*([override] if isinstance(override, str) else override))


@pytest.mark.parametrize(
    ("name", "words"),
    [("positions", SCHEMES), ("rope_scaling", SCALINGS), ("norm", NORMS), ("feed_forward", FEED_FORWARDS)],
)
def test_the_choices_of_the_settings_are_those_of_the_model(settings, name, words):
    (kind,) = (field.type for field in fields(ModelConfig) if field.name == name)
    assert {word for part in (kind, *get_args(kind)) for word in get_args(part) if isinstance(word, str)} == set(words)
    for word in words:
        factor = ["model.rope_factor=2"] if name == "rope_scaling" else []
        GPT(300, settings(f"model.{name}={word}", *factor).model)


def test_the_error_names_a_missing_setting(settings):
    with pytest.raises(ValueError, match="checkpoint is needed"):
        settings(config="generate", kind=Generate)


def test_parsing_does_not_change_the_composed_config(settings):
    composed = OmegaConf.create(asdict(settings()))
    before = OmegaConf.to_yaml(composed)
    parse(composed, Train)
    assert OmegaConf.to_yaml(composed) == before


SCHEMAS = {"train": Train, "generate": Generate, "evaluate": Evaluate, "prepare": Prepare, "lessons": Lessons}
SCHEMAS |= {"import_hf": ImportHF, "explain": Explain, "doctor": Doctor}
GIVEN = {"generate": ["checkpoint=a"], "evaluate": ["checkpoint=a"], "explain": ["checkpoint=a"]}
GIVEN |= {"import_hf": ["source=a", "target=b"]}
NUMBERS, TEXTS = [0, -1, 10**30, math.nan, math.inf, True, "", "word", [1]], ["", "a\0b", [1]]


def groups(cfg, kind: type):
    """Yields each group's composed values and its dataclass."""
    yield cfg, kind
    for field in fields(kind):
        if is_dataclass(field.type):
            yield from groups(cfg[field.name], field.type)


def inner(of_type) -> set[type]:
    arguments = get_args(of_type)
    return set().union(*map(inner, arguments)) if arguments else {of_type}


@pytest.mark.slow
@pytest.mark.parametrize("config", SCHEMAS)
def test_every_extreme_value_of_a_setting_is_in_range_or_refused_by_name(config):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose(config, overrides=GIVEN.get(config, []))
    OmegaConf.resolve(composed)
    refusals = 0
    for cfg, kind in [(composed, Doctor)] if config == "doctor" else groups(composed, SCHEMAS[config]):
        for field in fields(kind):
            if is_dataclass(field.type) or (kind is Doctor and field.name in {one.name for one in fields(Train)}):
                continue
            for value in NUMBERS if inner(field.type) & {int, float} else TEXTS:
                changed = copy.deepcopy(cfg)
                OmegaConf.update(changed, field.name, value, merge=False)
                try:
                    parsed = getattr(parse(changed, kind), field.name)
                except ValueError as refused:
                    assert "\n" not in str(refused) and field.name in str(refused), (field.name, value, str(refused))
                    refusals += 1
                    continue
                assert "\0" not in str(parsed), field.name
                assert parsed != "" or field.type not in (Name, PathName, Name | None, PathName | None), field.name
                assert not (isinstance(parsed, bool) and bool not in inner(field.type)), (field.name, value)
                if isinstance(parsed, int | float):
                    assert abs(parsed) <= (2**62 if isinstance(parsed, int) else 1e30), (field.name, value)
    assert refusals > 0


def test_every_number_has_an_upper_bound():
    def bounded(shape: dict) -> bool:
        parts = [*shape.get("anyOf", []), *(shape[name] for name in ("items", "additionalProperties") if name in shape)]
        bound = shape.get("type") not in ("integer", "number") or {"maximum", "exclusiveMaximum"} & shape.keys()
        return bool(bound) and all(bounded(part) for part in parts if isinstance(part, dict))

    for schema in SCHEMAS.values():
        shape = TypeAdapter(schema).json_schema()
        for group in (shape, *shape.get("$defs", {}).values()):
            for name, value in group["properties"].items():
                assert name == "micro_batch" or bounded(value), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "schema", "names"),
    [
        ("train", Train, ["resume"]),
        ("train", Train, ["init_from", "tokenizer.path", "data.wheel", "data.paths", "data.validation"]),
        ("generate", Generate, ["checkpoint", "prompt_file"]),
        ("generate", Generate, ["checkpoint", "prompts_file"]),
        ("evaluate", Evaluate, ["checkpoint", "json", "plot"]),
        ("explain", Explain, ["checkpoint", "json", "plot", "page"]),
        ("doctor", Doctor, ["checkpoint", "json"]),
        ("prepare", Prepare, ["export", "run"]),
        ("lessons", Lessons, ["checkpoint", "plot"]),
        ("import_hf", ImportHF, ["source", "target"]),
    ],
)
def test_every_path_setting_expands_the_home_folder(settings, monkeypatch, config, schema, names):
    monkeypatch.setenv("HOME", "/home/me")
    lists = ("data.paths", "data.validation")
    given = [f"{name}={['~/a', 'b'] if name in lists else repr('~/a')}" for name in names]
    given += ["report=true"] if schema is Evaluate else []
    parsed = OmegaConf.create(asdict(settings(*given, config=config, kind=schema)))
    for name in names:
        assert OmegaConf.select(parsed, name) == (["/home/me/a", "b"] if name in lists else "/home/me/a")


def test_paths_of_mixed_corpora_expand_the_home_folder(settings, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    composed = OmegaConf.create(asdict(settings("data=mixture", "data.corpora={a: 1}")))
    composed.data.corpora = {"~/a": 0.5, "b": 0.5}
    assert parse(composed, Train).data.corpora == {"/home/me/a": 0.5, "b": 0.5}


def test_the_length_of_a_run_is_given_in_steps_or_epochs(settings):
    assert (settings().steps, settings().epochs) == (2400, None)
    assert (settings("epochs=0.5").steps, settings("epochs=0.5").epochs) == (None, 0.5)
    for both in (["epochs=2", "steps=10"], ["steps=null"]):
        with pytest.raises(ValueError, match="as steps or as epochs"):
            settings(*both)
    for path in sorted((REPOSITORY / "conf" / "experiment").glob("*.yaml")):
        shape = ["seq_len=8", "batch_tokens=64", "model=nano", "tokenizer=bytes", "data.paths=[a]"]
        experiment = settings(f"experiment={path.stem}", *shape, "epochs=2")
        assert (experiment.steps, experiment.epochs) == (None, 2)
    for wrong in ("0", "-1", "inf", "nan", "1e30"):
        with pytest.raises(ValueError, match="epochs"):
            settings(f"epochs={wrong}")
    with pytest.raises(ValueError, match="dry_run=true reads no text, which epochs=2.0 would need: give steps"):
        settings("epochs=2", "dry_run=true")
