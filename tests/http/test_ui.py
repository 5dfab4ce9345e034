"""The page's files: whole, under a strict policy, open without a key; and who may not have even them."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from serving import Asker, Server

from shmserve.http.ui import FOLDER, POLICY, TYPES

NAVIGATION = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
API_KEY, ADMIN_KEY = "of-a-client-0123456789", "of-the-operator-0123456789"


@pytest.fixture(scope="module")
def locked(start_server: Callable[..., Server]) -> Server:
    return start_server(f"--api-key={API_KEY}", f"--admin-key={ADMIN_KEY}")


class Elements(HTMLParser):
    """What the page consists of: (tag, attributes), and the text inside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in ("script", "style"):
            self.inline += data.strip()


@pytest.fixture(scope="module")
def page() -> Elements:
    parser = Elements()
    parser.feed((FOLDER / "index.html").read_text())
    return parser


def test_every_file_that_the_page_names_is_served_as_what_it_is(
    asker: Asker, page: Elements
) -> None:
    names = {
        str(attributes[key])
        for _, attributes in page.elements
        for key in ("src", "href")
        if (attributes.get(key) or "").startswith("/")
    }
    for script in FOLDER.glob("*.js"):
        names |= {f"/ui/{name}" for name in re.findall(r'from "\./([^"]+)"', script.read_text())}
    for style in FOLDER.glob("*.css"):
        names |= {f"/ui/{name}" for name in re.findall(r'url\("([^"]+)"\)', style.read_text())}
    assert len(names) > 12
    for name in sorted(names):
        answer = asker.get(name)
        assert answer.status == 200, name
        assert answer.headers["content-type"] == TYPES[Path(name).suffix], name
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.body == (FOLDER / name.removeprefix("/ui/")).read_bytes()
    served = {name.removeprefix("/ui/") for name in names} | {"index.html"}
    ours = {p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*") if p.suffix in TYPES}
    assert ours == served, "a file of the page that nothing uses"


def test_policy_allows_nothing_inline_nothing_foreign_and_no_frame(
    asker: Asker, page: Elements
) -> None:
    answer = asker.get("/")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    for rule in ("default-src 'none'", "frame-ancestors 'none'", "require-trusted-types-for"):
        assert rule in policy
    assert page.inline == ""
    for tag, attributes in page.elements:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        if tag == "script":
            assert (attributes.get("src") or "").startswith("/ui/")


def test_no_script_of_the_page_can_turn_text_into_markup() -> None:
    for path in FOLDER.glob("*.js"):
        text = path.read_text()
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
        ):
            assert word not in text, f"{path.name}: {word}"
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), path.name


def test_file_that_did_not_change_is_a_304(asker: Asker) -> None:
    first = asker.get("/ui/style.css")
    again = asker.request("GET", "/ui/style.css", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert asker.request("GET", "/ui/style.css", headers={"If-None-Match": '"x"'}).status == 200


@pytest.mark.parametrize(
    "path", ["/ui/", "/ui/none.js", "/ui/../ui.py", "/ui/%2e%2e/ui.py", "/ui/fonts"]
)
def test_what_is_no_file_of_the_page_is_a_404(asker: Asker, path: str) -> None:
    assert asker.get(path).error()["code"] == "not_found"


def test_page_needs_no_key_and_what_it_asks_for_does(locked: Server) -> None:
    assert locked.get("/").status == locked.get("/ui/main.js").status == 200
    for path in ("/v1/models", "/debug/stream"):
        assert locked.get(path).status == 401
    as_client = {"Authorization": f"Bearer {API_KEY}"}
    assert locked.request("GET", "/v1/models", headers=as_client).status == 200
    refused = locked.request("GET", "/debug/stream", headers=as_client)
    assert (refused.status, refused.error()["code"]) == (403, "admin_key_required")


def test_link_of_another_site_may_lead_to_the_page_and_to_nothing_else(asker: Asker) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site"}
    assert asker.request("GET", "/", headers=foreign | NAVIGATION).status == 200
    in_a_frame = NAVIGATION | {"Sec-Fetch-Dest": "iframe"}
    for path, headers in (
        ("/", foreign | {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}),
        ("/", foreign | in_a_frame),
        ("/", foreign | NAVIGATION | {"Origin": "https://evil.example"}),
        ("/ui/main.js", foreign | NAVIGATION),
        ("/debug/stream", foreign | NAVIGATION),
        ("/flush_cache", foreign | NAVIGATION),
    ):
        answer = asker.request("GET", path, headers=headers)
        assert (answer.status, answer.error()["code"]) == (403, "origin_not_allowed"), path


def test_page_under_a_foreign_name_is_refused(asker: Asker) -> None:
    answer = asker.request("GET", "/", headers={"Host": "evil.example"} | NAVIGATION)
    assert (answer.status, answer.error()["code"]) == (403, "host_not_allowed")


@pytest.mark.slow
def test_without_the_page_its_places_are_as_locked_as_all_others(
    start_server: Callable[..., Server],
) -> None:
    server = start_server("--no-ui", f"--api-key={API_KEY}")
    as_client = {"Authorization": f"Bearer {API_KEY}"}
    for path in ("/", "/ui/main.js"):
        assert server.get(path).status == 401
        assert server.request("GET", path, headers=as_client).status == 404
