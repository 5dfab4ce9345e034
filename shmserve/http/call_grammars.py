"""Grammars of tool calls: one that forces a call, and one that lets text be and holds every call to its schema.

Owns: both Lark grammars, in the model's own format. Marks that are special tokens stand in them by their ids. Never: knows the
request (tools.py does). Pure; front end only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from shmserve.grammar import WHITESPACE
from shmserve.http.reasoning import CLOSER, OPENER
from shmserve.http.tool_formats import ToolFormat

SpecialId = Callable[[str], int | None]
"""special_id(text): the id of a special token, None for what is spelled out in ordinary tokens."""

_ANY_OBJECT: Final = {"type": "object"}
_GAP: Final = r"/[ \n]{0,2}/"


def forced_grammar(
    fmt: ToolFormat, schemas: Mapping[str, Any], only_one: bool, special_id: SpecialId
) -> str:
    """One call, or one or more, and nothing else."""
    call = f"({' | '.join(_names(schemas))})"
    if fmt.closer:
        call = f'{_mark(fmt.opener, special_id)} "\\n" {call} "\\n" {_mark(fmt.closer, special_id)}'
        start = "call" if only_one else 'call ("\\n" call)*'
    elif fmt.opener:
        many = "call" if only_one else 'call (", " call)*'
        start = f'{_mark(fmt.opener, special_id)} "[" {many} "]"'
    else:
        start = "call" if only_one else 'call ("; " call)*'
    return "\n".join([f"start: {start}", f"call: {call}", *_functions(fmt, schemas)])


def strict_grammar(
    fmt: ToolFormat, schemas: Mapping[str, Any], strict: Collection[str], special_id: SpecialId
) -> str:
    """Any text, and in it calls: each of a function that there is, with arguments of its schema where it is `strict`."""
    shown = {name: schemas[name] if name in strict else _ANY_OBJECT for name in schemas}
    call = f"({' | '.join(_names(schemas))})"
    rules = [f"GAP: {_GAP}", *_functions(fmt, shown)]
    if not fmt.opener:
        # Calls stand at the very beginning; a text that does not begin with one is no call.
        prefix = f"{_mark(fmt.prefix, special_id)}? " if fmt.prefix else ""
        return "\n".join(
            [
                "start: calls | SAID",
                f'calls: GAP {prefix}GAP {call} (";" GAP {call})* GAP',
                r"SAID: /[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/",
                *rules,
            ]
        )
    if fmt.closer:
        body = f"GAP {call} GAP {_mark(fmt.closer, special_id)}"
    else:
        body = f'GAP "[" {call} ("," GAP {call})* "]"'
    head, lazy = "head", [f"head[lazy]: TEXT {json.dumps(fmt.opener)}"]
    if special_id(fmt.opener) is not None:
        head, lazy = f"TEXT {_mark(fmt.opener, special_id)}", []
    # Text holds no special tokens of itself: marks of the reasoning are let through where they are some.
    marks = [(n, special_id(mark)) for n, mark in (("opened", OPENER), ("closed", CLOSER))]
    thought = [(n, token_id) for n, token_id in marks if token_id is not None]
    before = "".join(f"{name}? " for name, _ in thought)
    return "\n".join(
        [
            "%llguidance {}",
            f"start: {before}call* tail",
            "tail: TEXT",
            r"TEXT: /(.|\n)*/",
            *lazy,
            f"call: {head} {body}",
            *(f"{name}: TEXT <[{token_id}]>" for name, token_id in thought),
            *rules,
        ]
    )


def _mark(text: str, special_id: SpecialId) -> str:
    token_id = special_id(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _of_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema`, which is for an object whether it says so or not: `{}` is a function without arguments, not one that takes anything."""
    says_more = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"} & schema.keys()
    return schema if says_more else {"type": "object", **schema}


def _names(schemas: Mapping[str, Any]) -> list[str]:
    return [f"f{index}" for index in range(len(schemas))]


def _functions(fmt: ToolFormat, schemas: Mapping[str, Any]) -> list[str]:
    """A rule for each function's call, and one for its arguments."""
    rules = []
    for index, (name, schema) in enumerate(schemas.items()):
        head = f'{{"name": {json.dumps(name)}, "{fmt.arguments_key}": '
        schema = {**_of_object(schema), "x-guidance": {"whitespace_pattern": WHITESPACE}}
        rules.append(f'f{index}: {json.dumps(head)} a{index} "}}"')
        rules.append(f"a{index}: %json {json.dumps(schema)}")
    return rules
