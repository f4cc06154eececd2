"""Texts of agents cannot become markup, numbers are short, and links to Temporal are complete."""

from markupsafe import escape

from viewer.rendering import _data_json, highlighted, in_words, short_number, workflow_link
from viewer.settings import ViewerSettings

MARKUP = "</script><script>alert(1)</script>"


def test_data_cannot_end_its_script_element() -> None:
    assert "<" not in _data_json({"title": MARKUP})


def test_highlighted_code_is_escaped() -> None:
    for language, path in (("bash", ""), ("", "a.html"), ("", "a.unknown"), ("", ""), ("no such language", "")):
        assert "<script" not in highlighted(MARKUP, language, path), (language, path)
    assert highlighted("<" * 100_000) == escape("<" * 100_000)


def test_numbers_and_durations() -> None:
    assert [short_number(one) for one in (None, 1234567, 0.123456, 12345.6, 0.0)] == [
        "",
        "1,234,567",
        "0.1235",
        "12,346",
        "0",
    ]
    assert [in_words(one) for one in (None, 2.34, 45, 600, 9000, 400_000)] == [
        "",
        "2.3 s",
        "45 s",
        "10 min",
        "2.5 h",
        "5 d",
    ]


def test_a_workflow_id_with_slashes_is_one_part_of_the_address() -> None:
    settings = ViewerSettings("", temporal_ui="http://ui:8233", temporal_namespace="team")
    assert workflow_link(settings, "rollout/r/1") == "http://ui:8233/namespaces/team/workflows/rollout%2Fr%2F1"
    assert workflow_link(ViewerSettings(""), "rollout/r/1") == ""
