"""The page in a real browser: the chat, its times, the panel, the keyboard, the keys, the deaths."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import Server, until

from shmserve.models import PreparedModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MARKUP = '<img src=x onerror="alert(1)"><script>alert(2)</script> & <b>bold</b>'
MARKUP_SEED = 2_000_001
API_KEY, ADMIN_KEY = "of-a-client-0123456789", "of-the-operator-0123456789"


@pytest.fixture(scope="module")
def server(
    start: Callable[..., Server], default_model: PreparedModel, tmp_path_factory: Any
) -> Server:
    ids = default_model.tokenizer().encode(MARKUP, add_special_tokens=False).ids
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps({MARKUP_SEED: [[token_id] for token_id in ids] + [[2]]}))
    return start("--step-ms=20", f"--script={script}")


def load(server: Server, streams: int, tokens: int) -> list[threading.Thread]:
    """Streams that run beside the page."""

    def one() -> None:
        server.stream(max_tokens=tokens, ignore_eos=True).objects()

    threads = [threading.Thread(target=one) for _ in range(streams)]
    for thread in threads:
        thread.start()
    return threads


def test_answer_streams_piece_by_piece_and_each_tells_its_time(
    server: Server, open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(server).wait_ready()
    tab.set(max_tokens="200", seed="7")
    tab.send()
    tab.wait_pieces(3)
    assert tab.page.is_visible("#stop") and not tab.page.is_visible("#send")
    tab.wait_over()
    pieces = tab.pieces().evaluate_all("all => all.map(e => [e.textContent, e.dataset.told])")
    assert 100 < len(pieces) <= 200
    assert re.fullmatch(r"first piece, [\d.]+ (ms|s) after the question", pieces[0][1])
    for _, told in pieces[1:]:
        assert re.match(r"\+[\d.]+ (µs|ms|s)|together with the piece before", told), told
    assert any("the usual" in told for _, told in pieces)
    figures = tab.text(".figures")
    for name in ("first", "p50", "p99", "rate", "200 tokens", "reached its limit"):
        assert name in figures
    assert tab.page.locator(".spark path").count() == 3
    body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    answer = server.post("/v1/chat/completions", body | {"max_tokens": 200, "seed": 7}).json()
    assert "".join(text for text, _ in pieces) == answer["choices"][0]["message"]["content"]
    assert tab.text("#announcer") == "Answer complete, 200 tokens."


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stop_ends_the_answer_and_frees_its_sequence(
    server: Server, open_tab: Callable[..., Any], way: str
) -> None:
    tab = open_tab(server).wait_ready()
    num_aborted = server.words("worker")["num_aborted"]
    tab.set(max_tokens="2000")
    tab.send("Count to a million.")
    tab.wait_pieces(5)
    assert server.words("worker")["running"] == 1
    if way == "button":
        tab.page.click("#stop")
    else:
        tab.page.keyboard.press("Escape")
    tab.wait_over()
    server.wait_idle()
    assert server.words("worker")["num_aborted"] == num_aborted + 1
    assert "stopped" in tab.text(".figures")
    num_pieces = tab.pieces().count()
    assert 5 <= num_pieces < 1000
    # What was said goes into the conversation: the next question is asked behind it.
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.send("Go on.")
    roles = [message["role"] for message in asked.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    tab.wait_pieces(1)
    tab.page.click("#clear")
    server.wait_idle()
    assert tab.page.locator(".message").count() == 0 and tab.page.is_visible("#blank")


def test_settings_go_with_the_request_and_survive_a_reload(
    server: Server, open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(server).wait_ready()
    tab.set(
        system="Be brief.",
        temperature="0.5",
        top_p="0.9",
        max_tokens="5",
        seed="11",
        stop="END\nSTOP",
    )
    tab.page.reload()
    tab.wait_ready()
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.send("Hi")
    assert asked.value.post_data_json == {
        "model": "SmolLM2-135M-Instruct",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 5,
        "seed": 11,
        "stop": ["END", "STOP"],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tab.wait_over()
    assert "5 tokens" in tab.text(".figures")
    # A value that cannot be sent keeps the dialog open, and is named.
    tab.page.click("#open-settings")
    tab.page.fill("#set-top-p", "3")
    tab.page.click("#close-settings")
    assert tab.page.is_visible("#settings")
    assert tab.text("#settings-error").startswith("Top p: ")


def test_text_of_person_and_model_never_becomes_markup(
    server: Server, open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(server).wait_ready()
    tab.page.on("dialog", lambda dialog: tab.troubles.append(f"dialog: {dialog.message}"))
    tab.set(seed=str(MARKUP_SEED))
    tab.send(MARKUP)
    tab.wait_over()
    assert tab.page.locator(".said").text_content() == MARKUP
    assert "".join(tab.pieces().all_text_contents()) == MARKUP
    assert tab.page.locator(".transcript img, .transcript script, .transcript b").count() == 0


def test_panel_moves_under_load_and_comes_to_rest(
    server: Server, open_tab: Callable[..., Any], pictures: Path
) -> None:
    tab = open_tab(server, viewport={"width": 1280, "height": 1500}).wait_ready()
    before = tab.page.evaluate("document.querySelector('#plot-depth canvas').toDataURL()")
    threads = load(server, streams=48, tokens=300)
    tab.set(max_tokens="100")
    tab.send("Write a short story about a slow network.")

    def figure(selector: str) -> int:
        found = re.search(r"[\d,]+", tab.text(selector))
        return int(found[0].replace(",", "")) if found else 0

    until(lambda: figure("#legend-load .legend-value >> nth=0") >= 40, "40 running in the panel")
    until(lambda: figure(".box.engine .box-facts") >= 40, "40 running in the picture")
    until(lambda: figure(".kv-text") > 0, "blocks in use")
    for row in range(4):
        tab.page.wait_for_function(
            "i => /\\d/.test(document.querySelectorAll('.hop-text')[i].textContent)", arg=row
        )
    for value in range(4):
        tab.page.wait_for_function(
            "i => /^[\\d.]+ (ms|s)$/.test(document.querySelectorAll('#legend-itl .legend-value')[i].textContent)",
            arg=value,
        )
    assert re.fullmatch(r"peak [\d,]*[1-9][\d,]*", tab.text(".lane.tokens .lane-most"))
    assert tab.page.evaluate("document.querySelector('.lane-peak').style.left") not in ("", "0%")
    after = tab.page.evaluate("document.querySelector('#plot-depth canvas').toDataURL()")
    assert after != before
    tab.page.screenshot(path=str(pictures / "load.png"))
    for thread in threads:
        thread.join()
    until(
        lambda: figure("#legend-load .legend-value >> nth=0") == 0, "nothing running in the panel"
    )


def test_killed_worker_is_shown_and_recovered_from(
    start: Callable[..., Server], open_tab: Callable[..., Any], pictures: Path
) -> None:
    server = start("--step-ms=20")
    tab = open_tab(server).wait_ready()
    tab.set(max_tokens="1000")
    tab.send("Tell me everything.")
    tab.wait_pieces(5)
    os.kill(server.worker_pid, signal.SIGKILL)
    tab.page.wait_for_selector('#state[data-kind="ill"], #state[data-kind="busy"]')
    tab.page.wait_for_selector(".failure")
    assert "worker" in tab.text(".failure p")
    assert "broken off" in tab.text(".figures")
    tab.page.screenshot(path=str(pictures / "worker-killed.png"))
    tab.wait_ready()
    until(
        lambda: "worker restarted 1 time (signal)" in tab.text("#processes"), "the restart is told"
    )
    tab.set(max_tokens="10")
    tab.page.click(".failure button")
    tab.page.wait_for_selector(".failure", state="detached")
    tab.wait_over()
    assert "10 tokens" in tab.text(".figures")


def test_question_that_nobody_answered_is_not_sent_again_with_the_next(
    server: Server, open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(server).wait_ready()
    tab.set(max_tokens="5")
    asked: list[list[str]] = []

    def note(request: Any) -> None:
        if request.method == "POST":
            asked.append([message["content"] for message in request.post_data_json["messages"]])

    tab.page.on("request", note)
    long = ("word " * 9_000).strip()
    tab.send(long)
    tab.page.wait_for_selector(".failure button")
    assert "maximum context length" in tab.text(".failure p")
    tab.send("Hi")
    tab.wait_pieces(1)
    tab.wait_over()
    assert asked == [[long], ["Hi"]]
    assert tab.page.locator(".failure button").count() == 0  # there is nothing left to try again
    assert all("status of 400" in each for each in tab.troubles), tab.troubles
    tab.troubles.clear()  # the browser itself writes this line


def test_page_asks_for_the_key_and_locks_the_panel_without_the_operators(
    start: Callable[..., Server], open_tab: Callable[..., Any], pictures: Path
) -> None:
    server = start("--step-ms=5", f"--api-key={API_KEY}", f"--admin-key={ADMIN_KEY}")
    tab = open_tab(server)
    tab.page.wait_for_selector("#notice")
    assert "API key" in tab.text("#notice-text")
    assert tab.text("#state-text") == "asks for a key"
    tab.send("Hi")
    tab.page.wait_for_selector(".message", state="detached")
    assert tab.page.input_value("#prompt") == "Hi"  # nothing that was written is lost
    tab.page.screenshot(path=str(pictures / "asks-for-key.png"))
    tab.page.click("#notice-action")
    assert tab.page.evaluate("document.activeElement.id") == "set-api-key"
    tab.page.keyboard.type("not-the-right-one-either")
    tab.page.keyboard.press("Enter")
    until(
        lambda: "does not take that API key" in tab.text("#notice-text"), "a wrong key is told of"
    )
    tab.page.click("#notice-action")
    tab.page.fill("#set-api-key", API_KEY)
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("#notice", state="hidden")
    tab.wait_ready()
    assert "--admin-key" in tab.text("#unlock-text")
    tab.set(max_tokens="5")
    tab.page.click("#send")
    tab.wait_pieces(1)
    tab.wait_over()
    tab.page.fill("#unlock-key", "not-the-right-one-at-all")
    tab.page.press("#unlock-key", "Enter")
    until(lambda: "not accepted" in tab.text("#unlock-text"), "a wrong key is told of")
    tab.page.fill("#unlock-key", ADMIN_KEY)
    tab.page.press("#unlock-key", "Enter")
    tab.page.wait_for_selector("#panel")
    stores = tab.page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
    assert API_KEY not in stores[0] and ADMIN_KEY not in stores[0]
    assert API_KEY in stores[1] and ADMIN_KEY in stores[1]
    assert tab.page.evaluate("document.cookie") == ""
    refusals = re.compile(r"the server responded with a status of (401|403) ")
    assert tab.troubles and all(refusals.search(each) for each in tab.troubles), tab.troubles
    tab.troubles.clear()  # the browser itself writes these lines, whatever a page does


def test_keyboard_alone_goes_everywhere(server: Server, open_tab: Callable[..., Any]) -> None:
    tab = open_tab(server).wait_ready()
    press, active = tab.page.keyboard.press, "document.activeElement.id"
    assert tab.page.evaluate(active) == "prompt"
    tab.page.evaluate("document.activeElement.blur(); window.getSelection().removeAllRanges()")
    tab.set(max_tokens="20")
    tab.page.focus("#prompt")
    tab.page.keyboard.type("First line")
    press("Shift+Enter")
    tab.page.keyboard.type("second")
    assert tab.page.input_value("#prompt") == "First line\nsecond"
    press("Enter")
    tab.wait_over()
    assert tab.page.evaluate(active) == "prompt"
    press("Shift+Tab")  # the answer is one stop, not one for each piece
    assert tab.page.evaluate("document.activeElement.className") == "pieces"
    press("ArrowRight")
    press("ArrowRight")
    assert tab.page.locator("#tip").is_visible()
    assert tab.text("#tip").startswith(("+", "together"))
    second = tab.pieces().nth(1)
    assert second.evaluate("e => e === document.activeElement")
    assert second.get_attribute("aria-describedby") == "tip"
    press("End")
    assert tab.pieces().last.evaluate("e => e === document.activeElement")
    tab.page.focus("#open-settings")
    press("Enter")
    assert tab.page.is_visible("#settings")
    press("Escape")
    assert not tab.page.is_visible("#settings")
    assert tab.page.evaluate(active) == "open-settings"
    unnamed = tab.page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(e => !e.hidden && !e.labels?.length && !e.textContent.trim() && e.type !== 'radio').map(e => e.outerHTML)"
    )
    assert unnamed == []


def test_text_is_legible_in_both_colours(server: Server, open_tab: Callable[..., Any]) -> None:
    """Contrast of at least 4.5 (WCAG AA) of every colour that text has, on both grounds."""
    for scheme in ("light", "dark"):
        tab = open_tab(server, color_scheme=scheme).wait_ready()
        colors = tab.page.evaluate(
            "Object.fromEntries(['paper','sheet','ink','muted','engine','wire','ill'].map(n =>"
            " [n, getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim()]))"
        )
        for name in ("ink", "muted", "engine", "wire", "ill"):
            for ground in ("paper", "sheet"):
                contrast = _contrast(colors[name], colors[ground])
                assert contrast >= 4.5, f"{scheme}: {name} on {ground} has {contrast:.2f}"


def _contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1280])
def test_nothing_sticks_out_at_any_width(
    server: Server, open_tab: Callable[..., Any], pictures: Path, width: int
) -> None:
    tab = open_tab(server, viewport={"width": width, "height": 844}).wait_ready()
    tab.set(max_tokens="60")
    tab.send(
        "A question that is long enough to need more than one line on a small screen, and a longword"
        + "w" * 80
    )
    tab.wait_over()
    views = ["chat"] if width > 992 else ["chat", "boundary"]
    for view in views:
        if len(views) > 1:
            tab.page.click(f"#view-{view}")
        tab.page.wait_for_timeout(400)
        tab.page.screenshot(path=str(pictures / f"{view}-{width}.png"))
        too_wide = tab.page.evaluate(
            "[...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && !e.closest('.unseen, .skip, svg, .lane-track')"
            " && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.className || e.tagName)"
        )
        assert too_wide == []
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    is_small = tab.page.evaluate(
        "[...document.querySelectorAll('button')].filter(e => e.checkVisibility() && e.getBoundingClientRect().height < 34).length"
    )
    assert is_small == 0, "a button that no finger hits"


def test_hidden_tab_listens_to_nothing(server: Server, open_tab: Callable[..., Any]) -> None:
    tab = open_tab(server).wait_ready()
    until(lambda: server.words("http")["debug_listeners"] >= 1, "a listener")
    show = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
    show += " document.dispatchEvent(new Event('visibilitychange')); }"
    tab.page.evaluate(show, True)
    until(lambda: server.words("http")["debug_listeners"] == 0, "no listener")
    tab.page.evaluate(show, False)
    until(lambda: server.words("http")["debug_listeners"] == 1, "a listener again")


def test_front_end_that_died_is_waited_for_and_found_again(
    start: Callable[..., Server], open_tab: Callable[..., Any]
) -> None:
    server = start("--step-ms=20")
    tab = open_tab(server).wait_ready()
    tab.set(max_tokens="1000")
    tab.send("Tell me everything.")
    tab.wait_pieces(5)
    os.kill(server.words("http")["pid"], signal.SIGKILL)
    tab.page.wait_for_selector(".failure")
    assert tab.text(".failure p") == "The connection to the server broke."
    until(lambda: "front end restarted 1 time (signal)" in tab.text("#processes"), "the restart")
    tab.wait_ready()
    assert server.words("http")["debug_listeners"] == 1
    tab.set(max_tokens="10")
    tab.page.click(".failure button")
    tab.page.wait_for_selector(".failure", state="detached")
    tab.wait_over()
    assert "10 tokens" in tab.text(".figures")
    assert all("net::ERR_" in each for each in tab.troubles), tab.troubles
    tab.troubles.clear()  # the browser's own lines about a connection that broke


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_the_systems_unless_the_settings_say_others(
    server: Server, open_tab: Callable[..., Any], pictures: Path, scheme: str
) -> None:
    tab = open_tab(server, color_scheme=scheme).wait_ready()
    ground = "getComputedStyle(document.body).backgroundColor"
    systems = tab.page.evaluate(ground)
    tab.page.screenshot(path=str(pictures / f"{scheme}.png"))
    tab.page.click("#open-settings")
    tab.page.screenshot(path=str(pictures / f"{scheme}-settings.png"))
    other = {"light": "dark", "dark": "light"}[scheme]
    tab.page.check(f"input[name=theme][value={other}]")
    tab.page.click("#close-settings")
    assert tab.page.evaluate(ground) != systems
    tab.page.reload()
    tab.wait_ready()
    assert tab.page.evaluate(ground) != systems


def _stream(*events: dict[str, Any] | str) -> Callable[[Any], None]:
    """A route that answers with these events at once."""
    lines = [each if isinstance(each, str) else json.dumps(each) for each in events]
    body = "".join(f"data: {line}\n\n" for line in lines)
    return lambda route: route.fulfill(content_type="text/event-stream", body=body)


def _piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def test_question_stopped_before_any_text_can_be_cleared_away(
    server: Server, open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(server).wait_ready()
    tab.page.route("**/v1/chat/completions", lambda route: None)  # no answer comes
    tab.send("Hi")
    tab.page.wait_for_selector("#stop")
    tab.page.keyboard.press("Escape")
    tab.wait_over()
    assert "stopped" in tab.text(".figures") and tab.page.is_hidden("#blank")
    tab.page.click("#clear")
    assert tab.page.locator(".message").count() == 0 and tab.page.is_visible("#blank")


def test_end_stays_in_sight_however_much_comes_at_once(
    server: Server, open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(server).wait_ready()
    below = "e => e.scrollHeight - e.scrollTop - e.clientHeight"
    transcript = tab.page.locator("#transcript")
    many_lines = _piece("one line\n" * 40)
    tab.page.route("**/v1/chat/completions", _stream(many_lines, many_lines, "[DONE]"))
    tab.send("Hi")
    tab.wait_pieces(2)
    tab.wait_over()
    assert transcript.evaluate(below) < 2
    tab.page.unroute("**/v1/chat/completions")
    failure = {"error": {"message": "The worker ended. " * 20, "code": "x"}}
    tab.page.route("**/v1/chat/completions", _stream(many_lines, failure))
    tab.send("Again")
    tab.page.wait_for_selector(".failure")
    assert transcript.evaluate(below) < 2


def test_server_that_stands_still_is_told_and_found_again(
    start: Callable[..., Server], open_tab: Callable[..., Any]
) -> None:
    server = start("--hang-timeout=120")
    tab = open_tab(server).wait_ready()
    pid = server.words("http")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        tab.page.wait_for_selector('#state[data-kind="ill"]', timeout=60_000)
        assert "no connection" in tab.text("#state-text")
    finally:
        os.kill(pid, signal.SIGCONT)
    tab.wait_ready()


def test_page_works_where_the_browser_lets_it_keep_nothing(
    server: Server, open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(server)
    tab.page.add_init_script(
        "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name,"
        " {get() { throw new DOMException('blocked', 'SecurityError'); }});"
    )
    tab.page.reload()
    tab.wait_ready()
    tab.set(max_tokens="5", api_key="of-this-page")
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.send("Hi")
    assert asked.value.headers["authorization"] == "Bearer of-this-page"
    tab.wait_over()
    assert "5 tokens" in tab.text(".figures")
