"""Text over HTTP: characters split over tokens, and stop strings. The same in every endpoint, streamed or not (`every_way`)."""

import json

import pytest
from serving import Stream, every_way

from shmserve.http.detokenizer import escape


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("dabelske", "ďábelské"),
        ("emoji", "Hello😀!"),
    ],
)
def test_a_character_split_over_tokens_is_sent_whole_A1(asker, seed_of, ids_of, script, text):
    told = every_way(asker, seed=seed_of(script), max_tokens=len(ids_of(script)))
    assert told.text == text
    assert not any("\ufffd" in delta for delta in told.deltas)


def test_a_part_of_a_character_alone_is_no_event_A1(asker, seed_of):
    told = every_way(asker, seed=seed_of("emoji"), max_tokens=5)
    assert [delta for delta in told.deltas if delta] == ["Hello", "😀", "!"]


def test_the_first_tokens_blank_is_kept_A2(asker, seed_of, force):
    assert every_way(asker, seed=seed_of("hello_world_world"), max_tokens=3).text == (
        "Hello world world"
    )
    assert every_way(asker, prompt="Hello", max_tokens=2, **force(905)).text == " world world"


def test_endless_parts_of_characters_come_out_as_they_become_hopeless_A3(asker, force):
    stream = asker.stream(max_tokens=300, **force(10813))
    texts = [chunk["choices"][0]["text"] for chunk in stream.objects()]
    assert "".join(texts) == "\ufffd" * 300
    # Token k + 1 settles token k: nothing is held longer, so nearly every token is an event.
    assert len([text for text in texts if text]) >= 300
    assert max(map(len, texts)) == 1


def test_a_genuine_replacement_character_is_text_A4(asker, seed_of, force):
    assert every_way(asker, seed=seed_of("replacement_inside"), max_tokens=3).text == "Hello\ufffd!"
    told = every_way(asker, seed=seed_of("replacement_last"), max_tokens=9)
    assert (told.text, told.finish) == ("end\ufffd", "stop")
    told = every_way(asker, max_tokens=3, **force(24211))
    assert (told.text, told.num_tokens) == ("\ufffd" * 3, 3)


@pytest.mark.parametrize(
    ("skip", "text"), [(True, "Hello world"), (False, "Hello<|endoftext|> world")]
)
def test_special_tokens_are_skipped_or_shown_without_blanks_A5(asker, seed_of, skip, text):
    told = every_way(
        asker,
        seed=seed_of("special_inside"),
        max_tokens=3,
        ignore_eos=True,
        skip_special_tokens=skip,
    )
    assert told.text == text


def test_a_bad_order_of_bytes_is_text_too_A6(asker, seed_of):
    assert every_way(asker, seed=seed_of("bad_order"), max_tokens=4).text == "😘\ufffd"


def test_held_bytes_go_out_before_the_plain_token_behind_them_A6(asker, seed_of, ids_of):
    """The fast path writes plain tokens by itself: not while something is held back from before."""
    script = "unfinished_then_plain"
    told = every_way(asker, seed=seed_of(script), max_tokens=len(ids_of(script)))
    assert told.text == "Hello\ufffd! world\ufffd world"  # F0 9F 98 is one hopeless beginning


def test_max_tokens_inside_a_character_tells_the_same_everywhere_A7(asker, force):
    told = every_way(asker, max_tokens=1, **force(40303))
    assert (told.text, told.finish, told.num_tokens) == (" \ufffd", "length", 1)


def test_several_tokens_of_one_step_all_arrive(asker, seed_of):
    told = every_way(asker, seed=seed_of("twenty_at_once"), max_tokens=20)
    assert told.text == "one two three four" * 5
    assert told.num_tokens == 20


def test_stop_string_split_over_tokens_does_not_leak_its_first_part_B1(asker, force):
    told = every_way(asker, stop=["og d"], max_tokens=8, **force(2767))
    assert (told.text, told.finish, told.matched) == (" d", "stop", "og d")
    assert told.num_tokens == 2
    assert not any("o" in delta for delta in told.deltas)


def test_text_held_for_a_stop_comes_at_the_end_B2(asker, seed_of, force):
    told = every_way(asker, stop=["gX"], max_tokens=3, **force(2767))
    assert (told.text, told.finish) == (" dog dog dog", "length")
    told = every_way(asker, stop=["gX"], max_tokens=9, seed=seed_of("dog_then_eos"))
    assert (told.text, told.finish, told.matched) == (" dog", "stop", 2)


@pytest.mark.parametrize("stop", ["o", ["o"]])
def test_a_stop_may_end_inside_a_token_B3(asker, force, stop):
    told = every_way(asker, stop=stop, max_tokens=8, **force(2767))
    assert (told.text, told.finish, told.num_tokens) == (" d", "stop", 1)


@pytest.mark.parametrize("script", ["one_two_three_four_at_once", "one_two_three_four"])
@pytest.mark.parametrize("stops", [["four", "three", "two"], ["two", "four", "three"]])
def test_the_stop_that_is_earliest_in_the_text_wins_B4(asker, seed_of, script, stops):
    told = every_way(asker, seed=seed_of(script), max_tokens=8, stop=stops)
    assert (told.text, told.matched) == ("one ", "two")


def test_a_stop_inside_the_token_limit_wins_and_one_behind_it_does_not_count_B5(asker, seed_of):
    told = every_way(asker, seed=seed_of("stop_inside_limit"), max_tokens=5, stop=["STOP"])
    assert (told.text, told.finish, told.num_tokens) == ("12", "stop", 3)
    told = every_way(asker, seed=seed_of("stop_behind_limit"), max_tokens=5, stop=["STOP"])
    assert (told.text, told.finish, told.num_tokens) == ("12345", "length", 5)


