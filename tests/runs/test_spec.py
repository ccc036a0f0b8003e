"""The identity of results is a digest of text, whatever text that is; versions are of what is installed."""

from __future__ import annotations

from importlib.metadata import version

from gpuherd import __version__
from gpuherd.runs.spec import begun_here, digest_of, now, versions


def test_every_text_has_a_digest_of_its_own() -> None:
    assert digest_of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert len({digest_of(text) for text in ("a", "b", "\ud800", "\udfff", "\ufffd")}) == 5


def test_versions_of_what_is_there() -> None:
    found = versions("rich", "there-is-no-such-library")
    assert list(found) == ["gpuherd", "python", "rich"]
    assert (found["gpuherd"], found["rich"]) == (__version__, version("rich"))


def test_where_and_when_a_run_began() -> None:
    assert set(begun_here()) == {"cwd", "host", "started"} and now().endswith("+00:00")
