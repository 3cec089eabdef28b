"""Demanded calls of tools whose schemas have no grammar: arguments of a tool that is not strict are then any object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.errors import InvalidRequestError
from router.request.answer_plan import CHOICE, AnswerPlan, parameters_field
from router.request.grammar.requested import RequestedGrammar, json_spec
from router.request.served_model import ServedModel
from router.text.conversation import Conversation, Tool

# Refused schemas of a request that are looked for one by one; with more, no tool that is not strict keeps its own
MAX_REFUSED = 8


async def checked_plan(
    model: ServedModel,
    tenant: str,
    conversation: Conversation,
    rendered: str,
    asked: RequestedGrammar | None,
    *,
    answered: bool = True,
) -> AnswerPlan:
    """Plan the answer to a prompt, whose grammar compiles. Arguments of a tool that is not strict are any object where
    calls are demanded and its schema has no grammar. Not `answered`: the prompt alone is wanted, no grammar is made, and
    schemas may be any. Raises what AnswerPlans.plan and GrammarChecks.check raise."""
    if not answered:
        model.plans.check_tools(conversation)
        return AnswerPlan()
    if asked is not None and model.plans.reasoning_parser:
        asked = await model.grammars.with_known_begin(tenant, asked)

    def planned(tools: Sequence[Tool]) -> AnswerPlan:
        return model.plans.plan(replace(conversation, tools=tools), rendered, asked)

    async def checked(tools: Sequence[Tool]) -> AnswerPlan:
        plan = planned(tools)
        await model.grammars.check(tenant, *plan.checks)
        return plan

    not_strict = _not_strict(conversation)
    try:
        return await checked(conversation.tools)
    except InvalidRequestError as error:
        fields = [parameters_field(tool, index) for index, tool in not_strict.items()]
        if error.field not in (CHOICE, *fields) or not not_strict:
            raise
    planned(_without(conversation.tools, not_strict))  # raises what is not because of a schema
    refused = await _refused(model, tenant, not_strict)
    if len(refused) < len(not_strict):
        try:
            return await checked(_without(conversation.tools, refused))
        except InvalidRequestError as error:
            if error.field != CHOICE:
                raise
    return await checked(_without(conversation.tools, not_strict))


def _not_strict(conversation: Conversation) -> dict[int, Tool]:
    """Tools by their places, whose schemas are kept only where calls are demanded."""
    if not conversation.must_call:
        return {}
    wanted = {one.name for one in conversation.callable}
    return {
        index: tool
        for index, tool in enumerate(conversation.tools)
        if tool.name in wanted and not tool.strict and tool.parameters is not None
    }


async def _refused(model: ServedModel, tenant: str, not_strict: dict[int, Tool]) -> set[int]:
    """The places of those whose schema is refused by itself."""
    refused: set[int] = set()
    left: dict[str, tuple[int, RequestedGrammar]] = {}
    for index, tool in not_strict.items():
        try:
            field = parameters_field(tool, index)
            left[field] = index, RequestedGrammar(field, json_spec(tool.parameters))
        except ValueError:
            refused.add(index)
    while left and len(refused) <= MAX_REFUSED:
        try:
            await model.grammars.check(tenant, *(one for _, one in left.values()))
            return refused
        except InvalidRequestError as error:
            index, _ = left[error.field]
            refused.add(index)
            left = {field: one for field, one in left.items() if one[0] > index}
    return set(not_strict) if left else refused


def _without(tools: Sequence[Tool], loose: set[int] | dict[int, Tool]) -> list[Tool]:
    """The tools, those in the places `loose` with nothing of their schema but its type."""
    return [
        replace(
            tool, parameters={name: one for name, one in (tool.parameters or {}).items() if name == "type"}
        )
        if index in loose
        else tool
        for index, tool in enumerate(tools)
    ]
