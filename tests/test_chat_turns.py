"""A conversation against small servers, and how its answers are shown."""

import asyncio
import io
import json

import pytest
from aiohttp import web

from shmserve.chat_turns import Conversation, TurnError
from shmserve.load_report import RequestResult
from shmserve.stream_reading import Piece
from shmserve.target import Target, TargetError, served_model
from shmserve.terminal_chat import OutputGone, Screen, TerminalChat, timing_line


def event(**choice) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


HELLO = (event(delta={"content": "Hel"}), event(delta={"content": "lo"}))
END = (event(delta={}, finish_reason="stop"), b"data: [DONE]\n\n")
FAILED = b'data: {"error": {"message": "the worker\\ndied"}}\n\n'


class Fake:
    """A server that answers with these bytes, and what it was asked."""

    def __init__(self, *frames: bytes, status: int = 200, hangs: bool = False) -> None:
        self.frames, self.status, self.hangs = frames, status, hangs
        self.bodies: list[dict] = []
        self.left = asyncio.Event()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        for frame in self.frames:
            await response.write(frame)
        try:
            while self.hangs:
                await asyncio.sleep(0.01)
                await response.write(b": waiting\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        return response


async def with_server(fake: Fake, use) -> Conversation:
    """use(conversation, session) while the server runs; the conversation."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.chat)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    target = Target(f"http://127.0.0.1:{runner.addresses[0][1]}")
    conversation = Conversation(target, {"model": "m", "temperature": 0.5}, "be brief")
    try:
        async with target.session(None) as session:
            await use(conversation, session)
    finally:
        await runner.cleanup()
    return conversation


def asked(fake: Fake, *questions: str) -> tuple[Conversation, list[Piece], list[str]]:
    """The conversation after these questions, what was shown, and the errors."""
    shown: list[Piece] = []
    errors: list[str] = []

    async def use(conversation, session):
        for question in questions:
            try:
                await conversation.turn(session, question, shown.append)
            except TurnError as error:
                errors.append(str(error))

    return asyncio.run(with_server(fake, use)), shown, errors


def test_the_whole_conversation_is_sent_with_the_system_prompt_first():
    fake = Fake(*HELLO, *END)
    conversation, shown, errors = asked(fake, "one", "two")
    assert errors == []
    assert [piece.text for piece in shown] == ["Hel", "lo"] * 2
    assert [message["role"] for message in fake.bodies[1]["messages"]] == [
        *("system", "user", "assistant", "user")
    ]
    assert fake.bodies[1]["messages"][2]["content"] == "Hello"
    assert (fake.bodies[0]["temperature"], fake.bodies[0]["stream"]) == (0.5, True)
    assert len(conversation.messages) == 4


def test_a_refused_question_is_taken_back_and_the_message_is_one_line():
    fake = Fake(json.dumps({"error": {"message": "too\nlong"}}).encode(), status=400)
    conversation, _, errors = asked(fake, "one")
    assert errors == ["too long"]
    assert conversation.messages == []


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ((*HELLO, FAILED, b"data: [DONE]\n\n"), "the worker died"),
        (HELLO, "ended early"),
        ((*HELLO, b"data: {no\n\n"), "no stream of chunks"),
    ],
)
def test_an_answer_that_breaks_stays_as_far_as_it_came(frames, words):
    conversation, _, (error,) = asked(Fake(*frames), "one")
    assert words in error
    assert conversation.messages[-1] == {"role": "assistant", "content": "Hello"}


def test_an_empty_answer_is_an_answer():
    conversation, _, errors = asked(Fake(*END), "one")
    assert errors == []
    assert conversation.messages[-1] == {"role": "assistant", "content": ""}


def test_a_cancelled_turn_leaves_its_connection_and_keeps_what_came():
    async def run() -> Conversation:
        fake = Fake(*HELLO, hangs=True)

        async def use(conversation, session):
            came = asyncio.Event()
            turn = asyncio.create_task(conversation.turn(session, "one", lambda piece: came.set()))
            await came.wait()
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
            await asyncio.wait_for(fake.left.wait(), 30)

        return await with_server(fake, use)

    conversation = asyncio.run(run())
    assert conversation.messages[-1]["role"] == "assistant"
    assert "Hello".startswith(conversation.messages[-1]["content"])


def test_a_retry_takes_the_last_question_and_its_answer_back():
    conversation = Conversation(Target("http://x"), {})
    assert conversation.last_question() == ""
    for role in ("user", "assistant", "user", "assistant"):
        number = len(conversation.messages)
        conversation.messages.append({"role": role, "content": f"{role} {number}"})
    assert conversation.last_question() == "user 2"
    assert len(conversation.messages) == 2


def test_a_server_that_names_no_model_or_is_none_is_one_line():
    async def ask(handler) -> str:
        app = web.Application()
        app.router.add_get("/v1/models", handler)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        target = Target(f"http://127.0.0.1:{runner.addresses[0][1]}", api_key="secret")
        try:
            async with target.session(5) as session:
                return await served_model(target, session)
        finally:
            await runner.cleanup()

    async def models(request):
        return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})

    async def none(request):
        return web.json_response({"data": []})

    async def locked(request):
        return web.json_response({"error": {"message": "no"}}, status=401)

    async def page(request):
        return web.Response(text="<html>", status=404)

    assert asyncio.run(ask(models)) == "a"
    for handler, words in ((none, "--model"), (locked, "--api-key"), (page, "404")):
        with pytest.raises(TargetError, match=words) as caught:
            asyncio.run(ask(handler))
        assert "\n" not in str(caught.value)
        assert "secret" not in str(caught.value) + repr(Target("", api_key="secret"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_terminal_gets_no_control_characters_of_a_model_and_a_pipe_gets_every_byte():
    text = "a\x1b[2J\x07b\x9b31m\tc\nd"
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        Screen(out).piece(Piece(text))
    assert terminal.getvalue() == "a[2Jb31m\tc\nd"
    assert pipe.getvalue() == text


def test_reasoning_is_dim_on_a_terminal_and_left_out_of_a_pipe():
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        screen = Screen(out)
        screen.piece(Piece("", "hm"))
        screen.piece(Piece("so"))
        screen.end_answer()
        screen.remark("a remark")
    assert terminal.getvalue() == "\x1b[2mhm\n\n\x1b[0mso\n\x1b[2ma remark\x1b[0m\n"
    assert pipe.getvalue() == "so\n"


def test_a_reader_that_has_gone_is_no_broken_connection():
    with pytest.raises(OutputGone):
        Screen(ClosedPipe()).piece(Piece("x"))


def test_the_line_behind_an_answer_has_what_the_client_saw():
    arrivals = tuple(20_000_000 + i * 10_000_000 for i in range(3))
    result = RequestResult(0, 0, 0, 0, 200, None, arrivals, 3, finish_reason="length")
    assert timing_line(result) == (
        "TTFT 20.0 ms \N{MIDDLE DOT} ITL p50 10.0 p99 10.0 ms \N{MIDDLE DOT} 3 tokens "
        "\N{MIDDLE DOT} 100 tokens/s \N{MIDDLE DOT} ended by length"
    )
    one = RequestResult(0, 0, 0, 0, 200, None, arrivals[:1], 1, finish_reason="stop")
    assert timing_line(one) == "TTFT 20.0 ms \N{MIDDLE DOT} 1 token"


class Lines:
    """An editor that types these lines; KeyboardInterrupt where one is that class."""

    def __init__(self, *lines) -> None:
        self._lines = list(lines)

    def read_line(self, prompt: str) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line


def test_commands_change_the_conversation_and_an_unknown_one_is_one_line(tmp_path):
    out, errors = Terminal(), io.StringIO()
    conversation = Conversation(Target("http://127.0.0.1:9"), {"model": "m"})
    conversation.messages += [{"role": "user", "content": "a"}]
    chat = TerminalChat(conversation, Screen(out), errors)
    note, data = tmp_path / "a.md", tmp_path / "a.json"
    missing = tmp_path / "no" / "x"
    editor = Lines(
        *("/help", "/system be brief", f"/save {note}", f"/save {data}", KeyboardInterrupt),
        *("", "/nonsense", "/save", f"/save {missing}", "/clear", "/retry", "/quit", "never read"),
    )
    try:
        chat.run(editor, "m")
    finally:
        chat.close()
    assert editor.read_line("") == "never read"
    assert conversation.system == "be brief"
    assert conversation.messages == []
    assert note.read_text() == "## system\n\nbe brief\n\n## user\n\na\n"
    assert json.loads(data.read_text())["messages"][1] == {"role": "user", "content": "a"}
    assert "Ctrl-D ends" in out.getvalue() and "/retry" in out.getvalue()
    lines = errors.getvalue().splitlines()
    assert len(lines) == 4 and all(line.startswith("shmserve: error: ") for line in lines)
    assert "/nonsense" in lines[0] and "No such file" in lines[2]


def test_a_server_that_is_gone_ends_the_turn_and_not_the_chat():
    out, errors = Terminal(), io.StringIO()
    conversation = Conversation(Target("http://127.0.0.1:9"), {"model": "m"})
    chat = TerminalChat(conversation, Screen(out), errors)
    try:
        chat.run(Lines("hello", "again"), "m")
    finally:
        chat.close()
    assert errors.getvalue().count("nobody answers on http://127.0.0.1:9") == 2
    assert conversation.messages == []


def test_a_retry_asks_what_got_no_answer_and_leaves_the_answers_before_it():
    refusals = Fake(json.dumps({"error": {"message": "full"}}).encode(), status=503)
    conversation, _, errors = asked(refusals, "one")
    conversation.messages += [
        {"role": "user", "content": "zero"},
        {"role": "assistant", "content": "0"},
    ]
    assert errors == ["full"]
    assert conversation.last_question() == "one"
    assert [message["content"] for message in conversation.messages] == ["zero", "0"]
    conversation.clear()
    assert conversation.last_question() == ""


def test_what_a_server_calls_its_model_is_no_command_for_the_terminal():
    out = Terminal()
    Screen(out).remark("m\x1b]0;title\x07\x9b2J")
    assert out.getvalue() == "\x1b[2mm]0;title2J\x1b[0m\n"


def test_a_character_that_stdout_cannot_write_does_not_end_the_answer():
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    Screen(out).piece(Piece("caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{GRINNING FACE} \ud83d!"))
    assert out.buffer.getvalue() == b"caf\xe9 ? ?!"


def test_nothing_that_is_typed_ends_the_chat(tmp_path):
    class Strange(Lines):
        def read_line(self, prompt: str) -> str:
            line = super().read_line(prompt)
            if line is UnicodeDecodeError:
                raise UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "invalid")
            return line

    errors = io.StringIO()
    conversation = Conversation(Target("http://127.0.0.1:9"), {"model": "m"})
    conversation.messages += [{"role": "user", "content": "\udce9"}]
    chat = TerminalChat(conversation, Screen(io.StringIO()), errors)
    saved = tmp_path / "a.md"
    editor = Strange(
        UnicodeDecodeError, "/save ~nobody-of-this-name/x", "/save a\0b", f"/save {saved}"
    )
    try:
        chat.run(editor, "m")
    finally:
        chat.close()
    assert saved.read_text() == "## user\n\n\\udce9\n"
    lines = errors.getvalue().splitlines()
    assert len(lines) == 3 and "no utf-8 text" in lines[0]
    assert all("/save" in line for line in lines[1:])
