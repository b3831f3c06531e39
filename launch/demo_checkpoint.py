"""The demo checkpoint's folder: names and orientation of Hugging Face's Step-3, weights in BF16.

Called by `train_demo.py` and `demo_evaluation.py`. The modules' matrices are [in, out]; those of
the file are [out, in].
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import demo_data
import jax.numpy as jnp
import ml_dtypes  # also teaches safetensors' NumPy reader the BF16 type
import numpy as np
from demo_model import DemoConfig, DemoModel
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

SIZE_LIMIT = 18_500_000  # bytes of the whole folder


def checkpoint_name(path: tuple, layers: int) -> str:
    """The Hugging Face Step-3 name of a parameter, from its path in the module tree."""
    parts = [str(part) for part in path]
    if parts[-1] == "weight":
        parts.pop()
    if parts[0] == "predictions":
        layer, part = str(layers + int(parts[1])), parts[2]
        if part == "decoder":
            parts = ["layers", layer, *parts[3:]]
        elif part == "norm":
            parts = ["layers", layer, "shared_head", "norm"]
        else:
            parts = ["layers", layer, *parts[2:]]
    prefix = "" if parts[0] == "lm_head" else "model."
    return f"{prefix}{'.'.join(parts)}.weight"


def checkpoint_entries(model: DemoModel) -> Iterator[tuple[str, nnx.Param, bool]]:
    """Yields (checkpoint name, parameter, whether its last two axes are swapped in the file)."""
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        transposed = parameter.ndim >= 2 and path[-1] != "embed_tokens"
        yield checkpoint_name(path, model.config.num_hidden_layers), parameter, transposed


def save_weights(model: DemoModel, path: Path) -> None:
    """Writes all parameters in BF16, replacing the file in one step."""
    tensors = {}
    for name, parameter, transposed in checkpoint_entries(model):
        value = np.asarray(parameter[...])
        value = np.swapaxes(value, -1, -2) if transposed else value
        tensors[name] = np.ascontiguousarray(value).astype(ml_dtypes.bfloat16)
    temporary = path.with_name(path.name + ".new")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    os.replace(temporary, path)


def load_model(folder: Path) -> DemoModel:
    """Reads a checkpoint folder into an FP32 model.

    Raises ValueError if the file's names or shapes are not exactly the model's.
    """
    known = DemoConfig.__dataclass_fields__
    values = json.loads((folder / "config.json").read_text())
    config = DemoConfig(**{key: value for key, value in values.items() if key in known})
    model = nnx.eval_shape(lambda: DemoModel(config, nnx.Rngs(0)))
    tensors = load_file(folder / "model.safetensors")
    loaded = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = checkpoint_name(path, config.num_hidden_layers)
        if name not in tensors:
            raise ValueError(f"{folder}: tensor {name} is missing")
        value = tensors.pop(name).astype(np.float32)
        if parameter.ndim >= 2 and path[-1] != "embed_tokens":
            value = np.swapaxes(value, -1, -2)
        if value.shape != parameter.shape:
            raise ValueError(f"{folder}: {name} has shape {value.shape}, not {parameter.shape}")
        loaded[path] = parameter.replace(jnp.asarray(value))
    if tensors:
        raise ValueError(f"{folder}: unknown tensors {sorted(tensors)}")
    nnx.update(model, nnx.from_flat_state(loaded))
    return model


def hugging_face_config(config: DemoConfig, begin: int, end: int) -> dict:
    """The content of `config.json`."""
    return {
        "architectures": ["Step3ForCausalLM"],
        "model_type": "step3_text",
        **asdict(config),
        "max_seq_len": config.max_position_embedding,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": begin,
        "eos_token_id": end,
        "torch_dtype": "bfloat16",
    }


def save_description(
    config: DemoConfig, tokenizer: Tokenizer, held_out: Iterable[str], folder: Path
) -> None:
    """Writes everything but the weights: the tokenizer, the JSON files around it, and the names of
    the files that the model has not seen."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, end = demo_data.special_ids(tokenizer)
    contents = {
        "config.json": hugging_face_config(config, begin, end),
        "generation_config.json": {"bos_token_id": begin, "eos_token_id": end},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": demo_data.BEGIN,
            "eos_token": demo_data.END,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embedding,
        },
    }
    (folder / "held_out.txt").write_text("".join(f"{name}\n" for name in held_out))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"no {path}; run `train_demo.py initialise` first")
    return Tokenizer.from_file(str(path))


def print_size(folder: Path) -> None:
    """Prints the folder's bytes. Raises ValueError if they are too many."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size:,} bytes")
    if size > SIZE_LIMIT:
        raise ValueError(f"{folder} has {size:,} bytes, more than {SIZE_LIMIT:,}")
