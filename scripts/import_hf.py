"""Turns a Llama in the Hugging Face layout into a checkpoint.  python -m scripts.import_hf source=DIR target=DIR"""

import json
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
    tokenizer = JSONTokenizer(json.dumps(_json(source / "tokenizer.json")), **_special_tokens(source, config))
    try:
        vocab_size, arguments = config["vocab_size"], gpt_arguments(config)
    except KeyError as error:
        raise ValueError(f"{source}/config.json does not say {error}") from error
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{source}: tokenizer.json has {tokenizer.vocab_size} tokens, config.json only {vocab_size}")

    model = GPT(tokenizer.vocab_size, **arguments)
    weights = gpt_weights(_read_weights(source), tied=model.arguments["tied"])
    for name in ("embedding.weight", "head.weight"):  # rows without a token are padding
        weights[name] = weights[name][: tokenizer.vocab_size]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{source} does not hold what its config.json says: {' '.join(str(error).split())}") from error
    about = {"step": 0, "seq_len": model.max_seq_len, "precision": "fp32", "imported": config}
    checkpoint.save(target, model, tokenizer.save, about)
    return target


def gpt_arguments(config: dict) -> dict:
    """What GPT is to be built with, but for vocab_size, from a Llama's config.json."""
    for name, expected in EXPECTED.items():
        if (found := config.get(name, expected)) != expected:
            raise ValueError(f"only {name}={expected} can be imported, got {found}")
    width = config["hidden_size"] / config["num_attention_heads"]
    if (config.get("head_dim") or width) != width:
        raise ValueError(
            f"head_dim must be hidden_size / num_attention_heads, got {config['head_dim']} "
            f"and {config['hidden_size']} / {config['num_attention_heads']}"
        )
    return {
        "d_model": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config.get("num_key_value_heads"),
        "d_ff": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "tied": config.get("tie_word_embeddings", False),
        **_rope(config),
    }


def _rope(config: dict) -> dict:
    """max_seq_len and RoPE's arguments, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "yarn"):
        raise ValueError(f"RoPE of type {kind} cannot be imported: only default, linear and yarn")
    reach = config["max_position_embeddings"]
    if kind == "default":
        return {"theta": rope["rope_theta"], "max_seq_len": reach}
    factor = rope["factor"]
    if kind == "yarn":
        for name, expected in YARN.items():
            if (found := rope.get(name)) not in (None, expected):
                raise ValueError(f"RoPE's {name} must be {expected}, got {found}")
        reach = round((rope.get("original_max_position_embeddings") or reach) * factor)
    scaling = {"linear": "interpolation", "yarn": "yarn"}[kind]
    return {"theta": rope["rope_theta"], "max_seq_len": reach, "rope_scaling": scaling, "rope_factor": factor}


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
    if tied:
        ours["head.weight"] = ours["embedding.weight"]
    return ours


def _read_weights(source: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, or of the files that an index names."""
    index = source / "model.safetensors.index.json"
    names = sorted(set(_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    weights = {}
    for name in names:
        try:
            weights |= load_file(source / name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{source / name} cannot be read: {error}") from error
    return weights


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _special_tokens(source: Path, config: dict) -> dict[str, int]:
    """The ids before and after a text, from generation_config.json or config.json."""
    generation = source / "generation_config.json"
    given = _json(generation) if generation.is_file() else {}
    ids = {}
    for ours, theirs in (("beginning", "bos_token_id"), ("end_of_text", "eos_token_id")):
        value = given.get(theirs, config.get(theirs))
        if value is None:
            raise ValueError(f"{source}/config.json has no {theirs}")
        ids[ours] = value[0] if isinstance(value, list) else value
    return ids


if __name__ == "__main__":
    main()
