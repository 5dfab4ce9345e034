"""Chat templates: what they may do, what they may not, and prompts that end inside the last message."""

import pytest

from shmserve.http.errors import ApiError
from shmserve.http.template import ChatTemplate, TemplateError, continued_prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


def render(source, messages=HI, **more):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **more)


def refusal(source, messages=HI, **more):
    with pytest.raises(ApiError) as refused:
        render(source, messages, **more)
    assert (refused.value.status, refused.value.param) == (400, "messages")
    return refused.value.message


def test_messages_and_special_tokens_are_there():
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>Hi"


def test_the_clients_variables_do_not_replace_the_messages():
    assert render("{{ tone }}{{ messages|length }}", kwargs={"tone": "x", "messages": []}) == "x1"


def test_the_default_models_template_writes_its_beginning_once_I1(default_model):
    template = ChatTemplate(default_model.chat_template, {})
    text = template.render(HI)
    ids = default_model.tokenizer().encode(text, add_special_tokens=False).ids
    assert len(ids) == 31
    assert (ids[:3], ids[-4:], ids.count(1)) == ([1, 9690, 198], [1, 520, 9531, 198], 3)


def test_what_the_template_raises_is_told_I3():
    assert "one message only" in refusal("{{ raise_exception('one message only') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ nobody.attribute }}",
        "{{ 1 // 0 }}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 'x' | int('y') + none }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''.__class__.mro() }}",
        "{% set _ = messages.append(1) %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_faults_and_escapes_of_a_template_are_refusals_and_no_crash(source):
    assert "refused" in refusal(source)


def test_a_template_that_does_not_compile_is_the_operators_fault():
    with pytest.raises(TemplateError):
        ChatTemplate("{% if %}", {})


def test_loop_controls_json_and_time_are_there_as_in_transformers():
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<é>"}]) == (
        '[{"role": "user", "content": "<é>"}]'
    )
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_what_marks_the_assistants_words_for_training_stands_for_them():
    block = "{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}"
    source = "{% for m in messages %}" + block + "{{ x is defined }}{% endfor %}"
    assert render(source) == "HiFalse"
    assert render("{%- generation -%} {{ messages[0].content }} {%- endgeneration -%}") == "Hi"


def test_tools_and_documents_are_none_where_there_are_none_as_in_transformers():
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert render("{{ tools }}", kwargs={"tools": [1]}) == "[1]"


def continued(source, content, role="assistant"):
    messages = [{"role": "user", "content": "Q"}, {"role": role, "content": content}]
    return continued_prompt(ChatTemplate(source, {}), messages, {})


@pytest.mark.parametrize("content", ["Sure, ", "Sure,", "", "  two blanks  ", "line\n", "{{ x }}"])
def test_a_continued_prompt_ends_in_the_last_message_I2(content):
    assert continued(CHATML, content) == (
        f"<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n{content}"
    )


def test_a_continued_prompt_of_the_default_model_ends_as_the_case_says_I2(default_model):
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Sure, "}]
    text = continued_prompt(ChatTemplate(default_model.chat_template, {}), messages, {})
    ids = default_model.tokenizer().encode(text, add_special_tokens=False).ids
    assert text.endswith("<|im_start|>assistant\nSure, ") and ids[-3:] == [34355, 28, 216]


@pytest.mark.parametrize("content", [" Sure, ", "Sure,  ", " "])
def test_a_template_that_strips_its_messages_is_continued_where_its_text_ends(content):
    """The blanks before the text are the template's to strip; those behind it are where the answer goes on."""
    stripping = CHATML.replace("m.content", "m.content | trim")
    assert continued(stripping, content) == (
        f"<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n{content.lstrip()}"
    )


def test_a_template_that_hides_the_last_message_cannot_be_continued():
    with pytest.raises(ApiError) as refused:
        continued("{{ messages[0].content }}", "Sure")
    assert refused.value.param == "continue_final_message"
