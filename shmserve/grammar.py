"""What a completion must look like, as a grammar of llguidance: from every form in which clients say it.

Owns: the translation, the limits, and the tokenizer as llguidance wants it. A grammar travels between the processes as its text.
Never: lets a keyword of a schema go unheeded: what cannot be honoured is a GrammarError, whose text is for the client.

Both processes may use it: the front end to check a request before it is submitted, the worker to mask tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from shmserve.models import PreparedModel

WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,16}"
"""Between the tokens of JSON. Bounded: a small model would else go on with blanks until its length ends."""

MOST_GRAMMAR_BYTES: Final = 256 * 1024
MOST_CHOICES: Final = 10_000


class GrammarError(ValueError):
    """The grammar cannot be honoured; the text says why, for the client."""


def from_json_schema(schema: Any) -> str:
    """A JSON Schema (an object, a boolean, or the text of either)."""
    from llguidance import LLMatcher

    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is not valid JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object")
    try:
        return LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": WHITESPACE}
        )
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema cannot be used: {error}") from None


def from_json_object() -> str:
    """Any JSON object."""
    return from_json_schema({"type": "object"})


def from_regex(pattern: Any) -> str:
    """A regular expression that the whole text matches."""
    from llguidance import LLMatcher

    if not isinstance(pattern, str):
        raise GrammarError("a regular expression must be a string")
    return LLMatcher.grammar_from_regex(pattern)


def from_choice(choices: Any) -> str:
    """One of these strings."""
    from llguidance import LLMatcher

    if not isinstance(choices, Sequence) or isinstance(choices, str):
        raise GrammarError("choices must be a list")
    if not choices or len(choices) > MOST_CHOICES or not all(isinstance(c, str) for c in choices):
        raise GrammarError(f"choices must be 1 to {MOST_CHOICES} strings")
    if not all(choices):
        raise GrammarError("a choice must not be empty")
    # One terminal, not as many rules as choices: of those it follows 2,000 at most, and a step of that many takes 80 ms.
    return LLMatcher.grammar_from_lark(
        "start: CHOICE\nCHOICE: " + "\n     | ".join(map(json.dumps, choices))
    )


def from_ebnf(text: Any) -> str:
    """A context-free grammar: GBNF (llama.cpp's, xgrammar's: `root ::= ...`) or Lark (`start: ...`)."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    if not isinstance(text, str):
        raise GrammarError("a grammar must be a string")
    _check_size(text)  # before it is translated, which takes long
    if "::=" in text:
        try:
            text = gbnf_to_lark(text)
        except (GbnfToLarkError, ValueError, RecursionError) as error:
            raise GrammarError(f"the grammar cannot be read: {error}") from None
    return LLMatcher.grammar_from_lark(text)


def from_lark(text: str) -> str:
    """A Lark grammar, whatever its strings hold."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


def from_structural_tag(tag: Any) -> str:
    """Free text in which a trigger begins a structure: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    from llguidance import LLMatcher, StructTag

    if isinstance(tag, str):
        try:
            tag = json.loads(tag)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the structural tag is not valid JSON: {error}") from None
    structures, triggers = (
        (tag.get("structures"), tag.get("triggers")) if isinstance(tag, dict) else (None, None)
    )
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise GrammarError("a structural tag needs `structures` and `triggers`, both lists")
    tags = []
    for index, structure in enumerate(structures):
        where = f"structures[{index}]"
        if not isinstance(structure, dict) or not isinstance(structure.get("begin"), str):
            raise GrammarError(f"{where} needs a `begin`, a string")
        begin = structure["begin"]
        trigger = next(
            (t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None
        )
        if trigger is None:
            raise GrammarError(f"no trigger begins {where}.begin {begin!r}")
        schema = structure.get("schema")
        end = structure.get("end") or ""
        if not isinstance(schema, dict) or not isinstance(end, str):
            raise GrammarError(f"{where} needs a `schema`, an object, and an `end`, a string")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


def check(grammar: str, tokenizer: LLTokenizer) -> None:
    """Raise GrammarError unless the grammar can be honoured, whole. Takes milliseconds; releases the interpreter lock."""
    from llguidance import LLMatcher

    _check_size(grammar)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if is_error or messages:
        raise GrammarError("; ".join(" ".join(message.split()) for message in messages))


def _check_size(grammar: str) -> None:
    size = len(grammar.encode())
    if size > MOST_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar has {size} bytes, at most {MOST_GRAMMAR_BYTES} are taken")


def tokenizer_of(model: PreparedModel) -> LLTokenizer:
    """The vocabulary of a prepared model as llguidance reads it: 0.15 s for 50,000 tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokenizer = model.tokenizer()
    table = model.token_bytes().table()

    class Vocabulary:
        eos_token_id = model.eos_token_ids[0] if model.eos_token_ids else 0
        bos_token_id = model.bos_token_id
        tokens = table
        special_token_ids = sorted(model.special_token_ids)

        def __call__(self, text: str | bytes) -> list[int]:
            if isinstance(text, bytes):
                text = text.decode("utf-8", "replace")
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return ids

    return LLTokenizer(
        TokenizerWrapper(Vocabulary()),
        n_vocab=len(table),
        eos_token=list(model.eos_token_ids) or None,
    )
