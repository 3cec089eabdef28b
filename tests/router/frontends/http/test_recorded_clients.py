"""What unmodified clients of others sent to a cluster (`make clients`), sent once more to the router's HTTP endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from router.request.completion import Delta
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, StubDispatcher, served
from tests.router.frontends.http.tool_stubs import Dispatcher, Formats, Gateway
from wire import common_pb2

CLIENTS = Path(__file__).resolve().parents[3] / "clients"
FILES = sorted((CLIENTS / "recorded").glob("*.jsonl"))
REQUESTS = {file: [json.loads(line) for line in file.read_text().splitlines()] for file in FILES}


class ScoringDispatcher(StubDispatcher):
    """Has log probabilities of the prompt's tokens before its answer of one token."""

    def __init__(self, completion, first):
        super().__init__(completion, first)
        self._prompt = completion.prompt_tokens

    def start(self, deltas):
        for position, token_id in enumerate(self._prompt[1:], 1):
            token = common_pb2.Token(position=position, token_id=token_id, logprob=-1.0, rank=1)
            deltas.add(Delta(self._first, "", (), prompt=(token,)))
        super().start(deltas)


class ScoringGateway(Gateway):
    def dispatcher(self, completion, first_shown):
        made = ScoringDispatcher if completion.sampling.prompt_logprobs else Dispatcher
        return made(completion, first_shown)


@pytest.fixture(scope="module")
def text() -> Iterator[ModelText]:
    made = ModelText(DEMO)
    yield made
    made.close()


def test_every_client_has_a_recording_and_a_lock() -> None:
    scripts = {file.stem for file in (CLIENTS / "scripts").glob("*.py")}
    assert scripts == {file.stem for file in FILES} == {file.stem for file in CLIENTS.glob("*.txt")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_requests_of_a_client_are_accepted(file: Path, text: ModelText) -> None:
    requests = REQUESTS[file]
    gateway = ScoringGateway(text, {}, Formats())
    async with served(gateway) as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
        for request in requests:
            answer = await client.post(request["path"], json={**request["body"], "model": "tiny"})
            assert answer.status_code == 200, (request, answer.text)
    gateway.first.grammars.close()
