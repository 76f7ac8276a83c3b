"""Turns a Llama in the Hugging Face format into a checkpoint.  python -m scripts.import_hf source=DIR target=DIR"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import TypedDict

from conf.entry import entry_point
from conf.scripts import ImportHF
from data.files import read_json
from data.tokenizer import JSONTokenizer
from model import GPT, ModelConfig
from model.positions import rope_frequencies
from training import checkpoint

# the names of the weights there and here; both pair RoPE's dimensions by halves, so no rows need permuting
NAMES = {
    r"model\.embed_tokens\.weight": "embedding.weight",
    r"model\.layers\.(\d+)\.input_layernorm\.weight": r"blocks.\1.attention_norm.weight",
    r"model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.weight": r"blocks.\1.attention.w\2.weight",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.weight": r"blocks.\1.feed_forward_norm.weight",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight": r"blocks.\1.feed_forward.\2.weight",
    r"model\.norm\.weight": "norm.weight",
    r"lm_head\.weight": "head.weight",
}
TABLES = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"  # RoPE's tables, which old files contain
# settings of config.json that change the mathematics, with the values that GPT supports; the first is the default
EXPECTED = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),  # Mistral's; its weights have the names of a Llama's
}
ROPE = {"partial_rotary_factor": (1.0, None)}
YARN = {
    "beta_fast": (32, None),
    "beta_slow": (1, None),
    "truncate": (True,),
    "attention_factor": (None,),
    "mscale": (None,),
    "mscale_all_dim": (None,),
}

Rope = dict[str, str | bool | int | float | None]  # no dict in it: not for each kind of layer its own


class Config(TypedDict, total=False):
    """config.json, as far as its values are not looked at one by one."""

    architectures: list[str] | None
    rope_parameters: Rope | None
    rope_scaling: Rope | None
    tie_word_embeddings: bool


class Index(TypedDict):
    weight_map: dict[str, str]


@entry_point("import_hf", ImportHF)
def main(cfg: ImportHF):
    target = import_llama(Path(cfg.source), Path(cfg.target))
    print(f"checkpoint  {target}")
    print(f"next        python -m scripts.generate checkpoint={target}")


def import_llama(source: Path, target: Path) -> Path:
    """Writes the step folder `target`, which must not exist. ValueError names what GPT cannot express."""
    if target.exists():
        raise ValueError(f"target {target} exists already: choose another name")
    config = read_json(source / "config.json", Config)
    arguments, vocab_size = gpt_arguments(config), _number(config, "vocab_size", int)
    content = json.dumps(read_json(source / "tokenizer.json", dict[str, Any]))
    tokenizer = JSONTokenizer(content, **_special_tokens(source, config))
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{source}: tokenizer.json has {tokenizer.vocab_size} tokens, config.json only {vocab_size}")

    files = weight_files(source)
    sizes = gpt_names({name: size for file in files for name, size in checkpoint.sizes(file).items()})
    if arguments["tied"]:  # its own file may have the matrix twice, see gpt_weights
        sizes.pop("head.weight", None)
    mismatch = f"{source} does not hold what its config.json says"
    checkpoint.check_arguments({"vocab_size": vocab_size, **arguments}, sizes, source, mismatch)
    theirs = [load_file(file) for file in files]
    weights = gpt_weights({name: tensor for file in theirs for name, tensor in file.items()}, arguments["tied"])
    for name in {"embedding.weight", "head.weight"} & set(weights):  # rows without a token are padding
        weights[name] = weights[name][: tokenizer.vocab_size]
    model = GPT(tokenizer.vocab_size, ModelConfig(**arguments))
    model.load_state_dict(weights)
    if (name := checkpoint.not_finite(model)) is not None:
        raise ValueError(f"{source}: {name} holds numbers that are not finite (NaN or infinity)")
    about = {"step": 0, "seq_len": model.max_seq_len, "precision": "fp32", "imported": config}
    about["tokenizer_hash"] = tokenizer.fingerprint()
    weights, arguments = checkpoint.snapshot(model)
    checkpoint.save(target, weights, tokenizer.save, arguments | about)
    return target


def gpt_arguments(config: dict) -> dict:
    """The arguments of GPT, except vocab_size, from a Llama's config.json, with transformers' defaults."""
    _check(config, EXPECTED, "config.json's")
    if config.get("quantization_config") is not None:
        raise ValueError("quantised weights cannot be imported: use the folder with the original ones")
    if "model_type" not in config and config.get("architectures") not in (None, ["LlamaForCausalLM"]):
        raise ValueError(f"only a LlamaForCausalLM can be imported, got architectures {config['architectures']}")
    d_model, n_heads = _number(config, "hidden_size", int), _number(config, "num_attention_heads", int)
    if (found := config.get("head_dim") or d_model / n_heads) != d_model / n_heads:
        raise ValueError(f"head_dim must be hidden_size / num_attention_heads, got {found} and {d_model} / {n_heads}")
    given = {name: value for name, value in config.items() if (name, value) != ("num_key_value_heads", None)}
    return {
        "d_model": d_model,
        "n_layers": _number(config, "num_hidden_layers", int),
        "n_heads": n_heads,
        "n_kv_heads": _number(given, "num_key_value_heads", int, default=n_heads),
        "d_ff": _number(config, "intermediate_size", int),
        "norm_eps": _number(config, "rms_norm_eps", float, default=1e-6),
        "tied": config.get("tie_word_embeddings", False),
        **_rope(config, d_model // n_heads),
    }


def _check(settings: dict, expected: dict[str, tuple], whose: str):
    for name, values in expected.items():
        found = settings.get(name, values[0])
        if not any(found == value and isinstance(found, bool) == isinstance(value, bool) for value in values):
            raise ValueError(f"{whose} {name} must be {values[0]} to be imported, got {found}")


def _number(config: dict, name: str, kind: type, default: float | None = None) -> int | float:
    """A positive number from a config; ValueError for anything else."""
    value = config.get(name, default)
    if not isinstance(value, (int, kind)) or isinstance(value, bool) or not 0 < value < 2**63:
        raise ValueError(f"config.json: {name} must be a positive {kind.__name__}, below 2**63, got {value}")
    return value


def _rope(config: dict, d_head: int) -> dict:
    """max_seq_len and RoPE's arguments, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4).

    Where a value is given twice, transformers' choice is followed: rope_scaling before rope_parameters, rope_theta in
    them before the one on top, but original_max_position_embeddings on top before the one in them.
    """
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= {name: config[name] for name in ROPE if name in config}
    rope |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "yarn"):
        raise ValueError(f"RoPE of type {kind} cannot be imported: only default, linear and yarn")
    _check(rope, ROPE, "RoPE's")
    theta = _number(rope, "rope_theta", float)
    reach = _number(config, "max_position_embeddings", int, default=2048)
    if kind == "default":
        return {"theta": theta, "max_seq_len": reach}
    factor = _number(rope, "factor", float)
    scaling = {"linear": "interpolation", "yarn": "yarn"}[kind]
    if kind == "yarn":
        _check(rope, YARN, "RoPE's")
        beside = "original_max_position_embeddings" in config
        trained = _number(config if beside else rope, "original_max_position_embeddings", int, default=reach)
        reach = max(1, round(trained * factor))
        lengths = reach, trained * factor
        rounded, exact = (rope_frequencies(theta, d_head, scaling, factor, length)[0] for length in lengths)
        if not torch.allclose(rounded, exact, rtol=1e-6, atol=0):
            raise ValueError(
                "only a RoPE whose original_max_position_embeddings * factor is a whole number can be imported, got "
                f"{trained} * {factor}"
            )
    return {"theta": theta, "max_seq_len": reach, "rope_scaling": scaling, "rope_factor": factor}


def gpt_names(theirs: dict[str, Any]) -> dict[str, Any]:
    """The entries of a Llama's state dict under GPT's names, without tables, which are not weights."""
    ours = {}
    for name, value in theirs.items():
        if re.fullmatch(TABLES, name):
            continue
        pattern = next((pattern for pattern in NAMES if re.fullmatch(pattern, name)), None)
        if pattern is None:
            raise ValueError(f"a Llama has no weight called {name}")
        ours[re.sub(pattern, NAMES[pattern], name)] = value
    return ours


def gpt_weights(theirs: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """The weights of a Llama under GPT's names, in float32."""
    ours = {name: tensor.to(torch.float32) for name, tensor in gpt_names(theirs).items()}
    if tied:
        embedding = ours["embedding.weight"]
        if not torch.equal(ours.setdefault("head.weight", embedding), embedding):
            raise ValueError(
                "config.json says tie_word_embeddings=true, but lm_head.weight is not model.embed_tokens.weight: "
                "set it to false to use lm_head.weight, or delete that from the file"
            )
    return ours


