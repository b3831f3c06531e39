"""The other side of `bench compare`: Hugging Face transformers on PyTorch, a process of its own.

Run as a file with a model folder and a dtype, by a Python that has both: it imports nothing of
jaxserve. Prints versions; then, for every line of standard input, `{"prompts": [[id, …], …],
"tokens": n}` with prompts of one length, generates n greedy tokens of each and prints
`{"seconds": …, "tokens": [[id, …], …]}`.
"""

import json
import sys
import time


def main(folder: str, dtype: str) -> None:
    """Answers until standard input ends."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    said = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, tokens = torch.tensor(asked["prompts"]), asked["tokens"]
        start = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds, "tokens": found[:, prompts.shape[1] :].tolist()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
