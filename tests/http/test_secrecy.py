"""--log-prompts: what clients send is logged when it is asked for. (That it is not otherwise: test_security.py.)"""

import asyncio
import json
import logging

from puppet import Puppet, finish_record, read_answer, tokens_record

from shmserve.config import HttpConfig
from shmserve.http.connection import MOST_LOGGED_BYTES

CANARY = "xylophone-canary-5152"


def test_a_prompt_that_is_asked_for_is_one_line_of_the_log_and_a_long_one_is_cut(
    default_model, caplog
):
    async def scenario():
        async with Puppet(default_model, HttpConfig(log_prompts=True)) as puppet:
            for prompt in (f"{CANARY}\nnext line", CANARY + " and so on" * 1_000):
                reader, _ = await puppet.ask(prompt=prompt, max_tokens=1)
                request = await puppet.submitted()
                puppet.put(tokens_record(request.req_id, [19556]), finish_record(request.req_id))
                status, _ = await read_answer(reader)
                assert status == 200

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    short, long = [r.getMessage() for r in caplog.records if CANARY in r.getMessage()]
    assert short.startswith("POST /v1/completions: ") and "\n" not in short
    assert json.dumps(f"{CANARY}\nnext line")[1:-1] in short.replace("\\\\", "\\")
    assert len(long) < MOST_LOGGED_BYTES + 100 and long.endswith(" bytes")
