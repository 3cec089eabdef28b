"""Requests of clients: nearly valid ones, field by field, and arbitrary ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Anything = st.SearchStrategy[Any]

numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(-5, 70),
    st.floats(),
    st.sampled_from([0, 1, -1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 1e308, 5e-324, -0.0]),
)
texts = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["", "\x00", "\ud800", "\u202e", "<s>", "</s>", "{{ 7 * 7 }}", "null", "a" * 3000, "𝕬́"]),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
anything: Anything = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)
tokens = st.lists(st.integers(-2, 600), max_size=20)

_PLAUSIBLE: dict[str, Anything] = {
    "model": st.sampled_from(["tiny", "", "other"]),
    "prompt": st.one_of(texts, tokens, st.lists(texts, max_size=5), st.lists(tokens, max_size=5)),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]), "content": texts}
        ),
        max_size=4,
    ),
    "max_tokens": st.integers(-1, 70),
    "max_completion_tokens": st.integers(-1, 70),
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-0.1, 1.1),
    "top_k": st.integers(-2, 600),
    "min_p": st.floats(-0.1, 1.1),
    "repetition_penalty": st.floats(-0.1, 3),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.floats(-3, 3),
    "seed": st.integers(-(2**64), 2**65),
    "n": st.integers(-1, 18),
    "stop": st.one_of(texts, st.lists(texts, max_size=5)),
    "stop_token_ids": tokens,
    "min_tokens": st.integers(-1, 70),
    "ignore_eos": st.booleans(),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 25)),
    "top_logprobs": st.integers(-1, 25),
    "logit_bias": st.dictionaries(st.one_of(texts, st.integers(-5, 600).map(str)), numbers, max_size=4),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": leaves, "continuous_usage_stats": leaves, "other": leaves}
    ),
    "truncate_prompt_tokens": st.integers(-3, 70),
    "cache_salt": texts,
    "skip_special_tokens": leaves,
    "spaces_between_special_tokens": leaves,
    "bad_words": st.lists(texts, max_size=2),
    "allowed_token_ids": tokens,
    "reasoning_effort": st.one_of(texts, st.sampled_from(["low", "high"])),
    "priority": st.integers(-40000, 40000),
    "return_token_ids": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "user": texts,
    "tools": anything,
    "response_format": anything,
    "echo": leaves,
    "suffix": leaves,
    "best_of": leaves,
}


def bodies(needed: str) -> Anything:
    """Requests that mostly have their prompt, and some other fields, each right or anything at all."""

    def value(name: str) -> Anything:
        return st.one_of(_PLAUSIBLE[name], _PLAUSIBLE[name], anything)

    optional = {name: value(name) for name in _PLAUSIBLE if name != needed}
    some = st.lists(st.sampled_from(sorted(optional)), max_size=5, unique=True)
    near = some.flatmap(
        lambda names: st.fixed_dictionaries(
            {needed: value(needed), **{name: optional[name] for name in names}}
        )
    )
    return st.one_of(near, near, near, anything)


_TEMPLATES = [
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\n\r\n",
    b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 32\r\n\r\n{"prompt": "abc","max_tokens":2}',
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'4\r\n{"pr\r\n1c\r\nompt": "abc","max_tokens":2}\r\n0\r\n\r\n',
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"GET /v1/models/%2e%2e%2f%00%ff HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    b'POST /v1/completions HTTP/1.0\r\nContent-Length: 45\r\n\r\n{"prompt":"abc","max_tokens":2,"stream":true}',
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n"
    b'Content-Length: 45\r\n\r\n{"prompt":"abc","max_tokens":2,"stream":true}',
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
]
_PIECES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [
            b"\r\n",
            b"\n",
            b"\x00",
            b": ",
            b" ",
            b"Content-Length: -1\r\n",
            b"Transfer-Encoding: gzip, chunked\r\n",
            b"Content-Length: 99999999999999999999\r\n",
            b"A" * 200,
            b"%",
            b"?\xff",
            b"HTTP/1.1",
            b"\x80\x81",
        ]
    ),
)


@st.composite
def raw_requests(draw: st.DrawFn) -> bytes:
    """Bytes for the HTTP port: a request with a few cuts and splices, or noise."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    raw = draw(st.sampled_from(_TEMPLATES))
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(raw)))
        end = min(len(raw), begin + draw(st.integers(0, 8)))
        raw = raw[:begin] + draw(_PIECES) + raw[end:]
    return raw * draw(st.integers(1, 2))
