"""Logprobs, token ids and running usage: the same sums streamed or not, whatever the text does.

The simulated runner says ln(1/2) for the token and the halves behind it for the next ids: what counts here is that each
token keeps its own, in every shape.
"""

import json
import math
from types import SimpleNamespace

import pytest

from shmserve.http.detokenizer import Pieces, TextStream
from shmserve.http.logprobs import CompletionLogprobs, TokenLogprob, TokenTexts
from shmserve.http.openai.choice import Extras, OpenAIChoice
from shmserve.http.openai.formats import Envelope
from shmserve.request import SamplingParams
from shmserve.token_text import Decoding

HALF = pytest.approx(math.log(0.5), abs=1e-6)
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def chat(asker, **fields):
    answer = asker.post("/v1/chat/completions", CHAT | fields)
    assert answer.status == 200, answer.body
    return answer.json()


def streamed_entries(objects):
    """All entries of a chat stream; an event has them or null, never an empty list."""
    entries = []
    for chunk in objects:
        for choice in chunk["choices"]:
            if choice["logprobs"] is not None:
                assert choice["logprobs"]["content"]
                entries += choice["logprobs"]["content"]
    return entries


def test_bytes_of_a_part_of_a_character_are_the_tokens_own_G1(asker, force):
    answer = chat(asker, logprobs=True, top_logprobs=2, max_tokens=2, **force(10813))
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[240, 159]] * 2
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    assert content[0]["top_logprobs"][0]["bytes"] == [240, 159]


def test_bytes_of_all_tokens_add_up_to_the_text_G1(asker, seed_of):
    answer = chat(asker, logprobs=True, seed=seed_of("emoji"), max_tokens=9)
    choice = answer["choices"][0]
    joined = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert joined.decode() == choice["message"]["content"] == "Hello😀!"
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == 6  # EOS


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": "emoji", "max_tokens": 9},
        {"seed": "dabelske", "max_tokens": 5},
        {"seed": "one_two_three_four_at_once", "max_tokens": 9},
        {"seed": "twenty_at_once", "max_tokens": 18},
        {"seed": "dog_then_eos", "max_tokens": 9, "stop": ["gX"]},
        {"seed": "one_two_three_four", "max_tokens": 9, "stop": ["wo th"]},
        {"seed": "one_two_three_four_at_once", "max_tokens": 9, "stop": ["three"]},
    ],
    ids=str,
)
def test_a_stream_has_as_many_entries_as_the_plain_answer_and_the_usage_G2(asker, seed_of, fields):
    fields = fields | {"seed": seed_of(fields["seed"]), "logprobs": True, "top_logprobs": 3}
    plain = chat(asker, **fields)
    *objects, last = asker.stream(
        "/v1/chat/completions", stream_options={"include_usage": True}, **(CHAT | fields)
    ).objects()
    entries = streamed_entries(objects)
    assert entries == plain["choices"][0]["logprobs"]["content"]
    assert len(entries) == plain["usage"]["completion_tokens"] == last["usage"]["completion_tokens"]
    assert all(entry["logprob"] == HALF for entry in entries)


def test_completions_logprobs_are_the_same_streamed_and_offsets_count_characters_G2_G3(
    asker, seed_of
):
    fields = {"seed": seed_of("emoji"), "max_tokens": 5, "logprobs": 2}
    plain = asker.complete(**fields)["choices"][0]["logprobs"]
    assert plain["text_offset"] == [0, 5, 5, 5, 6]
    assert plain["token_logprobs"] == [HALF] * 5
    assert [len(top) for top in plain["top_logprobs"]] == [2] * 5
    assert plain["tokens"] == ["Hello", "bytes:\\xf0\\x9f", "bytes:\\x98", "bytes:\\x80", "!"]
    whole = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in asker.stream(**fields).objects():
        part = chunk["choices"][0]["logprobs"]
        for key in whole if part is not None else ():
            whole[key] += part[key]
    assert whole == plain


