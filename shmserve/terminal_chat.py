"""`shmserve chat`: a conversation in the terminal, and the same in a pipe: one question in, one answer out.

Owns: what is shown. The conversation is chat_turns.py's, what is typed chat_lines.py's.

    stdout    answers, and nothing else when it is no terminal        stderr    errors, one line each; prompts in a pipe
    Ctrl-C    while an answer comes: stops it, and the server frees its sequence; at the prompt: drops the line
    Ctrl-D    ends the chat

What a model writes is shown on a terminal without its control characters: it could move the cursor, or speak to the terminal.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

import aiohttp

from shmserve.chat_lines import LineEditor, command_of, read_message, text_of
from shmserve.chat_turns import Conversation, TurnError
from shmserve.load_report import RequestResult, figures
from shmserve.load_table import number
from shmserve.stream_reading import Piece

COMMANDS: Final = {
    "help": "show this",
    "clear": "forget the conversation; the system prompt stays",
    "system": "/system TEXT sets the system prompt, /system - removes it, /system shows it",
    "retry": "ask the last question again",
    "save": "/save FILE writes the conversation: .json as messages, anything else as Markdown",
    "quit": "end, as Ctrl-D does",
}
DIM, BOLD, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_CONTROL: Final = {c: None for c in (*range(32), *range(127, 160)) if c not in (9, 10)}


class OutputGone(Exception):
    """Who read our stdout has gone: nobody wants the rest."""


class Screen:
    """Answers and remarks on a stream: with colour and without control characters if that is a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")  # what its encoding lacks is no fault of the answer
        self.is_terminal = out.isatty()
        self._is_dim = False
        self._ends_line = True

    def piece(self, piece: Piece) -> None:
        if piece.reasoning and self.is_terminal:  # in a pipe only the answer is wanted
            self._write(piece.reasoning, is_dim=True)
        if piece.text:
            if self._is_dim:
                self._write("\n\n", is_dim=True)
            self._write(piece.text, is_dim=False)

    def _write(self, text: str, is_dim: bool) -> None:
        if self.is_terminal:
            text = text.translate(_CONTROL)
            if is_dim != self._is_dim:
                self._out.write(DIM if is_dim else PLAIN)
                self._is_dim = is_dim
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            raise OutputGone from None  # an OSError here would pass for one of the connection
        self._ends_line = text.endswith("\n") if text else self._ends_line

    def end_answer(self) -> None:
        if self._is_dim:
            self._write("", is_dim=False)
        if not self._ends_line:
            self._write("\n", is_dim=False)

    def remark(self, text: str) -> None:
        """A dim line, on a terminal only."""
        if self.is_terminal:
            text = text.translate(_CONTROL)  # names of models and endings are the server's
            self._out.write(f"{DIM}{text}{PLAIN}\n")
            self._out.flush()


def timing_line(result: RequestResult) -> str:
    """What the client saw of one answer."""
    itl = figures("itl", result.itls_ms)
    parts = [f"TTFT {number(result.ttft_ms)} ms"]
    if itl["itl_p50_ms"] is not None:
        parts.append(f"ITL p50 {number(itl['itl_p50_ms'])} p99 {number(itl['itl_p99_ms'])} ms")
    parts.append(f"{result.num_tokens} token{'s' * (result.num_tokens != 1)}")
    if result.tpot_ms:
        parts.append(f"{number(1000 / result.tpot_ms)} tokens/s")
    if result.finish_reason not in (None, "stop"):
        parts.append(f"ended by {result.finish_reason}")
    return " \N{MIDDLE DOT} ".join(parts)


