"""The dashboard and the API: untrusted text on every page, and every role at every route from every site.

Pages are read as a browser reads them, by an HTML parser: nothing of the corpus may become an element, an attribute, a
script or a link. (tests/ui/test_safety.py sees the same in a real browser, for fewer pages.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from unittest.mock import patch
from urllib.parse import parse_qsl, quote, urlsplit

from oncehook.web.api.endpoints import ENDPOINTS
from oncehook.web.auth import Role, Throttle
from tests.acceptance.test_api import address
from tests.torture.review import Budget, Tally
from tests.ui.conftest import opened
from tests.ui.house import TOKENS, Answered, House
from tests.ui.test_safety import CORPUS, OURS, places

MORE = (
    "<xss-element xss-attribute=1>",
    '" xss-attribute="1',
    "' xss-attribute='1",
    "` xss-attribute=`1",
    "--><xss-element>",
    "]]><xss-element>",
    "</script><xss-element>",
    "</style><xss-element>",
    "<iframe srcdoc='<script>window.xss=1</script>'>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=window.xss=1&gt;'>",
    "<body onload=window.xss=1>",
    "<form action=javascript:window.xss=1><button>x",
    "data:text/html,<script>window.xss=1</script>",
    "&lt;xss-element&gt;",
    "\x00<xss-element>",
    "+ADw-xss-element+AD4-",
    "${window.xss=1}#{7*7}{{constructor.constructor('window.xss=1')()}}",
)
TEXTS = (*CORPUS, *MORE)
LEADS = ("href", "src", "action", "formaction", "srcdoc", "data", "poster", "hx-get", "hx-post")
SCRIPTED = ("javascript:", "data:", "vbscript:")


class Trap(HTMLParser):
    """A parser that catches what became of untrusted text beyond text."""

    def __init__(self) -> None:
        super().__init__()
        self.caught: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if "xss" in tag or (tag == "script" and not (given.get("src") or given.get("type") == "application/json")):
            self.caught.append(f"<{tag} {attributes!r}>")
        for name, value in attributes:
            leads = (value or "").strip().lower()
            if name.startswith("on") or "xss" in name or (name in LEADS and leads.startswith(SCRIPTED)):
                self.caught.append(f"<{tag} {name}={value!r}>")

    handle_startendtag = handle_starttag


def caught(answer: Answered) -> list[str]:
    """Return what a browser would make of an answer beyond text."""
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/html"):
        trap = Trap()
        trap.feed(answer.text)
        return trap.caught
    is_tame = b"xss" not in answer.body or answer.headers.get("x-content-type-options") == "nosniff"
    return [] if is_tame else [f"{kind or 'no type'} without nosniff"]


def ask(tally: Tally, house: House, method: str, path: str, **how: object) -> Answered:
    with tally.trying():
        answer = house.ask(method, path, **how)  # type: ignore[arg-type]
    if answer.status >= 500:
        tally.fail(f"{method} {path}: {answer.status} {answer.body[:200]!r}")
    return answer


# -- untrusted text ----------------------------------------------------------------------------


def fill(house: House) -> list[str]:
    """Put every text into every field that a sender or a person fills; return the ids of some events."""
    admin, events = house.inbox.admin, []
    for n, text in enumerate(TEXTS):
        fields = {"type": text, "order": text, text: [text, {text: text}], "digital": n % 2 == 0, "note": text}
        events.append(house.receive("orders", body={"id": f"{n}{text}", **fields})[0])
        house.receive("orders", body={"id": f"{n}{text}", **fields, "extra": text})
        head = {"content-type": "text/html", "x-evil": text.encode("unicode_escape").decode("latin-1")}
        house.do(house.inbox.receive("orders", head, json.dumps({"id": f"h{n}", "type": "t"}).encode()))
        house.do(house.inbox.receive(text, {}, b"{}"))
    house.settle()
    dead = house.do(admin.deliveries(admin.read("status:dead"))).items
    for one, text in zip(dead, TEXTS, strict=False):
        act = admin.discard if one is dead[0] else admin.replay_one
        house.do(act(one.id, actor=text, reason=text))
    house.do(admin.pause("ship", actor=TEXTS[1], reason=TEXTS[0]))
    return events


def paths(house: House, events: list[str]) -> Iterator[str]:
    """Yield every page there is, and those of each event."""
    for method, path, _ in places(house):
        if method == "GET" and path != "/ui/stream":
            yield path
    for event in events:
        yield from (f"/events/{event}?tab={tab}" for tab in ("body", "headers", "arrivals", "deliveries", "subject"))
        yield from (f"/events/{event}?view={view}" for view in ("raw", "hex"))


def asked_for(path: str, text: str) -> Iterator[str]:
    """Yield a page with this text in every parameter that a link may have."""
    value = quote(text, safe="")
    bare = path.partition("?")[0]
    yield from (
        f"{bare}?{name}={value}" for name in ("query", "said", "kind", "tab", "view", "cursor", "source", "force")
    )
    yield f"{bare}/{value}"


def pages(tally: Tally, budget: Budget, folder: Path) -> None:
    """Read every page with every text in its fields, then in its address."""
    with opened(folder) as house:
        events = fill(house)
        cookie = {"cookie": house.login()}
        known = list(paths(house, events))
        for path in known:
            look(tally, house, path, cookie)
        for path in ("/", "/events", "/live", "/dead", "/replays/plan"):
            for text in TEXTS:
                look(tally, house, next(iter(asked_for(path, text))), cookie)
        while budget.is_left:
            path, text = budget.chance.choice(known), budget.chance.choice(TEXTS)
            for asked in asked_for(path, text):
                look(tally, house, asked, cookie)


def look(tally: Tally, house: House, path: str, cookie: dict[str, str]) -> None:
    for what in caught(ask(tally, house, "GET", path, headers=cookie)):
        tally.accept(f"{path}: {what}")


# -- roles and sites ---------------------------------------------------------------------------

SITES: tuple[dict[str, str], ...] = (
    OURS,
    {},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "none"},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "http://127.0.0.1.evil.example"},
    {"sec-fetch-site": ""},
    {"referer": "http://127.0.0.1/"},
)
"""Where a change seems to come from. No browser sends `same-origin` beside another site's `Origin`."""
ROLES = (None, "viewer", "operator", "admin")


