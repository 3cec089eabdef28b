"""A model directory's tokenizer, chat template and generation defaults."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from cluster.errors import InvalidRequestError, ModelError
from cluster.fair_threads import FairThreads
from cluster.protocol import model_limits, output_head
from cluster.protocol.pooling import Embedding
from router.text.bad_words import word_tokens
from router.text.byte_table import make_byte_table
from router.text.contents import Contents, Rendered
from router.text.conversation import Conversation, Tool
from router.text.detokenize import Detokenizer
from router.text.longest_token import most_bytes
from router.text.single_calls import needs_single_calls, with_single_calls
from router.text.templates import MARK_NAME, WRITTEN_NAME, TemplateTexts, template_environment
from router.text.token_bytes import TokenPieces
from router.text.tokenized_pieces import PieceCache, PieceTokenizer, make_piece_tokenizer

log = logging.getLogger(__name__)
# Text up to this length is encoded on the event loop, in about 0.2 ms; a thread would cost a request 0.2 to 0.3 ms.
INLINE_CHARACTERS = 1024
INLINE_TOKENS = 1024  # as many are decoded on the event loop
# Encoded in about 50 ms. Longer texts share a separate thread: two whose encoding takes seconds would block both others.
LONG_CHARACTERS = 1 << 17
# Up to this length the cached pieces of a text are looked up on the event loop: 0.05 ms, 0.4 ms for texts without cuts.
INLINE_LOOK_UP_CHARACTERS = 8_192
# Conversations up to this size are rendered on the event loop, longer ones on a thread.
INLINE_CHAT_CHARACTERS = 16_384
MESSAGE_CHARACTERS = 256  # cost of a message beside its text, in characters
# A conversation without contents
_PROBE = [{"role": role, "content": ""} for role in ("system", "user", "assistant", "user")]
# Stands where the answer continues the last message. Private use, so that hardly any text has it
_CONTINUES = "\U000f0100"
# What templates raise for messages and variables that they do not expect; `x | dictsort` of a text is an AttributeError
_REFUSALS = (jinja2.TemplateError, AttributeError, TypeError, ValueError, ArithmeticError, LookupError)
# What clients may not set in the template
RESERVED_KWARGS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "pad_token", "unk_token", MARK_NAME, WRITTEN_NAME),
        *template_environment().globals,
    }
)


def _token_text(value: Any) -> str:
    return str((value.get("content") if isinstance(value, Mapping) else value) or "")


def _continued(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, the last one marked at the end of its content."""
    *before, last = messages
    return [*before, {**last, "content": last["content"] + _CONTINUES}]


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message for a template that calls reasoning `thinking`: gpt-oss's, which beside calls takes only one of that and
    a content, and writes either as reasoning."""
    reasoning, content = message.get("reasoning_content"), message["content"]
    if not reasoning:
        return message
    if content and message.get("tool_calls"):
        return {**message, "thinking": f"{reasoning}\n{content}", "content": ""}
    return {**message, "thinking": reasoning}


def _before_continuation(text: str) -> str:
    """The rendered text up to the end of the last message's content."""
    before, found, _ = text.rpartition(_CONTINUES)
    if not found:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message's content",
            field="continue_final_message",
        )
    return before