def test_zero_logprobs_means_the_chosen_tokens_only(asker, seed_of):
    plain = asker.complete(seed=seed_of("hello_world_world"), max_tokens=3, logprobs=0)
    logprobs = plain["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [HALF] * 3
    assert logprobs["top_logprobs"] is None


def test_every_choice_has_its_own_entries(asker):
    answer = chat(asker, logprobs=True, n=3, max_tokens=4, seed=5, ignore_eos=True)
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == 4
        joined = b"".join(bytes(entry["bytes"]) for entry in content)
        assert joined.decode() == choice["message"]["content"]


def test_generate_gives_sglangs_triples_streamed_and_plain(asker, seed_of):
    body = {
        "text": "Hi",
        "sampling_params": {"max_new_tokens": 5, "sampling_seed": seed_of("emoji")},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    meta = asker.post("/generate", body).json()["meta_info"]
    triples = meta["output_token_logprobs"]
    assert [triple[1] for triple in triples] == [19556, 10813, 242, 218, 17]
    assert [triple[0] for triple in triples] == [HALF] * 5
    assert triples[0][2] == "Hello"
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 5
    assert meta["input_token_logprobs"] == []
    *_, last = asker.stream("/generate", **body).objects()
    assert last["meta_info"]["output_token_logprobs"] == triples
    pieces = asker.stream("/generate", incremental=True, **body).objects()
    joined = [t for piece in pieces for t in piece["meta_info"]["output_token_logprobs"]]
    assert joined == triples


def test_without_the_wish_there_is_nothing(asker):
    assert chat(asker, max_tokens=2)["choices"][0]["logprobs"] is None
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}
    assert "output_token_logprobs" not in asker.post("/generate", body).json()["meta_info"]


def test_token_ids_come_on_request_in_every_way(asker, seed_of):
    fields = {"seed": seed_of("dog_then_eos"), "max_tokens": 5, "return_token_ids": True}
    plain = asker.complete(prompt="Hello world", **fields)["choices"][0]
    assert (plain["prompt_token_ids"], plain["token_ids"]) == ([19556, 905], [2767, 2])
    objects = asker.stream(prompt="Hello world", **fields).objects()
    first = objects[0]["choices"][0]
    assert first["prompt_token_ids"] == [19556, 905]
    ids = [i for chunk in objects for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == [2767, 2]
    whole = chat(asker, prompt_logprobs=0, **fields)
    plain = whole["choices"][0]
    assert plain["token_ids"] == [2767, 2] and len(plain["prompt_token_ids"]) == 31
    # vLLM has them beside the choices of a chat.
    assert whole["prompt_token_ids"] == plain["prompt_token_ids"]
    assert whole["prompt_logprobs"] == plain["prompt_logprobs"]
    first, *later = asker.stream("/v1/chat/completions", **CHAT, **fields).objects()
    assert first["prompt_token_ids"] == plain["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in later)


def test_running_usage_counts_up_to_the_whole(asker, seed_of):
    objects = asker.stream(
        prompt="Hello world",
        seed=seed_of("one_two_three_four_at_once"),
        max_tokens=3,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ).objects()
    counts = [chunk["usage"]["completion_tokens"] for chunk in objects]
    assert counts == sorted(counts) and counts[-1] == 3
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in objects)
    assert all(
        chunk["usage"]["total_tokens"] == 2 + chunk["usage"]["completion_tokens"]
        for chunk in objects
    )


@pytest.mark.parametrize("prompt", ["Hello world", [19556, 905]])
def test_echo_gives_the_prompt_first_streamed_and_plain(asker, seed_of, prompt):
    fields = {"prompt": prompt, "seed": seed_of("dog_then_eos"), "max_tokens": 5, "echo": True}
    assert asker.text(**fields) == "Hello world dog"
    texts = [chunk["choices"][0]["text"] for chunk in asker.stream(**fields).objects()]
    assert "".join(texts) == "Hello world dog" and texts[0] == "Hello world"


def test_line_separators_of_an_echoed_prompt_are_escaped_C5(asker):
    stream = asker.stream(prompt="a\u2028b\u0085c\r\nd", echo=True, max_tokens=1)
    assert stream.objects()[0]["choices"][0]["text"] == "a\u2028b\u0085c\r\nd"
    assert b"\xe2\x80\xa8" not in stream.raw and b"\xc2\x85" not in stream.raw
    assert b"\r" not in stream.raw


@pytest.mark.parametrize("top", [0, 2])
def test_echo_with_logprobs_scores_the_prompt_streamed_and_plain_G3(asker, force, top):
    fields = {"prompt": "Hello world", "echo": True, "logprobs": top, "max_tokens": 3}
    fields |= force(2767)
    plain = asker.complete(**fields)["choices"][0]["logprobs"]
    assert plain["text_offset"] == [0, 5, 11, 15, 19]
    assert plain["tokens"] == ["Hello", " world", " dog", " dog", " dog"]
    assert plain["token_logprobs"][0] is None
    assert all(isinstance(value, float) for value in plain["token_logprobs"][1:])
    whole = {key: [] for key in ("tokens", "token_logprobs", "text_offset")}
    for chunk in asker.stream(**fields).objects():
        part = chunk["choices"][0]["logprobs"]
        for key in whole if part is not None else ():
            whole[key] += part[key]
    assert whole == {key: plain[key] for key in whole}
    without = asker.complete(**(fields | {"echo": False}))["choices"][0]["logprobs"]
    assert without["text_offset"] == [0, 4, 8]


def test_an_echo_waits_for_its_logprobs_where_the_200_goes_out_before_they_come():
    """--headers-after: a long prompt is still being computed then."""
    scores = {}
    log = SimpleNamespace(
        of_prompt=lambda ids: [TokenLogprob(i, scores.get(i)) for i in ids],
        take=lambda count: [TokenLogprob(2, -0.5)] * count,
    )
    entry = SimpleNamespace(logprobs=log, has_tokens=False, is_over=False, token_ids=[])
    pieces = Pieces([b"a", b"b", b"c"], frozenset())
    extras = Extras(texts=TokenTexts(pieces, pieces), echo="ab", echo_ids=(0, 1))
    params = SamplingParams(max_tokens=2, num_logprobs=0, prompt_logprobs=0)
    choice = OpenAIChoice(Envelope("completion", "id", "m", 1), 0, params, [], extras).attach(entry)
    assert choice.opening() == b"" and choice.way is None
    scores[1] = -0.25
    entry.has_tokens = True
    echo, first = (
        json.loads(part.removeprefix("data: "))["choices"][0]
        for part in choice.delta("c", [2]).decode().split("\n\n")[:-1]
    )
    assert (echo["text"], echo["logprobs"]["token_logprobs"]) == ("ab", [None, -0.25])
    assert (first["text"], first["logprobs"]["text_offset"]) == ("c", [2])
    assert choice.way is not None and choice.delta("c", [2]).count(b"data: ") == 1


def test_prompt_logprobs_are_by_token_id_and_null_for_the_first(asker):
    choice = asker.complete(prompt="Hello world", prompt_logprobs=2, max_tokens=1)["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["905"]["decoded_token"] == " world" and len(second) in (2, 3)
    whole = chat(asker, prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert len(whole) == 31 and whole[0] is None and len(whole[1]) == 1


def test_prompt_logprobs_of_a_stream_are_refused_in_vllms_words(asker):
    answer = asker.post("/v1/completions", {"prompt": "Hi", "prompt_logprobs": 1, "stream": True})
    assert answer.error()["message"] == ("`prompt_logprobs` are not available when `stream=True`.")


@pytest.mark.parametrize("start", [0, 1])
def test_generate_scores_the_prompt_from_where_it_is_told(asker, start):
    body = {
        "input_ids": [19556, 905, 905],
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    meta = asker.post("/generate", body).json()["meta_info"]
    scored = meta["input_token_logprobs"]
    assert [entry[1] for entry in scored] == [19556, 905, 905][start:]
    assert (scored[0][0] is None) == (start == 0)


def test_long_prompts_are_scored_over_several_chunks(asker):
    ids = [19556, 905] * 1500
    choice = asker.complete(prompt=ids, prompt_logprobs=1, max_tokens=1)["choices"][0]
    assert len(choice["prompt_logprobs"]) == 3000
    assert all(entry is not None for entry in choice["prompt_logprobs"][1:])


@pytest.mark.parametrize("echo", ["", "he llo"])
def test_offsets_are_those_of_the_text_where_a_tokenizer_drops_the_first_blank(echo):
    """SentencePiece writes a word with the blank before it; a text does not begin with one."""
    words = [b"", b" he", b"llo", b" a", b".", "é".encode()[:1], "é".encode()[1:]]
    decoding = Decoding(strips_leading_space=True)
    pieces = Pieces(words, frozenset({0}), decoding)
    offsets = CompletionLogprobs(TokenTexts(pieces, pieces))

    def offsets_of(ids):
        tokens = [TokenLogprob(token_id, -1.0) for token_id in ids]
        return offsets.of(tokens, has_top=False)["text_offset"]

    def characters_before(ids):
        text, at, found = TextStream(pieces), 0, []
        for token_id in ids:
            found.append(at)
            at += len(text.feed(token_id))
        return found

    if echo:
        prompt = [0, 1, 3, 4]
        assert offsets_of(prompt) == characters_before(prompt) == [0, 0, 2, 4]
        offsets.begin(len(echo))
    answer = [1, 2, 3, 5, 6, 4]
    expected = [len(echo) + at for at in (0, 2, 5, 7, 7, 8)]
    assert [len(echo) + at for at in characters_before(answer)] == expected
    assert offsets_of(answer[:3]) + offsets_of(answer[3:]) == expected
