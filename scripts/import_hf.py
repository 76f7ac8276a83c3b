"""Turns a Llama in the Hugging Face layout into a checkpoint.  python -m scripts.import_hf source=DIR target=DIR"""

import json
import math
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from conf.entry import entry_point
from conf.schema import ImportHF
from data.tokenizer import JSONTokenizer
from model import GPT
from training import checkpoint

# what each matrix and gain is called there, and here; both pair RoPE's dimensions by halves, so rows need no permuting
NAMES = {
    r"model\.embed_tokens\.weight": "embedding.weight",
    r"model\.layers\.(\d+)\.input_layernorm\.weight": r"blocks.\1.attention_norm.gain",
    r"model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.weight": r"blocks.\1.attention.w\2.weight",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.weight": r"blocks.\1.feed_forward_norm.gain",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight": r"blocks.\1.feed_forward.\2.weight",
    r"model\.norm\.weight": "norm.gain",
    r"lm_head\.weight": "head.weight",
}
# settings of config.json that change the mathematics, with the values that GPT has
EXPECTED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
}


@entry_point("import_hf", ImportHF)
def main(cfg: ImportHF):
    target = import_llama(Path(cfg.source), Path(cfg.target))
    print(f"checkpoint  {target}")
    print(f"next        python -m scripts.generate checkpoint={target}")


def import_llama(source: Path, target: Path) -> Path:
    """Writes the step folder `target`, which must not exist. ValueError names what GPT cannot express."""
    if target.exists():
        raise ValueError(f"target {target} is there already: take another name")
    config = _json(source / "config.json")
    arguments, vocab_size = gpt_arguments(config), _number(config, "vocab_size", int)
    content = json.dumps(_json(source / "tokenizer.json"))
    tokenizer = JSONTokenizer(content, **_special_tokens(source, config))
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{source}: tokenizer.json has {tokenizer.vocab_size} tokens, config.json only {vocab_size}")

    model = GPT(tokenizer.vocab_size, **arguments)
    weights = gpt_weights(_read_weights(source), tied=model.arguments["tied"])
    for name in {"embedding.weight", "head.weight"} & set(weights):  # rows without a token are padding
        weights[name] = weights[name][: tokenizer.vocab_size]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{source} does not hold what its config.json says: {' '.join(str(error).split())}") from error
    about = {"step": 0, "seq_len": model.max_seq_len, "precision": "fp32", "imported": config}
    about["tokenizer_hash"] = tokenizer.fingerprint()
    weights, arguments = checkpoint.snapshot(model)
    checkpoint.save(target, weights, tokenizer.save, arguments | about)
    return target


def gpt_arguments(config: dict) -> dict:
    """What GPT is to be built with, but for vocab_size, from a Llama's config.json."""
    for name, expected in EXPECTED.items():
        if (found := config.get(name, expected)) != expected:
            raise ValueError(f"only {name}={expected} can be imported, got {found}")
    if "quantization_config" in config:
        raise ValueError("quantised weights cannot be imported: take the folder with the original ones")
    d_model, n_heads = _number(config, "hidden_size", int), _number(config, "num_attention_heads", int)
    if (found := config.get("head_dim") or d_model / n_heads) != d_model / n_heads:
        raise ValueError(f"head_dim must be hidden_size / num_attention_heads, got {found} and {d_model} / {n_heads}")
    return {
        "d_model": d_model,
        "n_layers": _number(config, "num_hidden_layers", int),
        "n_heads": n_heads,
        "n_kv_heads": _number(config, "num_key_value_heads", int, default=n_heads),
        "d_ff": _number(config, "intermediate_size", int),
        "norm_eps": _number(config, "rms_norm_eps", float),
        "tied": config.get("tie_word_embeddings", False),
        **_rope(config),
    }


def _number(config: dict, name: str, kind: type, default: float | None = None) -> int | float:
    """A positive number of a config, which may hold anything."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, (int, kind)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {name} must be a positive {kind.__name__}, got {value}")
    return value


def _rope(config: dict) -> dict:
    """max_seq_len and RoPE's arguments, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "yarn"):
        raise ValueError(f"RoPE of type {kind} cannot be imported: only default, linear and yarn")
    theta, reach = _number(rope, "rope_theta", float), _number(config, "max_position_embeddings", int)
    if kind == "default":
        return {"theta": theta, "max_seq_len": reach}
    factor = _number(rope, "factor", float)
    if kind == "yarn":
        for name, expected in YARN.items():
            if (found := rope.get(name)) not in (None, expected):
                raise ValueError(f"RoPE's {name} must be {expected}, got {found}")
        reach = round(_number(rope, "original_max_position_embeddings", int, default=reach) * factor)
    scaling = {"linear": "interpolation", "yarn": "yarn"}[kind]
    return {"theta": theta, "max_seq_len": reach, "rope_scaling": scaling, "rope_factor": factor}


def gpt_weights(theirs: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """The weights of a Llama under GPT's names, in float32."""
    ours = {}
    for name, tensor in theirs.items():
        if name.endswith("rotary_emb.inv_freq"):  # a table that old files carry
            continue
        pattern = next((pattern for pattern in NAMES if re.fullmatch(pattern, name)), None)
        if pattern is None:
            raise ValueError(f"a weight that a Llama does not have: {name}")
        ours[re.sub(pattern, NAMES[pattern], name)] = tensor.to(torch.float32)
    if tied and "embedding.weight" in ours:
        ours["head.weight"] = ours["embedding.weight"]
    return ours


def _read_weights(source: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, or of the files that an index names."""
    index = source / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
    weights = {}
    for name in names:
        try:
            weights |= load_file(source / name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{source / name} cannot be read: {error}") from error
    return weights


def _json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _special_tokens(source: Path, config: dict) -> dict:
    """`beginning` and `ends`, from generation_config.json or config.json."""
    generation = source / "generation_config.json"
    given = _json(generation) if generation.is_file() else {}

    def ids(name: str) -> list[int]:
        value = given.get(name, config.get(name))
        value = value if isinstance(value, list) else [value]
        if not value or not all(isinstance(id, int) for id in value):
            raise ValueError(f"{source}/config.json: {name} must be an id, got {value}")
        return value

    return {"beginning": ids("bos_token_id")[0], "ends": ids("eos_token_id")}


if __name__ == "__main__":
    main()
