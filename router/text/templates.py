"""The jinja environment of chat templates: functions, filters and tags with the meaning that they have in
`transformers.utils.chat_template_utils`, for which templates on the Hub are written."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable
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


def searched_texts(source: str) -> set[str]:
    """The texts that a template looks for in values, such as `</think>` in `content.split('</think>')` and
    `'</think>' in content`."""
    tree = template_environment().parse(source)
    methods = (call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr))
    given = [argument for call in methods for argument in call.args]
    for test in tree.find_all(nodes.Compare):
        given += [test.expr, *(operand.expr for operand in test.ops)]
    return _texts(given)


def filtered_texts(source: str) -> set[str]:
    """The texts that a template gives to filters, as in `content | replace('</think>', '')`."""
    tree = template_environment().parse(source)
    return _texts(argument for one in tree.find_all(nodes.Filter) for argument in one.args)


def named_keys(source: str) -> set[str]:
    """The keys that a template names, as in `message.content` and `message['content']`."""
    tree = template_environment().parse(source)
    attributes = {one.attr for one in tree.find_all(nodes.Getattr)}
    return attributes | _texts(one.arg for one in tree.find_all(nodes.Getitem))


def written_texts(source: str) -> set[str]:
    """The template's own texts, after each of which it may write a value."""
    tree = template_environment().parse(source)
    return {one.data for one in tree.find_all(nodes.TemplateData)} | _texts(tree.find_all(nodes.Const))


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
