"""What unmodified clients of others sent to a cluster (`make clients`), sent once more to the router's HTTP endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, served
from tests.router.frontends.http.test_openai_tools import Formats, Gateway

RECORDED = Path(__file__).resolve().parents[3] / "clients" / "recorded"
FILES = sorted(RECORDED.glob("*.jsonl"))
REQUESTS = {file: [json.loads(line) for line in file.read_text().splitlines()] for file in FILES}


@pytest.fixture(scope="module")
def text() -> Iterator[ModelText]:
    made = ModelText(DEMO)
    yield made
    made.close()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_requests_of_a_client_are_accepted(file: Path, text: ModelText) -> None:
    requests = REQUESTS[file]
    gateway = Gateway(text, {}, Formats())
    async with served(gateway) as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
        for request in requests:
            answer = await client.post(request["path"], json={**request["body"], "model": "tiny"})
            refused = _refused(request)
            assert answer.status_code == (400 if refused else 200), (request, answer.text)
            assert refused in answer.text
    gateway.first.grammars.close()


def _refused(request: dict) -> str:
    """The field for which the router refuses the request, or nothing."""
    body = request["body"]
    if body.get("echo") and body.get("logprobs"):  # lm-eval's loglikelihood
        return "echo"
    # Instructor's RESPONSES_TOOLS asks for one schema twice
    return (
        "text.format"
        if "format" in body.get("text", {}) and isinstance(body.get("tool_choice"), dict)
        else ""
    )
