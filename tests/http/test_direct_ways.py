"""Streams with stop strings and with logprobs: the pump writes their tokens by itself, and their text is what the slow way gives."""

import numpy as np
import pytest
from puppet import events_of, finish_record, read_answer, text_of, tokens_record, until
from stuck import DOG, WORLD, run

from shmserve.request import FinishReason
from shmserve.wire.logprobs import pack_top_logprobs


@pytest.mark.parametrize(("included", "text"), [(False, " world" * 3 + " d"), (True, " world" * 3 + " dog d")])  # fmt: skip
def test_a_stop_string_is_found_behind_tokens_that_went_past_the_scan(
    default_model, included, text
):
    async def scenario(puppet):
        reader, _ = await puppet.ask(
            stream=True, max_tokens=9, stop=["og d"], include_stop_str_in_output=included
        )
        req_id = (await puppet.submitted()).req_id
        puppet.put(tokens_record(req_id, [WORLD]))
        entry = await until(lambda: puppet.client.in_flight.get(req_id), "it is in flight")
        await until(lambda: entry.direct is not None, "nothing is held")
        entry.on_tokens = None  # the pump alone
        puppet.put(tokens_record(req_id, [WORLD], 1), tokens_record(req_id, [WORLD], 2))
        await until(lambda: puppet.board["tokens"] == 3, "they are read")
        assert entry.token_ids == []
        puppet.put(tokens_record(req_id, [DOG], 3))
        await until(lambda: entry.token_ids == [DOG], "a token that may begin it is left to others")
        puppet.put(
            tokens_record(req_id, [DOG], 4),
            finish_record(
                req_id,
                FinishReason.STOP_STRING,
                prompt_tokens=1,
                completion_tokens=5,
                matched_stop=0,
                keep_bytes=len(text),
            ),
        )
        _, body = await read_answer(reader)
        events = events_of(body)
        assert text_of(events) == text
        last = events[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "og d")

    run(scenario, default_model)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_with_logprobs_are_written_by_the_pump(default_model, path, version):
    async def scenario(puppet):
        fields = {"logprobs": 2}
        if "chat" in path:
            fields = {"logprobs": True, "top_logprobs": 2, "prompt": None}
            fields["messages"] = [{"role": "user", "content": "Hi"}]
        reader, _ = await puppet.ask(path, stream=True, max_tokens=9, version=version, **fields)
        req_id = (await puppet.submitted()).req_id

        def token(index):
            ids, values = np.array([WORLD, DOG], np.int32), np.array([-0.5, -1], np.float32)
            top = pack_top_logprobs(req_id, index, ids, values, 1)
            slot = bytearray(tokens_record(req_id, [WORLD], index))
            slot[96:100] = np.float32(-0.5).tobytes()
            return top + bytes(slot)

        puppet.put(token(0))
        entry = await until(lambda: puppet.client.in_flight.get(req_id), "it is in flight")
        await until(lambda: entry.direct is not None, "its first token is written")
        entry.on_tokens = None
        puppet.put(token(1), token(2))
        await until(lambda: puppet.board["tokens"] == 3, "they are read")
        assert entry.token_ids == []
        puppet.put(finish_record(req_id, prompt_tokens=1, completion_tokens=3))
        status, body = await read_answer(reader)
        assert status == 200
        choices = [event["choices"][0] for event in events_of(body) if event != "[DONE]"]
        told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        assert len(told) == 3
        if "chat" in path:
            assert told[1:] == [told[0]] * 2
            assert [top["token"] for top in told[0]["content"][0]["top_logprobs"]] == [
                " world",
                " dog",
            ]
        else:
            assert [part.pop("text_offset") for part in told] == [[0], [6], [12]]
            assert (
                told
                == [
                    {
                        "tokens": [" world"],
                        "token_logprobs": [-0.5],
                        "top_logprobs": [{" world": -0.5, " dog": -1.0}],
                    }
                ]
                * 3
            )

    run(scenario, default_model)
