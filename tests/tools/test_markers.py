"""Sections of pages between markers."""

import pytest

from tools.markers import MissingSectionError, markers, read_section, replace_section

PAGE = "head\n<!-- a:begin -->\nold\n<!-- a:end -->\ntail <!-- b:begin --><!-- b:end -->\n"


def test_a_section_is_replaced_and_read() -> None:
    page = replace_section(PAGE, "a", "new")
    assert page == PAGE.replace("\nold\n", "\n\nnew\n\n")
    assert read_section(page, "a") == "new"
    assert read_section(page, "b") == ""
    assert replace_section(page, "a", "new") == page


@pytest.mark.parametrize("lost", [*markers("a"), "".join(markers("a"))])
def test_a_page_without_the_markers_is_refused(lost: str) -> None:
    page = PAGE.replace(lost, "") if lost in PAGE else "no markers"
    for act in (lambda: read_section(page, "a"), lambda: replace_section(page, "a", "new")):
        with pytest.raises(MissingSectionError, match="put <!-- a:begin --> and <!-- a:end -->"):
            act()


def test_an_end_before_its_beginning_is_refused() -> None:
    begin, end = markers("a")
    with pytest.raises(MissingSectionError):
        read_section(f"{end}{begin}", "a")
