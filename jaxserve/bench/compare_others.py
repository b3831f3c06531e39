"""The other sides of `bench compare`, each in a process of its own: Hugging Face transformers on
PyTorch, and llama.cpp.

Run as a file by a Python that has their packages: it imports nothing of jaxserve. Without arguments
it prints the sides that it has. With a side, a model folder and a dtype it prints versions; then,
for every line of standard input, `{"prompts": [[id, …], …], "tokens": n}` with prompts of one
length, generates n greedy tokens of each and prints `{"seconds": …, "tokens": [[id, …], …]}`.
"""

import functools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]
_BATCH = 2048
"""Tokens that llama.cpp is given at a time."""


def main(side: str = "", folder: str = "", dtype: str = "") -> None:
    """Answers until standard input ends; or prints the sides."""
    if not side:
        print(*(name for name, (_, needed) in SIDES.items() if all(map(find_spec, needed))))
        return
    said, generate = SIDES[side][0](folder, dtype)
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        tokens = generate(asked["prompts"], asked["tokens"])
        answer = {"seconds": time.perf_counter() - start, "tokens": tokens}
        print(json.dumps(answer), flush=True)


def with_transformers(folder: str, dtype: str) -> tuple[dict[str, Any], Generate]:
    """Loads the model with transformers, which computes in the dtype."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return found[:, ids.shape[1] :].tolist()

    return {"torch": torch.__version__, "transformers": transformers.__version__}, generate


def with_llama_cpp(folder: str, dtype: str) -> tuple[dict[str, Any], Generate]:
    """Loads the model with llama.cpp, which keeps the tensors as they are stored."""
    import llama_cpp as llama
    import numpy as np

    llama.llama_log_set(_quiet(llama.llama_log_callback), None)
    llama.llama_backend_init()
    with tempfile.TemporaryDirectory(prefix="jaxserve-gguf-") as made:
        path = Path(made, "model.gguf")
        write_gguf(Path(folder), path)
        model = llama.llama_model_load_from_file(
            str(path).encode(), llama.llama_model_default_params()
        )
    if not model:
        raise SystemExit("llama.cpp does not load the model")
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    @functools.lru_cache(maxsize=1)
    def context(sequences: int, length: int) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * -(-length // 256) * 256, sequences
        params.n_batch = _BATCH
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        return llama.llama_init_from_model(model, params)

    def run(there: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes rows of (token, position, sequence, whether its next token is wanted)."""
        batch = llama.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if llama.llama_decode(there, batch) != 0:
            raise RuntimeError("llama_decode failed")
        last = (row for row, one in enumerate(rows) if one[3])
        logits = (llama.llama_get_logits_ith(there, row) for row in last)
        best = [int(np.ctypeslib.as_array(one, (vocab,)).argmax()) for one in logits]
        llama.llama_batch_free(batch)
        return best

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        length = len(prompts[0])
        there = context(len(prompts), length + tokens)
        llama.llama_memory_clear(llama.llama_get_memory(there), True)
        rows = [
            (token, position, sequence, position == length - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        best = []
        for start in range(0, len(rows), _BATCH):
            best += run(there, rows[start : start + _BATCH])
        found = [best]
        for position in range(length, length + tokens - 1):
            best = run(there, [(token, position, i, True) for i, token in enumerate(best)])
            found.append(best)
        return [list(one) for one in zip(*found, strict=True)]

    return {"llama_cpp": llama.__version__}, generate


@functools.cache
def _quiet(callback: Any) -> Any:
    """Returns a receiver of messages that drops them, which lives as long as the process."""
    return callback(lambda level, text, data: None)


def write_gguf(folder: Path, path: Path) -> None:
    """Writes a Qwen3-MoE folder as llama.cpp reads it, without a tokenizer; routers and norms in
    FP32, as its own converter does."""
    import gguf
    import numpy as np

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, name in KEYS.items():
        getattr(writer, f"add_{key}")(config[name])
    writer.add_tokenizer_model("none")
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config["num_hidden_layers"])
    experts: dict[str, list[Any]] = {}
    for name, tensor in _tensors(folder):
        joined = re.sub(r"experts\.\d+\.", "experts.", name)
        narrow = tensor.itemsize == 2 and tensor.ndim > 1 and not name.endswith("mlp.gate.weight")
        if narrow:
            tensor = tensor.view(np.uint8)
        elif tensor.itemsize == 2:
            tensor = (tensor.astype(np.uint32) << 16).view(np.float32)
        own = experts.setdefault(joined, [])
        own.append(tensor)
        if joined != name and len(own) < config["num_experts"]:
            continue
        kind = gguf.GGMLQuantizationType.BF16 if narrow else None
        data = np.stack(own) if joined != name else own[0]
        writer.add_tensor(known.get_name(joined, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KEYS = {
    "vocab_size": "vocab_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps",
    "rope_freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Methods of a writer of GGUF files, and the keys of config.json."""


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Reads the tensors of a folder, BF16 as 16-bit integers; experts of a matrix in order."""
    import numpy as np

    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        start = 8 + int.from_bytes(bytes(data[:8]), "little")
        tree = json.loads(bytes(data[8:start]))
        tree.pop("__metadata__", None)
        for name in sorted(tree, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
            first, last = tree[name]["data_offsets"]
            found = data[start + first : start + last]
            found = found.view({"BF16": np.uint16, "F32": np.float32}[tree[name]["dtype"]])
            yield name, found.reshape(tree[name]["shape"])


SIDES = {
    "transformers": (with_transformers, ("torch", "transformers")),
    "llama.cpp": (with_llama_cpp, ("llama_cpp", "gguf")),
}
"""Sides, each with the packages that it needs."""

if __name__ == "__main__":
    main(*sys.argv[1:])
