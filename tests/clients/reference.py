"""Log probabilities of continuations by transformers: `python reference.py MODEL`, lists of token ids on stdin.

stdin: JSON, a list of [context ids, continuation ids]. stdout: JSON, for each the sum of the continuation's log
probabilities (natural, float32), and whether each of its tokens is the most probable one.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    said = []
    with torch.inference_mode():
        for context, continuation in json.load(sys.stdin):
            logits = model(torch.tensor([context + continuation])).logits[0]
            logprobs = logits[len(context) - 1 : -1].log_softmax(-1)
            chosen = torch.tensor(continuation)
            total = logprobs.gather(-1, chosen[:, None]).sum().item()
            said.append([total, bool((logprobs.argmax(-1) == chosen).all())])
    print(json.dumps(said))


if __name__ == "__main__":
    main()
