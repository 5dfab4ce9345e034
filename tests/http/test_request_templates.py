"""Chat templates that requests bring, and what they may not do."""

import pytest

from shmserve.config import HttpConfig
from shmserve.http.errors import ApiError
from shmserve.http.openai.schemas import ChatRequest
from shmserve.http.request_templates import MOST_TEMPLATE_BYTES, RequestTemplates

QUESTION = [{"role": "user", "content": "Hello world"}]
ECHO = "{% for message in messages %}{{ message.content }}{% endfor %}"


def prompt_of(asker, **fields):
    """The prompt that a chat request comes to."""
    answer = asker.post("/tokenize", {"messages": QUESTION} | fields)
    assert answer.status == 200, answer.body
    return asker.post("/detokenize", {"tokens": answer.json()["tokens"]}).json()["text"]


def refused(asker, **fields):
    errors = []
    for more in ({}, {"stream": True}):
        body = {"messages": QUESTION, "max_tokens": 1} | fields | more
        answer = asker.post("/v1/chat/completions", body)
        assert answer.status == 400, answer.body
        errors.append(answer.error())
    assert errors[0] == errors[1]
    return errors[0]


def test_a_template_of_a_request_is_refused_unless_the_operator_trusts_clients():
    parsed = ChatRequest(messages=QUESTION, chat_template=ECHO)
    with pytest.raises(ApiError, match="--trust-request-chat-template") as caught:
        RequestTemplates({}).of(parsed, is_trusted=False).send(None)
    assert (caught.value.status, caught.value.param) == (400, "chat_template")
    assert not HttpConfig().trust_request_chat_template


def test_a_template_of_a_request_makes_its_prompt_and_no_other(asker):
    plain = prompt_of(asker)
    assert "<|im_start|>" in plain
    assert prompt_of(asker, chat_template=ECHO) == "Hello world"
    kwargs = {"chat_template": ECHO + "{{ more }}!", "chat_template_kwargs": {"more": " more"}}
    assert prompt_of(asker, **kwargs) == "Hello world more!"
    assert prompt_of(asker) == plain
    answer = asker.post(
        "/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, "chat_template": ECHO}
    )
    assert answer.json()["usage"]["prompt_tokens"] == 2


def test_generation_prompt_and_continuation_are_the_templates_own(asker):
    template = ECHO + "{% if add_generation_prompt %}<A>{% else %}<B>{% endif %}"
    assert prompt_of(asker, chat_template=template) == "Hello world<A>"
    closed = prompt_of(asker, chat_template=template, add_generation_prompt=False)
    assert closed == "Hello world<B>"
    said = [*QUESTION, {"role": "assistant", "content": " again"}]
    fields = {"chat_template": template, "messages": said, "continue_final_message": True}
    assert prompt_of(asker, **fields) == "Hello world again"


def test_a_template_decides_about_reasoning_and_tools(asker):
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    assert prompt_of(asker, chat_template=template, tools=tools) == "f"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "compiled"),
        ("{{ raise_exception('not like this') }}", "not like this"),
        ("{{ nobody.attribute }}", "nobody"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("x" * (MOST_TEMPLATE_BYTES + 1), str(MOST_TEMPLATE_BYTES)),
        ("{{ 1 // 0 }}", "zero"),
        ("(" * 3000, None),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "compiled"),
    ],
)
def test_a_bad_template_is_a_400_with_its_message(asker, template, says):
    if says is None:
        assert prompt_of(asker, chat_template=template) == template
        return
    error = refused(asker, chat_template=template)
    assert says in error["message"]
    assert error["param"] in ("chat_template", "messages")


def test_a_template_among_its_own_arguments_is_refused(asker):
    error = refused(asker, chat_template_kwargs={"chat_template": ECHO})
    assert error["param"] == "chat_template_kwargs"