class ModelText:
    """A model's tokenizer, chat template and text settings. Raises ModelError if the directory lacks a tokenizer."""

    def __init__(self, directory: Path, cache_bytes: int = 0):
        """`cache_bytes`: for tokens of pieces of prompts that came before."""
        path = directory / "tokenizer.json"
        if not path.exists():
            raise ModelError(f"{directory} has no tokenizer.json", field="tokenizer.json")
        try:
            model_limits.check_file(path)
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exceptions
            raise ModelError(f"{path}: {error}", field=path.name) from error
        # Left from training in some files; transformers applies neither unless it is asked for
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self._directory = directory
        self.pieces = TokenPieces(self.tokenizer)
        self._byte_table = make_byte_table(self.tokenizer)
        self._prompt_pieces = make_piece_tokenizer(self.tokenizer, cache_bytes)
        self.most_bytes = most_bytes(self.tokenizer)  # of text that one token can cover; None = no bound
        config = model_limits.json_object(directory / "config.json")
        self.max_position_embeddings = model_limits.context_tokens(config)
        self.vocab_size = model_limits.vocab_size(config) or self.tokenizer.get_vocab_size()
        self.has_head = output_head.has_head(config, directory)  # False: the model generates nothing
        self.embedding: Embedding | None = None
        self.embedding_refusal = ""  # why the model makes no embeddings
        self._read_embedding(directory, config)
        self.generation = model_limits.json_object(directory / "generation_config.json")
        self.eos_token_ids = model_limits.end_tokens(config, self.generation, self.vocab_size)
        settings = model_limits.json_object(directory / "tokenizer_config.json")
        self._special = {
            name: _token_text(settings.get(name))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        sources = self._template_sources(directory, settings)
        self._template = self._compile(sources.get("default", ""))
        # As transformers has it: a template of this name is that of conversations with tools.
        self._tool_template = self._compile(sources["tool_use"]) if "tool_use" in sources else self._template
        self.template_source = "\n".join(sources.values())
        template = TemplateTexts.read(*sources.values())
        self._reads_thinking = "thinking" in template.keys and "reasoning_content" not in template.keys
        self._single_calls = False
        self._single_calls = needs_single_calls(self._probed)
        self._contents = Contents(self.tokenizer, self._turn_texts(template), template)
        self._pool = FairThreads(2, "tokenize")
        self._long = FairThreads(1, "tokenize-long")
        # One thread: rendering holds the interpreter lock.
        self._rendering = FairThreads(1, "render")

    def _read_embedding(self, directory: Path, config: Mapping[str, Any]) -> None:
        """A model whose embeddings are refused can still generate."""
        try:
            self.embedding = Embedding.read(directory, config)
        except ModelError as error:
            self.embedding_refusal = error.message
            log.warning("%s makes no embeddings: %s", directory, error.message)
        else:
            if self.embedding is None:
                self.embedding_refusal = "its checkpoint has no modules.json, which says how they are pooled"

    @staticmethod
    def _template_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
        """The templates `default` and `tool_use`, as far as there are any."""
        file = directory / "chat_template.jinja"
        try:
            source = model_limits.text_of(file) if file.exists() else settings.get("chat_template")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: {error}", field=file.name) from error
        if isinstance(source, list):  # named ones
            named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        else:
            named = {"default": source}
        found: dict[str, str] = {}
        for name in ("default", "tool_use"):
            if text := named.get(name):
                if not isinstance(text, str):
                    raise ModelError("the chat template is not text", field="chat_template")
                found[name] = text
        return found

    @staticmethod
    def _compile(source: str) -> jinja2.Template | None:
        if not source:
            return None
        try:
            return template_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template: {error}", field="chat_template") from error

    def _probed(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self.render(Conversation(messages, [Tool("probe")]))

    def _turn_texts(self, template: TemplateTexts) -> set[str]:
        """Added tokens that the template writes, though the tokenizer does not call them special: DeepSeek's turns begin
        with such ones. What the template looks for in contents, such as the end of reasoning, is part of contents."""
        if not template.sources:
            return set()
        written = [*template.sources]
        for probe in (_PROBE, _PROBE[1:]):  # some templates refuse a system's message
            for tools in ((), (Tool("f"),)):
                with contextlib.suppress(InvalidRequestError, RecursionError):
                    written.append(self.render(Conversation(probe, tools)))
        added = {one.content for one in self.tokenizer.get_added_tokens_decoder().values() if not one.special}
        texts = {text for text in added if text.strip() and any(text in one for one in written)}
        return texts - template.searched

    def render(self, conversation: Conversation) -> str:
        """Render a conversation with the model's chat template, as far as no text in it is that of a special token."""
        tools = [one.for_template() for one in conversation.tools]
        return self._rendered(conversation, conversation.messages, tools, conversation.template_kwargs, "")

    def _rendered(
        self,
        conversation: Conversation,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        mark: str,
    ) -> str:
        """Render these messages and tools in place of the conversation's. `mark`: see Rendered; "" = none. Raises
        InvalidRequestError."""
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidRequestError("this model has no chat template; send a prompt", field="messages")
        if self._single_calls:
            messages = with_single_calls(messages)
        if self._reads_thinking:
            messages = list(map(_with_thinking, messages))
        effort = conversation.reasoning_effort
        continues = conversation.continue_final_message
        try:
            text = template.render(
                {  # one argument: a variable may have the name of one of the function's own
                    **({} if effort is None else {"reasoning_effort": effort}),
                    **kwargs,
                    "messages": _continued(messages) if continues else messages,
                    "tools": tools or None,
                    "documents": None,
                    "add_generation_prompt": conversation.add_generation_prompt,
                    **self._special,
                    MARK_NAME: mark,
                    WRITTEN_NAME: conversation.has_written_numbers,
                }
            )
        except _REFUSALS as error:
            raise InvalidRequestError(f"the chat template refuses: {error}", field="messages") from error
        return _before_continuation(text) if continues else text

    async def chat(
        self, read: Callable[[], Conversation], characters: int, *, tenant: str = ""
    ) -> tuple[Conversation, Rendered]:
        """Render the conversation that `read` returns. A large one, by its size in `characters`, is rendered on a thread
        that tenants use in turns."""

        def rendered() -> tuple[Conversation, Rendered]:
            given = read()
            tools = [one.for_template() for one in given.tools]
            # Names of kwargs are the template's variables.
            values = (given.messages, tools, *given.template_kwargs.values())
            fields = ("messages", "tools", *map("chat_template_kwargs.{}".format, given.template_kwargs))
            (messages, tools, *set_to), mark = self._contents.marked(values, fields)
            kwargs = dict(zip(given.template_kwargs, set_to, strict=True))
            text = self._rendered(given, messages, tools, kwargs, mark)
            return given, self._contents.settled(text, mark)

        if characters <= INLINE_CHAT_CHARACTERS:
            return rendered()
        return await self._rendering.run(tenant, rendered)

    async def encode(
        self, given: str | Rendered, *, special: bool = True, tenant: str = "", scope: str = ""
    ) -> list[int]:
        """Token ids. Long texts are encoded on a thread that tenants use in turns; the tokenizer releases the GIL.

        Pieces that came before in the same `scope` (prefix_scope) are not tokenised again.
        """
        text = given if isinstance(given, str) else given.text
        if self._prompt_pieces is not None and (isinstance(given, str) or not given.mark):
            return await self._encode_pieces(self._prompt_pieces, text, special, tenant, scope)
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(given, special)
        return await self._pool_for(len(text)).run(tenant, self._encode, given, special)

    async def lengths(
        self, read: Callable[[], Sequence[str]], characters: int, *, tenant: str = ""
    ) -> list[int]:
        """The tokens of each text that `read` returns, on a thread. `characters`: about as many as they have together."""

        def counted() -> list[int]:
            return list(map(len, self.tokenizer.encode_batch_fast(list(read()), add_special_tokens=False)))

        return await self._pool_for(characters).run(tenant, counted)

    async def words(self, words: Sequence[str], *, tenant: str = "") -> list[list[int]]:
        """The token ids of words that answers may not have (`word_tokens`)."""
        characters = 2 * sum(map(len, words))
        if characters <= INLINE_CHARACTERS:
            return word_tokens(self.tokenizer, words)
        return await self._pool_for(characters).run(tenant, word_tokens, self.tokenizer, words)

    async def decode(self, tokens: Sequence[int], *, tenant: str = "") -> str:
        """The text of token ids, special ones included."""

        def decoded() -> str:
            # The batch function alone releases the interpreter lock.
            return str(self.tokenizer.decode_batch([list(tokens)], skip_special_tokens=False)[0])

        return decoded() if len(tokens) <= INLINE_TOKENS else await self._pool.run(tenant, decoded)

    async def names(self, tokens: Sequence[int], *, tenant: str = "") -> list[str]:
        """The tokens as the tokenizer writes them; "" for an id without one."""

        def named() -> list[str]:
            return [self.tokenizer.id_to_token(one) or "" for one in tokens]

        return named() if len(tokens) <= INLINE_TOKENS else await self._pool.run(tenant, named)

    async def _encode_pieces(
        self, pieces: PieceTokenizer, text: str, special: bool, tenant: str, scope: str
    ) -> list[int]:
        short = len(text) <= INLINE_LOOK_UP_CHARACTERS
        look_up = pieces.look_up
        found = look_up(scope, text) if short else await self._pool.run(tenant, look_up, scope, text)
        if short and found.missing_characters <= INLINE_CHARACTERS:
            return pieces.complete(found, special)
        pool = self._pool_for(found.missing_characters)
        return await pool.run(tenant, pieces.complete, found, special)

    def _pool_for(self, characters: int) -> FairThreads:
        return self._pool if characters <= LONG_CHARACTERS else self._long

    def _encode(self, given: str | Rendered, special: bool) -> list[int]:
        if isinstance(given, Rendered):
            if given.mark:
                return self._contents.encode(given)
            given = given.text
        # The fast variant leaves out the tokens' positions in the text.
        (encoding,) = self.tokenizer.encode_batch_fast([given], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def tokenizer_json(self) -> str:
        return model_limits.text_of(self._directory / "tokenizer.json")

    @property
    def piece_cache(self) -> PieceCache | None:
        """None: nothing is cached with this tokenizer."""
        return None if self._prompt_pieces is None else self._prompt_pieces.cache

    def detokenizer(self, before: list[int]) -> Detokenizer:
        """A detokenizer for one choice, whose answer follows the tokens `before`."""
        if self._byte_table is not None:
            return self._byte_table.detokenizer(before)
        return Detokenizer(self.tokenizer, before, self.pieces.special)

    def close(self) -> None:
        for threads in (self._pool, self._long, self._rendering):
            threads.close()