class TerminalChat:
    """One chat over one event loop. `run` is the loop of a person's turns, `once` the pipe's."""

    def __init__(self, conversation: Conversation, screen: Screen, errors: TextIO) -> None:
        self._conversation = conversation
        self._screen = screen
        self._errors = errors
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None

    def close(self) -> None:
        """Close the connection and the loop."""
        if self._session is not None:
            self._runner.run(self._session.close())
        self._runner.close()

    def _ask(self, question: str) -> RequestResult:
        """One turn. Raises TurnError; KeyboardInterrupt when the turn has been cancelled by it and is over."""

        async def turn() -> RequestResult:
            if self._session is None:
                self._session = self._conversation.target.session(None)
            return await self._conversation.turn(self._session, question, self._screen.piece)

        try:
            result = self._runner.run(turn())
            self._screen.end_answer()
            return result
        except OutputGone:
            raise
        except BaseException:
            self._screen.end_answer()
            raise

    def once(self, question: str) -> None:
        """One question, one answer. Raises TurnError, KeyboardInterrupt, OutputGone."""
        self._screen.remark(timing_line(self._ask(question)))

    def run(self, editor: LineEditor, name: str) -> None:
        """Until Ctrl-D or /quit."""
        self._screen.remark(
            f"{name}. /help shows the commands; Ctrl-C stops an answer, Ctrl-D ends."
        )
        prompt, more = ">>> ", "... "
        if self._screen.is_terminal:
            prompt = f"\001{BOLD}\002>>> \001{PLAIN}\002"
        while True:
            try:
                message = read_message(editor.read_line, prompt, more)
            except EOFError:
                self._screen.remark("")
                return
            except KeyboardInterrupt:
                self._screen.remark("\n(Ctrl-D ends)")
                continue
            except UnicodeDecodeError as error:
                self._say(f"that line is no {error.encoding} text; nothing was sent")
                continue
            command = command_of(message)
            if command is not None:
                if command[0] == "quit":
                    return
                self._obey(*command)
            elif message:
                self._turn(text_of(message))

    def _turn(self, question: str) -> None:
        try:
            self._screen.remark(timing_line(self._ask(question)) + "\n")
        except TurnError as error:
            self._say(str(error))
        except KeyboardInterrupt:
            self._screen.remark("(stopped)\n")

    def _say(self, text: str) -> None:
        self._errors.write(f"shmserve: error: {text}\n")
        self._errors.flush()

    def _obey(self, word: str, rest: str) -> None:
        commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "clear": self._clear,
            "system": self._system,
            "retry": self._retry,
            "save": self._save,
        }
        if word not in commands:
            self._say(f"there is no /{word[:40]}; /help shows the commands")
            return
        commands[word](rest)

    def _help(self, _: str) -> None:
        for word, what in COMMANDS.items():
            self._screen.remark(f"  /{word:<8}{what}")
        self._screen.remark(
            '  Many lines: end one with \\, or put """ before the first and after the last.'
        )

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._screen.remark("(a new conversation)")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "-" else text
        self._screen.remark(f"(system prompt: {self._conversation.system or 'none'})")

    def _retry(self, _: str) -> None:
        question = self._conversation.last_question()
        if question:
            self._turn(question)
        else:
            self._say("there is no question to ask again")

    def _save(self, path: str) -> None:
        if not path:
            self._say("say where: /save FILE")
            return
        messages = self._conversation.whole()
        if path.endswith(".json"):
            text = json.dumps({"messages": messages}, indent=1, ensure_ascii=False) + "\n"
        else:
            text = "\n".join(f"## {m['role']}\n\n{m['content']}\n" for m in messages)
        try:
            Path(path).expanduser().write_bytes(text.encode(errors="backslashreplace"))
        except (OSError, RuntimeError, ValueError) as error:  # ~ of nobody; a NUL in the name
            self._say(f"/save {path}: {getattr(error, 'strerror', None) or error}")
            return
        self._screen.remark(f"({len(messages)} messages in {path})")


def chat(conversation: Conversation, question: str, history_path: str, name: str) -> None:
    """The command: one answer to `question`, or a conversation if it is "". Raises TurnError, KeyboardInterrupt, OutputGone."""
    chat_ = TerminalChat(conversation, Screen(sys.stdout), sys.stderr)
    try:
        if question:
            chat_.once(question)
            return
        editor = LineEditor(history_path, COMMANDS)
        try:
            chat_.run(editor, name)
        finally:
            editor.close()
    finally:
        chat_.close()