def weight_files(source: Path) -> list[Path]:
    """model.safetensors, or the files of an index. ValueError if there are both, or a weight is in two files."""
    whole, index = source / "model.safetensors", source / "model.safetensors.index.json"
    if not index.is_file():
        return [whole]
    if whole.is_file():
        raise ValueError(f"{source} holds its weights twice: delete {whole.name} or {index.name}")
    names = sorted(set(read_json(index, Index)["weight_map"].values()))
    seen: dict[str, str] = {}
    for file in names:
        if Path(file).name != file:
            raise ValueError(f"{index}: {file} is not in the same folder")
        for weight in checkpoint.sizes(source / file):
            if seen.setdefault(weight, file) != file:
                raise ValueError(f"{source}: {weight} is in {seen[weight]} and in {file}")
    return [source / file for file in names]


def _special_tokens(source: Path, config: dict) -> dict:
    """`bos_id` and `eos_ids`, from generation_config.json or config.json."""
    generation = source / "generation_config.json"
    given = read_json(generation, dict[str, Any]) if generation.is_file() else {}

    def ids(name: str) -> list[int]:
        value = given.get(name, config.get(name))
        value = value if isinstance(value, list) else [value]
        if not value or not all(type(id) is int for id in value):
            raise ValueError(f"{source}/config.json: {name} must be an id, got {value}")
        return value

    return {"bos_id": ids("bos_token_id")[0], "eos_ids": ids("eos_token_id")}


if __name__ == "__main__":
    main()
