"""What is typed into a chat."""

import pytest

from shmserve.chat_lines import command_of, read_message, text_of


def typed(*lines):
    """A reader of these lines, then the end of input; and the prompts that it was given."""
    rest, prompts = list(lines), []

    def read_line(prompt):
        prompts.append(prompt)
        if not rest:
            raise EOFError
        return rest.pop(0)

    return read_line, prompts


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "hello"),
        (["  hello  "], "hello"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (["a\\"], "a"),  # the input ended
        (['"""', "a", "", "b", '"""'], "a\n\nb"),
        (['"""a', 'b"""'], "a\nb"),
        (['"""a"""'], "a"),
        (['"""', "a"], "a"),
        ([""], ""),
        (["pasted\nlines"], "pasted\nlines"),
    ],
)
def test_a_message_is_one_line_or_many(lines, message):
    read_line, prompts = typed(*lines)
    assert read_message(read_line, "> ", ". ") == message
    assert prompts[0] == "> " and set(prompts[1:]) <= {". "}


def test_the_end_of_input_before_a_message_is_told():
    with pytest.raises(EOFError):
        read_message(typed()[0], "> ", ". ")


def test_a_command_begins_with_one_slash():
    assert command_of("/save a b.md") == ("save", "a b.md")
    assert command_of("/clear") == ("clear", "")
    assert command_of("clear") is None
    assert command_of("//clear") is None
    assert text_of("//clear") == "/clear"
    assert text_of("a/b") == "a/b"
