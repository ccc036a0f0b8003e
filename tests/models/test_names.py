"""Names of models: what is accepted, what is refused, and the file names made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.names import parse_model, safe_filename

parts = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,20}[A-Za-z0-9_])?", fullmatch=True).filter(
    lambda text: "--" not in text and ".." not in text and not text.endswith(".git")
)
hub_ids = st.one_of(parts, st.builds(lambda org, name: f"{org}/{name}", parts, parts))


@given(hub_ids)
def test_hub_ids_are_accepted(text: str) -> None:
    ref = parse_model(text)
    assert (ref.repo_id, ref.revision, ref.path) == (text, None, None)


@given(hub_ids)
def test_hub_ids_agree_with_huggingface_hub(text: str) -> None:
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(text)


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [("gpt2@main", "gpt2", "main"), ("org/name@refs/pr/3", "org/name", "refs/pr/3"), ("a/b@v1.0", "a/b", "v1.0")],
)
def test_revision(text: str, repo: str, revision: str) -> None:
    ref = parse_model(text)
    assert (ref.repo_id, ref.revision) == (repo, revision)


HOSTILE = [
    "", "   ", "a;rm -rf x", "$(reboot)", "`id`", "a/../b", "...", "a..b", "a\nb", "a\0b", "a\tb", "x" * 300,
    "org/" + "y" * 97, "-rf", "--model", "a--b", "org/name/more", "a b", "naïve/model", "a/b@", "a/b@-x", "a/b@x y",
    "a/b@../c", "org/.hidden", "org/name-", "https://huggingface.co/gpt2", "x.git", "'quoted'", "a\x7fb", "org/",
    "@main", "a/b@" + "r" * 200, "x" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(BadModel) as caught:
        parse_model(text)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 400


@given(st.text(max_size=60))
def test_any_text_gives_a_reference_or_our_error(text: str) -> None:
    try:
        ref = parse_model(text)
    except BadModel:
        return
    assert ref.text == text


@pytest.mark.parametrize("text", ["org/a@x/../y", "org/a@x..y", "org/a@x//y"])
def test_a_revision_stays_where_it_is(text: str) -> None:
    with pytest.raises(BadModel, match="no revision"):
        parse_model(text)


@pytest.mark.parametrize("text", ["a\x1b[31mb", "a\x9bb", "a\x7fb", "m/\udcff", "a\u0085b"])
def test_what_no_terminal_or_file_should_see(text: str) -> None:
    with pytest.raises(BadModel, match=r"control character|not in UTF-8") as told:
        parse_model(text)
    assert str(told.value).isprintable()


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model dir; odd").mkdir()
    (tmp_path / "w.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    folder = parse_model("model dir; odd")
    assert (folder.repo_id, folder.path) == (None, tmp_path / "model dir; odd")
    file = parse_model("./w.safetensors")
    assert (file.repo_id, file.path) == (None, tmp_path / "w.safetensors")
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").mkdir()
    assert parse_model("org/name").path == tmp_path / "org" / "name"


@pytest.mark.parametrize("text", ["/no/such/folder", "./absent", "../absent-too", "~/absent-model-folder"])
def test_a_missing_local_path_is_missing(text: str) -> None:
    with pytest.raises(MissingModel, match="no such folder or file"):
        parse_model(text)


def test_an_unknown_user_or_an_overlong_name_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadModel):
        parse_model("~nobody-of-this-name/model")
    with pytest.raises(BadModel):
        parse_model(f"{tmp_path}/{'x' * 300}")


def test_file_names_follow_the_published_data() -> None:
    assert safe_filename("openai-community/gpt2") == "openai-community--gpt2"
    assert safe_filename("gpt2") == "gpt2"
    assert safe_filename("gpt2@v1") == "gpt2@v1"
    assert safe_filename("/data/models/my model/").startswith("my_model+")
    longest = f"{'o' * 96}/{'m' * 96}"
    assert safe_filename(longest) == longest.replace("/", "--")
    assert len(safe_filename(f"{longest}@{'r' * 64}")) <= 200


@given(st.one_of(st.text(max_size=300), hub_ids))
def test_file_names_are_safe(text: str) -> None:
    name = safe_filename(text)
    assert name and "/" not in name and name[0] not in ".-" and len(name.encode()) <= 200
    assert name.isascii() and name.isprintable() and " " not in name


near = st.text(alphabet="ab/-.@+_~ ", max_size=6)


@given(st.lists(st.one_of(hub_ids, near, st.text(max_size=40)), unique=True, max_size=30))
def test_file_names_are_injective(texts: list[str]) -> None:
    assert len({safe_filename(text) for text in texts}) == len(texts)
