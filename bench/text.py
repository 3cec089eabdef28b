"""`python -m bench.text`: processor time of a router's text, with the demo model's tokenizer.

Tokens to text: the window that the tokenizer decodes again, the table, and the tokenizers library's own stream.
Text to tokens: prompts of 2,000 characters as a whole, and by pieces of which none, all but the end, or all came before.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from loadgen.words import words
from router.text.byte_table import make_byte_table
from router.text.detokenize import Detokenizer
from router.text.stop import StopMatcher, StopStrings
from router.text.tokenized_pieces import make_piece_tokenizer

MODEL = Path(__file__).resolve().parents[1] / "demo" / "model" / "tokenizer.json"
CHARACTERS = 2_000
NEW_CHARACTERS = 100  # of a prompt of which all but the end came before
ROUNDS = 41
SPLIT = "\u4e16\u754c\u4f60\u597d \U0001f642 caf\u00e9 " * 60  # characters of several tokens each
STOPS = ["\n\n\n", "###", "User:", "</answer>"]


def main() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL))
    source = random.Random(0)
    table = Table("", "µs", title="Processor time, medians")
    prompt = words(source, CHARACTERS)[:CHARACTERS]
    for name, text in (("words", prompt), ("split characters", SPLIT)):
        for kind, seconds in _detokenising(tokenizer, text):
            table.add_row(f"a token to text, {name}: {kind}", f"{seconds * 1e6:.3f}")
    matcher = StopStrings(STOPS)
    pieces = [prompt[at : at + 4] for at in range(0, CHARACTERS, 4)]
    seconds = _median(lambda: _feed(StopMatcher(matcher).add, pieces)) / len(pieces)
    table.add_row(f"a token's text by {len(STOPS)} stop strings", f"{seconds * 1e6:.3f}")
    for kind, seconds in _tokenising(tokenizer, source):
        table.add_row(f"{CHARACTERS} characters to tokens: {kind}", f"{seconds * 1e6:.1f}")
    Console().print(table)


def _detokenising(tokenizer: Tokenizer, text: str) -> Iterator[tuple[str, float]]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    table = make_byte_table(tokenizer)
    assert table is not None

    def stream() -> Callable[[int], str | None]:
        made = DecodeStream(skip_special_tokens=True)
        return lambda token_id: made.step(tokenizer, token_id)

    kinds: dict[str, Callable[[], Callable[[int], str | None]]] = {
        "window": lambda: Detokenizer(tokenizer, [], table.special).add,
        "DecodeStream": stream,
        "table": lambda: table.detokenizer().add,
    }
    for kind, make in kinds.items():
        yield kind, _median(lambda make=make: _feed(make(), ids)) / len(ids)


def _tokenising(tokenizer: Tokenizer, source: random.Random) -> Iterator[tuple[str, float]]:
    by_pieces = make_piece_tokenizer(tokenizer, 64 << 20)
    assert by_pieces is not None
    known = words(source, CHARACTERS)[:CHARACTERS]
    number = count()

    def new(characters: int) -> str:
        return words(random.Random(next(number)), characters)[:characters]

    def encode(text: str) -> None:
        by_pieces.complete(by_pieces.look_up("", text), special=False)

    encode(known)
    yield "whole", _median(lambda text: tokenizer.encode_batch_fast([text])[0].ids, lambda: new(CHARACTERS))
    yield "pieces, all new", _median(encode, lambda: new(CHARACTERS))
    yield (
        f"pieces, {NEW_CHARACTERS} characters new",
        _median(encode, lambda: known[:-NEW_CHARACTERS] + new(NEW_CHARACTERS)),
    )
    yield "pieces, none new", _median(encode, lambda: known)


def _feed(add: Callable[..., object], given: list[int] | list[str]) -> None:
    for one in given:
        add(one)


def _median(function: Callable[..., object], prepare: Callable[[], str] | None = None) -> float:
    seconds = []
    for _ in range(ROUNDS):
        arguments = () if prepare is None else (prepare(),)
        began = time.process_time()
        function(*arguments)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
