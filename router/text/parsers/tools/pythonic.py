"""Answers that are a list of calls in Python's syntax, `[f(a=1, b="x"), g()]`, as Llama 4 writes them."""

from __future__ import annotations

import ast
import re
from typing import Any

from router.text.parsers.base import ToolFormat
from router.text.parsers.stream import Answer, Markers, json_text

MAX_CALLS_TEXT = 16_384  # characters: an answer is read as a whole, in some milliseconds
MAX_DEPTH = 32
_BEGIN = re.compile(r"\s{0,64}\[\s{0,64}[A-Za-z_][\w.-]{0,63}\s{0,64}\(")
_NAME = re.compile(r"[^\W\d][\w.]*")
_MAY_BEGIN = re.compile(r"\s{0,64}(\[\s{0,64}([A-Za-z_][\w.-]{0,63}\s{0,64})?)?")


class Pythonic:
    """An answer that is not a list of calls and nothing else is content."""

    def __init__(self, answer: Answer, markers: Markers):
        self._answer = answer
        self._pieces: list[str] = []
        self._length = 0
        self._state = "start"  # calls, content

    def feed(self, text: str) -> None:
        if self._state == "content":
            self._answer.content(text)
            return
        self._pieces.append(text)
        self._length += len(text)
        if self._state == "start":
            begun = "".join(self._pieces)
            if _BEGIN.match(begun):
                self._state = "calls"
            elif not _MAY_BEGIN.fullmatch(begun):
                self._give_up()
        if self._state == "calls" and self._length > MAX_CALLS_TEXT:
            self._give_up()

    def end(self) -> None:
        if self._state == "content":
            return
        text = "".join(self._pieces)
        calls = _calls(text) if self._state == "calls" else None
        if calls is None:
            self._give_up()
            return
        for name, arguments in calls:
            self._answer.call(name)
            self._answer.arguments(arguments)

    def _give_up(self) -> None:
        self._state = "content"
        self._answer.content("".join(self._pieces))
        self._pieces.clear()


def _calls(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments as JSON; None if the text is anything else. Nothing of it is executed."""
    if _depth(text) > MAX_DEPTH:
        return None
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(listed, ast.List) or not listed.elts:
            return None
        return [_call(one) for one in listed.elts]
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


def _depth(text: str) -> int:
    deepest = depth = 0
    for found in re.finditer(r"[\[({})\]]|[-+~]|not ", text):  # unary operators nest too
        depth += -1 if found[0] in ")]}" else 1 if found[0] in "[({" else 0
        deepest = max(deepest, depth)
    return max(deepest, max((len(found[0]) for found in re.finditer(r"[-+~ ]+", text)), default=0) - 1)


def _call(node: ast.expr) -> tuple[str, str]:
    """Raises ValueError, or TypeError for an argument that JSON does not have: a set, bytes, a complex number."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments: dict[str, Any] = {}
    for one in node.keywords:
        if one.arg is None:
            raise ValueError("no name")
        arguments[one.arg] = ast.literal_eval(_Constants().visit(one.value))
    name = ast.unparse(node.func)
    if not _NAME.fullmatch(name):
        raise ValueError("an expression is called")
    return name, json_text(arguments)


class _Constants(ast.NodeTransformer):
    """Models write JSON's constants, too."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


FORMAT = ToolFormat((), Pythonic, ("[func_name1(",))
