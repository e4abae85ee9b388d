"""Names, selectors, tags, paths and globs: what each may be, what it means, and what is said of others."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kindler.errors import ConfigError
from kindler.store.names import (
    Selector,
    check_bucket,
    check_glob,
    check_name,
    check_path,
    check_tag,
    is_hidden,
    literal_prefix,
    matches,
    parse_selector,
)


@pytest.mark.parametrize("name", ["a", "a/b", "é", "a b", "...", ".hidden/_x", "x" * 200], ids=range(7))
def test_a_name_is_relative_printable_text(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (3, "name=3 is a int; a name must be a string"),
        ("", "is empty"),
        ("x" * 201, "has 201 characters; at most 200 are allowed"),
        ("a\nb", "has characters that cannot be printed"),
        ("a^b*", "has * ^, which are not allowed"),
        ("/a", "is absolute"),
        *((name, "has a part that is empty") for name in ("a//b", "a/", ".", "a/../b", " a", "a /b")),
        ("@" * 80, f"name='{'@' * 80}' has @"),
        ("@" * 81, f"name='{'@' * 77}...' has @"),
    ],
    ids=str,
)
def test_another_name_is_rejected_with_the_rule_that_it_breaks(name: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        check_name(name)


@pytest.mark.parametrize("word", ["a", "A9.b-c_d", "a" * 100], ids=range(3))
def test_a_bucket_and_a_tag_are_plain_words(word: str) -> None:
    assert (check_bucket(word), check_tag(word)) == (word, word)


@pytest.mark.parametrize("word", ["", "9a", "_a", "a b", "a/b", "a" * 101, 5], ids=range(7))
def test_a_bucket_that_is_no_plain_word_is_rejected(word: Any) -> None:
    with pytest.raises(ConfigError, match="a bucket begins with a letter, followed by at most 99 letters"):
        check_bucket(word)
    with pytest.raises(ConfigError, match="a tag begins with a letter"):
        check_tag(word)


@pytest.mark.parametrize(
    ("tag", "meaning"), [("latest", "the newest version"), ("v0", "version 0"), ("v12", "version 12")]
)
def test_a_tag_that_means_a_version_by_itself_is_rejected(tag: str, meaning: str) -> None:
    with pytest.raises(ConfigError, match=f"name@{tag} always means {meaning}"):
        check_tag(tag)


@pytest.mark.parametrize("path", ["a", "a/b.c", "..a/b..", "x" * 1000], ids=range(4))
def test_a_path_stays_within_its_folder(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    "path", ["", "/a", "a//b", "a/./b", "../a", "a/..", "a\\b", "a\nb", "x" * 1001, 5], ids=range(10)
)
def test_another_path_is_rejected(path: Any) -> None:
    with pytest.raises(ConfigError, match="is not a valid path of a stored file"):
        check_path(path)


def test_a_name_is_hidden_if_a_part_of_it_begins_with_a_dot_or_an_underscore() -> None:
    names = [".a", "_a", "a/.b", "a/_b/c", "a.b", "a_b", "a/b."]

    assert [name for name in names if is_hidden(name)] == names[:4]


@pytest.mark.parametrize(
    ("text", "version", "selected"),
    [
        ("net", None, Selector("net")),
        ("net@3", None, Selector("net", 3)),
        ("net@v3", None, Selector("net", 3)),
        ("net@latest", None, Selector("net")),
        ("a/net@prod^", None, Selector("a/net", "prod", 1)),
        ("net^^", None, Selector("net", None, 2)),
        ("net", 3, Selector("net", 3)),
        ("net^", "prod", Selector("net", "prod", 1)),
        (f"net@{'9' * 18}", None, Selector("net", 10**18 - 1)),
    ],
    ids=str,
)
def test_a_selector_names_a_version(text: str, version: Any, selected: Selector) -> None:
    assert parse_selector(text, version) == selected


@pytest.mark.parametrize(
    ("text", "version", "problem"),
    [
        (5, None, "name=5 is a int"),
        ("a@b@c", None, "'a@b@c' is not a selector"),
        ("a^b", None, "'a^b' is not a selector"),
        ("@3", None, "name='' is empty"),
        ("net@", None, "tag=''"),
        ("net@two words", None, "tag='two words'"),
        ("net@\u0663", None, "a tag begins with a letter"),
        (f"net@v{'9' * 19}", None, "cannot be a tag"),
        (f"net@{'9' * 19}", None, "a tag begins with a letter"),
        ("net@3", 3, "'net@3' and version=3 both name a version"),
        ("net", 1.5, "version=1.5 is a float; a version is a number or a tag"),
        ("net", True, "version=True is a bool"),
    ],
    ids=str,
)
def test_what_names_no_version_is_rejected(text: Any, version: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        parse_selector(text, version)


def test_a_bare_name_says_nothing_of_a_version() -> None:
    texts = ["net", "net@latest", "net@1", "net@prod", "net^"]

    assert [text for text in texts if parse_selector(text).is_bare] == texts[:2]


@pytest.mark.parametrize(
    ("glob", "inside", "outside"),
    [
        ("a.b", ["a.b"], ["axb", "a.bc", "a."]),
        ("a*", ["a", "a.b"], ["ba", "a/b"]),
        ("*b", ["b", "ab", "bb"], ["a/b", "ba"]),
        ("a?c", ["abc"], ["ac", "a/c", "abbc"]),
        ("**", ["a", "a/b/c"], []),
        ("a**c", ["ac", "a/b/c"], ["a/b/d"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "ab", "b/a/c"]),
        ("**/c", ["c", "b/c", "a/b/c"], ["bc", "b/cd", "c/d"]),
        ("a/**/c", ["a/c", "a/b/c", "a/b/b/c"], ["a/bc", "ac", "b/a/c"]),
        ("**/a*/**/b", ["a/b", "c/ab/d/e/b"], ["b", "c/b", "a/cb"]),
        ("[ab]c", ["ac", "bc"], ["cc", "c", "abc"]),
        ("[!ab]c", ["cc"], ["ac", "bc", "c"]),
        ("[a-c]", ["b"], ["d", "-"]),
        ("[]a]", ["]", "a"], ["b", "]a]"]),
        ("[\\[]", ["\\", "["], ["]", "a"]),
        ("a[b", ["a[b"], ["ab"]),
        ("a]", ["a]"], ["a"]),
        ("[a]?*", ["ab", "abc"], ["a", "b"]),
    ],
)
def test_a_glob_matches_whole_names(glob: str, inside: list[str], outside: list[str]) -> None:
    assert check_glob(glob) == glob
    assert [name for name in (*inside, *outside) if matches(glob, name)] == inside


def test_globs_have_a_length_a_number_of_stars_and_valid_sets() -> None:
    for glob in ("x" * 200, "*" * 16):
        assert check_glob(glob) == glob
    with pytest.raises(ConfigError, match="has 201 characters and 0 stars; a glob has at most 200"):
        check_glob("x" * 201)
    with pytest.raises(ConfigError, match="has 17 characters and 17 stars"):
        check_glob("*" * 17)
    with pytest.raises(ConfigError, match=r"\['z-a'\] is not a valid character set of a glob"):
        check_glob("[z-a]")


def test_the_prefix_of_a_glob_ends_where_it_leaves_something_open() -> None:
    assert [literal_prefix(glob) for glob in ("a/b", "a/*b", "a?b*", "[ab]c")] == ["a/b", "a/", "a", ""]
