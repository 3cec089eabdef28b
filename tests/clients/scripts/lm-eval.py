"""lm-eval's generation over completions and chats, and its log probabilities of given texts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

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
CHOSEN = 'doc_to_choice: ["yes", "no"]\nmetric_list: [{metric: acc}]\n'


def run(name: str, model: str, path: str, task: str, *more: str) -> None:
    given = (
        f"model={os.environ['MODEL']},base_url={os.environ['BASE_URL']}{path},num_concurrent=2,max_retries=1"
    )
    given += f",tokenizer_backend=huggingface,tokenizer={os.environ['TOKENIZER']}"
    command = ["lm-eval", "run", "--model", model, "--model_args", given, "--tasks", task]
    command += ["--include_path", str(Path.cwd()), "--limit", "3", *more]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=150
    )
    why = " ".join(" ".join(ended.stdout.splitlines()[-4:]).split())
    print(f"ok {name}" if ended.returncode == 0 else f"failed {name}: {why[-400:]}", flush=True)


data = Path("data.jsonl").absolute()
data.write_text("".join(json.dumps({"question": f"Is {i} even?", "answer": i % 2}) + "\n" for i in range(3)))
for kind, task, more, target in (
    ("generate_until", "generated", GENERATED, '"{{answer}}"'),
    ("multiple_choice", "chosen", CHOSEN, "answer"),
):
    Path(f"{task}.yaml").write_text(TASK.format(task=task, data=data, kind=kind, target=target) + more)

run("completions", "local-completions", "/v1/completions", "generated")
run("chat", "local-chat-completions", "/v1/chat/completions", "generated", "--apply_chat_template")
run("loglikelihood", "local-completions", "/v1/completions", "chosen")
