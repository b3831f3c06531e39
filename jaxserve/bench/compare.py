"""A model folder that nobody has tuned anything for, beside Hugging Face transformers on this CPU.

`python -m jaxserve.bench compare`: both generate the same greedy tokens in FP32, at 1, 8 and 32
sequences, in processes of their own that take turns. Ours is `LLM(folder)` with the sizes that it
chooses. Transformers is optional: `--python` names an interpreter that has it and PyTorch, and
without one only ours is measured. The model is `--model`, or 110 M of random weights.

The folder's tensors are BF16, as models are published. Transformers is asked for FP32 and makes
FP32 weights of them when it loads; ours keep them and convert in the products, so both compute the
same sums, and their texts are compared. `--stored float32` writes FP32 tensors: then both keep, and
read, four bytes a weight.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve.bench import compare_transformers
from jaxserve.bench.report import Measure, Part, Report, conclude, describe_machine, table
from jaxserve.bench.report import this_machine as machine_now
from jaxserve.bench.workers import BenchError

SEQUENCES = {1: 1.0, 8: 1.0, 32: 2.0}
"""Of a batch, and what ours is to be of transformers' tokens a second."""
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 64
ROUNDS = 5
STORED = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
START_SECONDS = 300.0

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 24,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
"""Qwen3-MoE, 119 M parameters of which a token meets 42 M beside its row of the embedding."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the bench."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--quick", action="store_true", help="few tokens: a smoke test")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model folder (random weights)")
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="FILE",
        help="a Python with PyTorch and transformers (this one, if it has them)",
    )
    parser.add_argument(
        "--stored",
        choices=STORED,
        default="bfloat16",
        help="dtype of the random weights' tensors (bfloat16)",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each batch ({ROUNDS})")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of our deployment"
    )


def run(options: argparse.Namespace) -> int:
    """Measures both sides; 1 if a target is missed."""
    machine = machine_now()
    print(describe_machine(machine), flush=True)
    with tempfile.TemporaryDirectory(prefix="jaxserve-compare-") as made:
        folder = options.model or write_model(Path(made), options.stored)
        part = measure(folder, options)
    print(f"\n{table(part)}", flush=True)
    return conclude(Report("compare", options.quick, machine, [part]), options.json)


def measure(folder: Path, options: argparse.Namespace) -> Part:
    """Runs both sides in turns.

    Raises:
      BenchError: a side died, or transformers is asked for and missing.
    """
    tokens, rounds = (8, 1) if options.quick else (OUTPUT_TOKENS, options.rounds)
    ours = [sys.executable, "-m", "jaxserve.bench.compare", str(folder), *options.set]
    theirs = [options.python, compare_transformers.__file__, str(folder)]
    with_theirs = has_transformers(options.python)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    found: dict[str, Any] = {}
    with (
        contextmanager(_side)(ours) as us,
        contextmanager(_side)(theirs if with_theirs else None) as them,
    ):
        for sequences in SEQUENCES:
            found[str(sequences)] = _rounds(us, them, sequences, tokens, rounds, vocab)
        found["ours"], found["transformers"] = us.said, None if them is None else them.said
    stored = json.loads((folder / "config.json").read_text()).get("torch_dtype", "dtype not said")
    return part_of(found, tokens, stored)


def part_of(found: dict[str, Any], tokens: int, stored: str) -> Part:
    """A report of the seconds of every round.

    Args:
      stored: what the folder says of its tensors.
    """
    measures, notes = [], []
    for sequences, target in SEQUENCES.items():
        rounds = found[str(sequences)]
        all_tokens = sequences * tokens
        best = all_tokens / min(rounds["ours"])
        measures.append(Measure(f"ours, {sequences} sequences", best, "tokens/s"))
        if rounds["transformers"]:
            theirs = all_tokens / min(rounds["transformers"])
            pairs = zip(rounds["transformers"], rounds["ours"], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            measures.append(Measure("  transformers", theirs, "tokens/s"))
            measures.append(
                Measure("  ours ÷ transformers, median", ratio, "", target, "more"),
            )
            notes.append(
                f"{sequences} sequences: {rounds['same']:.1%} of the texts' tokens are the same up "
                "to the first that differs"
            )
    started = found["ours"]["seconds"]
    measures.append(Measure("our start, load and compile", started, "s"))
    said = found["transformers"]
    other = f"torch {said['torch']}, transformers {said['transformers']}" if said else "none here"
    notes += [
        f"{PROMPT_TOKENS} prompt tokens and {tokens} greedy tokens each, FP32, tensors {stored}; "
        f"tokens/s of the "
        f"best of {len(found['1']['ours'])} rounds; the other side: {other}",
        f"ours: {found['ours']['sizes']}",
    ]
    return Part("compare", "LLM(folder) beside transformers", measures, notes, dict(found))


def has_transformers(python: str) -> bool:
    """Whether an interpreter has both packages."""
    seek = "import importlib.util as u; raise SystemExit(not(u.find_spec('torch') and "
    seek += "u.find_spec('transformers')))"
    try:
        return subprocess.run([python, "-c", seek], timeout=60, check=False).returncode == 0
    except OSError as error:
        raise BenchError(f"--python {python}: {error.strerror}") from None


def write_model(folder: Path, stored: str) -> Path:
    """A folder of `CONFIG` with random weights and no tokenizer, as `transformers` would write.

    Args:
      stored: dtype of all tensors, of `STORED`.
    """
    draw, config, dtype = np.random.default_rng(0), CONFIG | {"torch_dtype": stored}, STORED[stored]
    d, layers, experts = (
        config[key] for key in ("hidden_size", "num_hidden_layers", "num_experts")
    )
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    width, head = config["moe_intermediate_size"], config["head_dim"]
    matrices = {
        "model.embed_tokens": (config["vocab_size"], d),
        "lm_head": (config["vocab_size"], d),
    }
    norms = {"model.norm": d}
    for layer in range(layers):
        own = f"model.layers.{layer}"
        norms |= {f"{own}.input_layernorm": d, f"{own}.post_attention_layernorm": d}
        norms |= {f"{own}.self_attn.q_norm": head, f"{own}.self_attn.k_norm": head}
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            matrices[f"{own}.self_attn.{name}_proj"] = (rows, d)
        matrices[f"{own}.self_attn.o_proj"] = (d, queries)
        matrices[f"{own}.mlp.gate"] = (experts, d)
        for expert in range(experts):
            one = f"{own}.mlp.experts.{expert}"
            matrices |= {f"{one}.gate_proj": (width, d), f"{one}.up_proj": (width, d)}
            matrices[f"{one}.down_proj"] = (d, width)
    tensors = {
        f"{name}.weight": draw.normal(0, shape[1] ** -0.5, shape).astype(dtype)
        for name, shape in matrices.items()
    }
    tensors |= {f"{name}.weight": np.ones(size, dtype) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


class Side:
    """A process that generates; `said` is its first line."""

    def __init__(self, process: "subprocess.Popen[str]", name: str):
        self._process, self._name = process, name
        self.said = self._line()

    def __call__(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of every prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._line()
        return answer["seconds"], answer["tokens"]

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self._name} died: see above")
        return json.loads(line)


def _side(command: Sequence[str] | None) -> Iterator[Any]:
    if command is None:
        yield None
        return
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Side(process, command[1] if command[1] != "-m" else command[2])
    finally:
        process.kill()
        process.communicate()


def _rounds(
    us: Side, them: Side | None, sequences: int, tokens: int, rounds: int, vocab: int
) -> dict[str, Any]:
    """Seconds of every round of both, in turns, after one that warms up."""
    found: dict[str, Any] = {"ours": [], "transformers": []}
    same = total = 0
    for number in range(rounds + 1):
        draw = random.Random(f"{sequences} {number}")
        prompts = [[draw.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(sequences)]
        seconds, ids = us(prompts, tokens)
        if number:
            found["ours"].append(seconds)
        if them is None:
            continue
        seconds, others = them(prompts, tokens)
        if number:
            found["transformers"].append(seconds)
        for mine, other in zip(ids, others, strict=True):
            total += tokens
            same += next(
                (i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), tokens
            )
    return found | {"same": same / total if total else 1.0}


def _main(folder: str, overrides: Sequence[str]) -> None:
    """Our side, in its own process."""
    from jaxserve.engine.request import SamplingParams
    from jaxserve.llm import LLM

    start = time.perf_counter()
    with LLM(folder, overrides) as llm:
        limits = llm.deployment.scheduler
        said = {
            "seconds": time.perf_counter() - start,
            "sizes": f"{llm.deployment.mode}, {limits.slots} slots, steps of "
            f"{limits.token_buckets} tokens, {llm.deployment.cache.pages} pages",
        }
        print(json.dumps(said), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            params = SamplingParams(max_tokens=asked["tokens"], temperature=0.0, ignore_eos=True)
            start = time.perf_counter()
            outputs = llm.generate(asked["prompts"], params)
            seconds = time.perf_counter() - start
            answer = {"seconds": seconds, "tokens": [output.token_ids for output in outputs]}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