def roles(tally: Tally, budget: Budget, folder: Path) -> None:
    """Ask for every route of pages and API by every role from every site: what is not allowed is refused."""
    # So many wrong tokens would only be told to wait; that they are is tested with the throttle.
    with opened(folder) as house, patch.object(Throttle, "check", lambda self, network: None):
        house.order("dead", digital=True)
        house.settle()
        cookies = {role: {"cookie": house.login(role)} if role else {} for role in ROLES}
        routes = [
            route for route in places(house) if route[1] not in ("/ui/stream", "/login", "/login/link", "/logout")
        ]
        while tally.tried == 0 or budget.is_left:
            for (method, path, needed), role, site in product(routes, ROLES, SITES):
                try_page(tally, house, method, path, needed, role, {**site, **cookies[role]})
            for endpoint in ENDPOINTS:
                if endpoint.path != "/stream":
                    try_endpoint(tally, house, endpoint.method, address(endpoint.path), endpoint.role, cookies["admin"])
        level = house.levels()["ship"]
        if (level.dead, level.paused_at) != (1, None):
            tally.accept(f"something was done: {level}")


def try_page(
    tally: Tally, house: House, method: str, path: str, needed: Role, role: str | None, headers: dict[str, str]
) -> None:
    is_ours = headers.get("sec-fetch-site") == "same-origin"
    is_allowed = role is not None and Role[role] >= needed
    if method == "POST" and is_ours and is_allowed:
        return  # what they may do is tested with the acts
    answer = ask(tally, house, method, path, form={} if method == "POST" else None, headers=headers)
    is_refused = answer.status in (401, 403) or (role is None and _asks_to_log_in(answer))
    must_refuse = not is_allowed or (method == "POST" and not is_ours)
    if must_refuse and not is_refused:
        tally.accept(f"{role} {method} {path} {headers}: {answer.status}")
    if not must_refuse and answer.status == 403:
        tally.crash(f"{role} {method} {path} is refused")


def _asks_to_log_in(answer: Answered) -> bool:
    """Tell whether an answer is our login, or leads there and from there to nothing but a page of ours."""
    leads = urlsplit(answer.headers.get("location", ""))
    back = urlsplit(dict(parse_qsl(leads.query)).get("to", "/"))
    is_ours = not leads.netloc and leads.path.endswith("/login") and not back.netloc and back.path.startswith("/")
    return is_ours or (answer.status == 200 and "Log in" in answer.text)


def try_endpoint(tally: Tally, house: House, method: str, path: str, needed: int, cookie: dict[str, str]) -> None:
    wrong: list[dict[str, str]] = [
        {},
        cookie,
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKENS['admin']}"},
        {"authorization": TOKENS["admin"]},
        {"x-forwarded-user": "admin"},
        {"authorization": f"Bearer {TOKENS['admin']} {TOKENS['admin']}"},
    ]
    wrong += [{"authorization": f"Bearer {TOKENS[role]}"} for role in ("viewer", "operator") if Role[role] < needed]
    for headers in wrong:
        answer = ask(tally, house, method, f"/api/v1{path}", headers=headers)
        if answer.status not in (401, 403):
            tally.accept(f"{method} {path} {headers}: {answer.status}")
    foreign = {
        "authorization": f"Bearer {TOKENS['admin']}",
        "origin": "https://evil.example",
        "sec-fetch-site": "cross-site",
    }
    if method == "POST":
        return
    answer = ask(tally, house, method, f"/api/v1{path}", headers=foreign)
    if "access-control-allow-origin" in answer.headers:
        tally.accept(f"{method} {path} lets other sites read")