@pytest.mark.parametrize("stop", ["", [""], ["", "x"], [1], [None], ["x", 1], {}])
def test_an_empty_stop_string_or_one_of_another_type_is_refused_B6(asker, stop):
    for path, body in (
        ("/v1/completions", {"prompt": "Hi", "stop": stop}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stop": stop}),
        ("/generate", {"text": "Hi", "sampling_params": {"stop": stop}}),
    ):
        for more in ({}, {"stream": True}):
            answer = asker.post(path, body | more)
            assert answer.status == 400
            assert "stop" in answer.error()["param"]


@pytest.mark.parametrize("stop", [[], None])
def test_no_stop_strings_is_as_good_as_none_B6(asker, force, stop):
    told = every_way(asker, stop=stop, max_tokens=2, **force(2767))
    assert (told.text, told.finish) == (" dog dog", "length")


@pytest.mark.parametrize("stop", ["d.g", "(", "["])
def test_stop_strings_are_literal_B7(asker, force, stop):
    told = every_way(asker, stop=[stop], max_tokens=4, **force(2767))
    assert (told.text, told.finish) == (" dog dog dog dog", "length")


def test_a_stop_that_is_a_line_end_matches_B7(asker, force):
    told = every_way(asker, stop=["\n"], max_tokens=4, **force(198))
    assert (told.text, told.finish, told.num_tokens) == ("", "stop", 1)


def test_the_stop_string_is_kept_on_request_and_nothing_behind_it_B8(asker, force):
    told = every_way(
        asker, stop=["og d"], include_stop_str_in_output=True, max_tokens=8, **force(2767)
    )
    assert (told.text, told.finish, told.matched) == (" dog d", "stop", "og d")


def test_a_stop_string_counts_from_min_tokens_on(asker, force):
    told = every_way(asker, stop=["dog"], min_tokens=3, max_tokens=8, **force(2767))
    assert (told.text, told.finish, told.num_tokens) == (" dog dog ", "stop", 3)


def test_an_end_at_the_first_token_is_a_whole_answer_B9(asker, force):
    told = every_way(asker, max_tokens=5, **force(2))
    assert (told.text, told.finish, told.matched, told.num_tokens) == ("", "stop", 2, 1)
    messages = [{"role": "user", "content": "Hi"}]
    answer = asker.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 5, "n": 2, **force(2)}
    ).json()
    assert [c["message"]["content"] for c in answer["choices"]] == ["", ""]
    stream = asker.stream("/v1/chat/completions", messages=messages, max_tokens=5, n=2, **force(2))
    seen = {0: [], 1: []}
    for chunk in stream.objects():
        for choice in chunk["choices"]:
            seen[choice["index"]].append((choice["delta"].get("role"), choice["finish_reason"]))
    assert seen == {i: [("assistant", None), (None, "stop")] for i in (0, 1)}


def test_ignore_eos_goes_on_and_the_text_stays_empty_K5(asker, force):
    told = every_way(asker, max_tokens=5, ignore_eos=True, **force(2))
    assert (told.text, told.finish, told.num_tokens) == ("", "length", 5)


def test_endoftext_is_no_end_by_this_models_metadata_K5(asker, force):
    told = every_way(asker, max_tokens=4, **force(0))
    assert (told.text, told.finish, told.num_tokens) == ("", "length", 4)


def test_a_stop_token_of_the_request_ends_it_and_has_no_text(asker, seed_of):
    told = every_way(asker, seed=seed_of("one_two_three_four"), stop_token_ids=[1296], max_tokens=9)
    assert (told.text, told.finish, told.matched, told.num_tokens) == ("one two", "stop", 1296, 3)


def test_line_separators_in_the_text_never_stand_raw_on_the_wire_C5(asker, seed_of, ids_of):
    script = "separators"
    text = "a\u2028b\u0085c\r\nd"
    for path, more in (
        ("/v1/completions", {"prompt": "Hi", "seed": seed_of(script), "max_tokens": 10}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "seed": seed_of(script),
                "max_tokens": 10,
            },
        ),
        (
            "/generate",
            {
                "text": "Hi",
                "sampling_params": {"sampling_seed": seed_of(script), "max_new_tokens": 10},
            },
        ),
    ):
        stream: Stream = asker.stream(path, **more)
        objects = stream.objects()
        for raw in (b"\r", b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85"):
            assert raw not in stream.raw
        if path == "/generate":
            assert objects[-1]["text"] == text
        else:
            choices = [chunk["choices"][0] for chunk in objects]
            got = "".join(
                c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices
            )
            assert got == text


@pytest.mark.parametrize("text", ["a\u2028b", "\u0085", 'q"\\', "é😀\n", "\x00\x1a\x7f"])
def test_an_escaped_piece_is_the_inside_of_a_json_string(text):
    assert json.loads(b'"' + escape(text) + b'"') == text
    assert not {b"\xe2\x80\xa8", b"\xc2\x85", b"\n"} & {escape(text)}


def test_a_stop_regex_ends_and_nothing_of_the_match_is_shown(asker, seed_of):
    told = every_way(asker, seed=seed_of("hello_world_world"), max_tokens=3, stop_regex="o w[a-z]r")
    assert (told.text, told.finish, told.matched) == ("Hell", "stop", "o wor")


@pytest.mark.parametrize("pattern", ["(", "a+", "^a", ["a"] * 33])
def test_a_stop_regex_that_cannot_be_honoured_is_a_400(asker, pattern):
    answer = asker.post("/v1/completions", {"prompt": "Hi", "stop_regex": pattern, "stream": True})
    assert answer.status == 400 and "stop_regex" in answer.json()["error"]["message"]
