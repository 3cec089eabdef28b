"""lm-eval's generation over completions and chats, and its log likelihoods, which equal those of transformers."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

COUNT = 3
TOLERANCE = 1e-4  # of sums of magnitude 50 in float32, whose last place is 4e-6, over at most nine tokens
TASK = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
"""
GENERATED = 'generation_kwargs: {until: ["."], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n'
ROLLED = "metric_list: [{metric: byte_perplexity}]\n"
CHOSEN = 'doc_to_choice: ["yes", "no"]\nmetric_list: [{metric: acc}]\n'


def run(name: str, model: str, path: str, *tasks: str, more: tuple[str, ...] = ()) -> bool:
    given = (
        f"model={os.environ['MODEL']},base_url={os.environ['BASE_URL']}{path},num_concurrent=2,max_retries=1"
    )
    given += f",tokenizer_backend=huggingface,tokenizer={os.environ['TOKENIZER']}"
    command = ["lm-eval", "run", "--model", model, "--model_args", given, "--tasks", ",".join(tasks)]
    command += ["--include_path", str(Path.cwd()), "--limit", str(COUNT), *more]
    command += ["--log_samples", "--output_path", name]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=280
    )
    why = " ".join(" ".join(ended.stdout.splitlines()[-4:]).split())
    good = ended.returncode == 0 and all(len(samples(name, task)) == COUNT for task in tasks)
    print(f"ok {name}" if good else f"failed {name}: {why[-400:]}", flush=True)
    return good


def samples(name: str, task: str) -> list[dict]:
    (file,) = Path(name).rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def compare() -> None:
    """lm-eval's log likelihoods with those of transformers for the same tokens."""
    tokenizer = AutoTokenizer.from_pretrained(os.environ["TOKENIZER"])
    pairs, said = [], []
    for task in ("chosen", "rolled"):
        for sample in samples("completions", task):
            for given, answer in zip(sample["arguments"].values(), sample["resps"], strict=True):
                pairs.append(tokens(tokenizer, *given.values()))
                said.append(answer[0] if isinstance(answer[0], list) else [answer[0], None])
    assert len(said) == 2 * COUNT + COUNT
    command = json.loads(os.environ["REFERENCE"])
    ended = subprocess.run(command, input=json.dumps(pairs), stdout=subprocess.PIPE, text=True, check=True)
    expected = json.loads(ended.stdout)
    for (value, greedy), (reference, most) in zip(said, expected, strict=True):
        assert math.isclose(float(value), reference, rel_tol=0, abs_tol=TOLERANCE), (said, expected)
        assert greedy is None or (str(greedy) == "True") == most, (said, expected)


def tokens(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str = "") -> list[list[int]]:
    """Of a context and what follows it; a text alone follows the token that begins texts."""
    if not continuation:
        return [[tokenizer.bos_token_id], tokenizer.encode(context, add_special_tokens=False)]
    first = tokenizer.encode(context, add_special_tokens=False)
    return [first, tokenizer.encode(context + continuation, add_special_tokens=False)[len(first) :]]


data = Path("data.jsonl").absolute()
rows = [{"question": f"Is {number} even?", "answer": number % 2} for number in range(COUNT)]
data.write_text("".join(json.dumps(row) + "\n" for row in rows))
for kind, task, more, target in (
    ("generate_until", "generated", GENERATED, '"{{answer}}"'),
    ("multiple_choice", "chosen", CHOSEN, "answer"),
    ("loglikelihood_rolling", "rolled", ROLLED, '"{{question}}"'),
):
    Path(f"{task}.yaml").write_text(TASK.format(task=task, data=data, kind=kind, target=target) + more)

if run("completions", "local-completions", "/v1/completions", "generated", "chosen", "rolled"):
    try:
        compare()
    except Exception as error:
        print(f"failed loglikelihood: {type(error).__name__}: {str(error)[:400]}", flush=True)
    else:
        print("ok loglikelihood", flush=True)
run("chat", "local-chat-completions", "/v1/chat/completions", "generated", more=("--apply_chat_template",))
