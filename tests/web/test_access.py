"""Who may ask: names of the server, other sites, tokens, cookies, forms and proxies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.web.access import (
    SESSION_S,
    Asked,
    Rules,
    Step,
    decide,
    host_allowed,
    local_path,
    logs_in,
    new_cookie,
    session_of,
)

NOW = 1_800_000_000.0
RULES = Rules(hosts=frozenset({"127.0.0.1", "localhost", "[::1]", "lab.example"}), token="t0ken", port=8642)
VALUE = new_cookie(RULES, NOW)


def asked(method: str = "GET", path: str = "/", host: str = "127.0.0.1:8642", **more: object) -> Asked:
    """A request of a browser that is not logged in."""
    headers = [("host", host), *more.pop("headers", [])]  # type: ignore[misc]
    return Asked(method, path, headers, **more)  # type: ignore[arg-type]


def logged_in(rules: Rules = RULES, now: float = NOW) -> tuple[str, str]:
    """The Cookie header of a browser that has logged in."""
    return "cookie", f"other=1; {rules.cookie}={new_cookie(rules, now)}"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8642", "localhost:9000", "LOCALHOST", "localhost.", "[::1]:1", "lab.example"]
)
def test_names_of_the_server_are_allowed(host: str) -> None:
    assert host_allowed(RULES, host)


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "[::2]",
        "2130706433",
        "evil@localhost",
        "localhost/evil",
        "localhost#",
        "[::1",
        "localhost:8642:1",
        "localhost evil",
    ],
)
def test_other_names_are_refused_as_by_dns_rebinding(host: str | None) -> None:
    assert not host_allowed(RULES, host)


def test_any_address_but_no_name_where_the_server_is_on_all_addresses() -> None:
    rules = replace(RULES, any_address=True)
    assert host_allowed(rules, "10.1.2.3:8642")
    assert host_allowed(rules, "[fe80::1]:8642")
    assert not host_allowed(rules, "evil.example")


@given(st.text())
def test_no_text_is_taken_for_a_name_by_mistake(host: str) -> None:
    if host_allowed(RULES, host):
        assert host.lower().startswith(tuple(RULES.hosts))


def test_two_host_headers_are_refused() -> None:
    double = Asked("GET", "/", [("host", "localhost"), ("host", "evil.example")])
    assert decide(RULES, double, NOW).status == 421


def test_the_link_logs_in_and_goes_on_without_the_token() -> None:
    verdict = decide(RULES, asked(path="/jobs", query={"token": "t0ken", "state": "a b&c"}), NOW)
    assert verdict.step is Step.ENTER
    assert verdict.onward == "/jobs?state=a%20b%26c"


@pytest.mark.parametrize("token", ["", "t0ke", "t0kenn", "T0KEN", "tøken", "\udcff"])
def test_a_forged_or_old_token_is_refused(token: str) -> None:
    verdict = decide(RULES, asked(query={"token": token}), NOW)
    assert verdict.step is Step.REFUSE
    assert verdict.status == 403


def test_without_a_login_there_is_only_the_form() -> None:
    assert decide(RULES, asked(path="/jobs"), NOW).step is Step.LOG_IN
    for path in ("/login", "/assets/web.css"):
        assert decide(RULES, asked(path=path), NOW).step is Step.LET_IN
    for path in ("/loginx", "/login/x", "/assets", "//assets/x"):
        assert decide(RULES, asked(path=path), NOW).step is Step.LOG_IN


def test_a_cookie_lets_in_until_it_has_expired() -> None:
    assert decide(RULES, asked(headers=[logged_in()]), NOW).step is Step.LET_IN
    assert decide(RULES, asked(headers=[logged_in()]), NOW + SESSION_S + 1).step is Step.LOG_IN


def test_a_cookie_of_an_earlier_server_means_nothing() -> None:
    earlier = replace(RULES, secret=b"another" * 5)
    assert session_of(RULES, asked(headers=[logged_in(earlier)]), NOW) is None


@given(st.data())
def test_a_cookie_with_another_character_is_forged(data: st.DataObject) -> None:
    value = VALUE
    place = data.draw(st.integers(0, len(value) - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=value[place] + ";"))
    forged = value[:place] + other + value[place + 1 :]
    assert session_of(RULES, asked(headers=[("cookie", f"{RULES.cookie}={forged}")]), NOW) is None


@given(st.text(max_size=80))
def test_no_cookie_breaks_the_server(value: str) -> None:
    assert session_of(RULES, asked(headers=[("cookie", f"{RULES.cookie}={value}")]), NOW) is None


@pytest.mark.parametrize(
    "headers",
    [
        [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "image")],
        [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")],
        [("sec-fetch-site", "same-site"), ("sec-fetch-mode", "cors"), ("sec-fetch-dest", "empty")],
        [("origin", "http://evil.example")],
        [("origin", "http://127.0.0.1:9999")],
        [("origin", "null")],
        [("origin", "http://127.0.0.1:8642"), ("origin", "http://evil.example")],
    ],
)
def test_what_another_sites_page_requests_is_refused(headers: list[tuple[str, str]]) -> None:
    for method in ("GET", "POST"):
        assert decide(RULES, asked(method, headers=[*headers, logged_in()]), NOW).status == 403


def test_a_link_of_another_site_may_be_followed() -> None:
    follows = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")]
    assert decide(RULES, asked(headers=follows, query={"token": "t0ken"}), NOW).step is Step.ENTER
    assert decide(RULES, asked("POST", headers=[*follows, logged_in()]), NOW).status == 403


def test_a_change_needs_the_form_of_ones_own_page() -> None:
    cookie = logged_in()
    session = session_of(RULES, asked(headers=[cookie]), NOW)
    assert session is not None
    ours = [cookie, ("origin", "http://127.0.0.1:8642")]
    by_field = asked("POST", "/jobs/cancel", headers=ours, form={"form_token": session.form_token})
    by_header = asked("POST", "/jobs/cancel", headers=[*ours, ("x-gpuherd-form", session.form_token)])
    assert decide(RULES, by_field, NOW).step is Step.LET_IN
    assert decide(RULES, by_header, NOW).step is Step.LET_IN
    other = session_of(RULES, asked(headers=[logged_in()]), NOW)
    assert other is not None
    for token in ("", "forged", other.form_token):
        assert decide(RULES, replace(by_field, form={"form_token": token}), NOW).status == 403
    assert decide(RULES, replace(by_field, headers=[("host", "localhost"), cookie]), NOW).status == 403  # from where?
    assert decide(RULES, replace(by_field, headers=[*ours[1:], ("host", "127.0.0.1:8642")]), NOW).status == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get"])
def test_other_methods_are_refused(method: str) -> None:
    assert decide(RULES, asked(method, headers=[logged_in()]), NOW).status == 405


def test_a_proxys_header_is_believed_on_a_socket_alone() -> None:
    rules = replace(RULES, token=None, user_header="x-remote-user", user="alice")
    alice, bob = ("x-remote-user", "alice"), ("x-remote-user", "bob")
    verdict = decide(rules, asked(headers=[alice], over_socket=True), NOW)
    assert verdict.step is Step.LET_IN
    assert verdict.session is not None
    for headers in ([], [bob], [alice, bob], [alice, alice], [("x-remote-user", "alice ")], [logged_in(rules)]):
        assert decide(rules, asked(headers=headers, over_socket=True), NOW).status == 403
    assert decide(rules, asked(headers=[alice]), NOW).step is Step.LOG_IN
    assert decide(RULES, asked(headers=[alice], over_socket=True), NOW).step is Step.LOG_IN


def test_a_password_stands_in_for_the_token() -> None:
    rules = replace(RULES, password="correct horse battery")
    assert logs_in(rules, "correct horse battery")
    assert not logs_in(rules, "t0ken")
    assert not logs_in(replace(rules, password=None, token=None), "")
    assert "correct horse" not in repr(rules)


@pytest.mark.parametrize(
    "path", ["//evil.example", "/\\evil.example", "https://evil.example", "\\/evil", "", "/login", "/a\nb", "/a\\b"]
)
def test_a_login_leads_to_no_other_site(path: str) -> None:
    assert local_path(path) == "/"


def test_a_login_leads_on() -> None:
    assert local_path("/jobs?state=failed") == "/jobs?state=failed"
