"""The jinja environment of chat templates: functions, filters and tags with the meaning that they have in
`transformers.utils.chat_template_utils`, for which templates on the Hub are written."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text import json_pieces, written_numbers

MARK_NAME = "baton_mark"  # the variable with the mark of special tokens (router/text/contents.py)
WRITTEN_NAME = (
    "baton_written_numbers"  # whether calls' arguments have numbers that are written by their own text
)

Clock = Callable[[], datetime.datetime]


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks assistant text for training; here it renders its content."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def template_environment(now: Clock = datetime.datetime.now) -> ImmutableSandboxedEnvironment:
    """`now` returns the local time, which strftime_now formats."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


@dataclass
class TemplateTexts:
    """Literal texts in a model's chat templates. `sources`: the templates themselves."""

    sources: tuple[str, ...] = ()
    searched: set[str] = field(default_factory=set)
    """Looked for in values, such as `</think>` in `content.split('</think>')` and `'</think>' in content`."""
    filtered: set[str] = field(default_factory=set)
    """Given to filters, as in `content | replace('</think>', '')`."""
    keys: set[str] = field(default_factory=set)
    """Named as keys, as in `message.content` and `message['content']`."""
    written: set[str] = field(default_factory=set)
    """The templates' own, after each of which a value may be written."""

    @classmethod
    def read(cls, *sources: str) -> TemplateTexts:
        """Raises jinja2.TemplateSyntaxError."""
        found = cls(sources)
        environment = template_environment()
        for source in sources:
            for node in environment.parse(source).find_all(nodes.Node):
                found._add(node)
        return found

    def _add(self, node: nodes.Node) -> None:
        match node:
            case nodes.Call(node=nodes.Getattr()):
                self.searched |= _texts(node.args)
            case nodes.Compare():
                self.searched |= _texts([node.expr, *(operand.expr for operand in node.ops)])
            case nodes.Filter():
                self.filtered |= _texts(node.args)
            case nodes.Getattr():
                self.keys.add(node.attr)
            case nodes.Getitem():
                self.keys |= _texts([node.arg])
            case nodes.TemplateData():
                self.written.add(node.data)
            case nodes.Const():
                self.written |= _texts([node])


def _texts(given: Iterable[nodes.Node]) -> set[str]:
    return {one.value for one in given if isinstance(one, nodes.Const) and isinstance(one.value, str)}


@jinja2.pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja's own filter."""
    dumps = written_numbers.dumps if context.get(WRITTEN_NAME) else json_pieces.dumps
    text = dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    mark = context.get(MARK_NAME)  # must be found again in the rendered text
    return text.replace(json.dumps(mark)[1:-1], mark) if ensure_ascii and mark else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
