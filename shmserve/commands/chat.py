"""`shmserve chat`: the options, and whether there is a person at the other end or a pipe.

Owns: what becomes of the command line and of stdin. The chat itself is terminal_chat.py's.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import click

from shmserve.commands.client_options import target_of, target_options

_FIELDS = ("max_tokens", "temperature", "top_p", "seed", "stop")


@click.command()
@click.argument("prompt", required=False, default="")
@target_options
@click.option("--system", default="", help="The system prompt.")
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Of each answer; what fits if not given."
)
@click.option("--temperature", type=click.FloatRange(0), help="0 is greedy.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the probability that is drawn from.",
)
@click.option("--seed", type=int, help="The same seed, the same answer.")
@click.option("--stop", multiple=True, help="A text that ends an answer; may be repeated.")
@click.option("--no-history", is_flag=True, help="Keep no history of what is typed.")
def chat(
    prompt: str,
    url: str,
    uds: str,
    instance: str,
    port: int | None,
    api_key: str,
    ca_file: str,
    model: str,
    system: str,
    no_history: bool,
    **fields: Any,
) -> int:
    """Chat with a running server, here or anywhere, streaming.

    In a terminal: /help shows the commands, Ctrl-C stops an answer, Ctrl-D ends. With PROMPT, or with stdin from a pipe or a file,
    one answer to both together, plain on stdout.
    """
    import asyncio

    from shmserve.chat_turns import Conversation
    from shmserve.log_file import state_dir
    from shmserve.target import PROBE_TIMEOUT_S, served_model
    from shmserve.terminal_chat import OutputGone
    from shmserve.terminal_chat import chat as run

    question = _question(prompt)
    target = target_of(url, uds, instance, port, api_key, ca_file)

    async def ask() -> str:
        async with target.session(PROBE_TIMEOUT_S) as session:
            return await served_model(target, session)

    model = model or asyncio.run(ask())
    given = {name: fields[name] for name in _FIELDS if fields[name] not in (None, ())}
    conversation = Conversation(target, {"model": model} | given, system)
    history = ""
    if not question and not no_history:
        history = os.path.join(state_dir(os.environ), "chat_history")
    try:
        run(conversation, question, history, f"{model} on {target.name}")
    except OutputGone:
        # Else the interpreter would flush into the closed pipe at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


def _question(prompt: str) -> str:
    """What is asked at once: the argument and what stdin holds, unless that is a terminal. "" is a person's."""
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"stdin is no UTF-8 text (byte {error.start})") from None
    question = "\n\n".join(part for part in (prompt, text.strip()) if part)
    if not question:
        raise click.UsageError("there is nothing to ask: no PROMPT, and stdin is empty")
    return question
