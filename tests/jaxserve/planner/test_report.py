import xml.etree.ElementTree as ElementTree

from jaxserve.planner.report import lines, page, table


def test_a_page_is_well_formed_and_needs_nothing_else():
    text = page("a < b", [("one", table([["", "x"], ["row", "1"]])), ("two", lines(["<i>"]))])
    assert text.startswith("<!doctype html>\n")
    body = text.partition("</head>")[2].removesuffix("</html>\n").strip()
    root = ElementTree.fromstring(body)
    assert [heading.text for heading in root.iter("h2")] == ["one", "two"]
    assert [cell.text for cell in root.iter("td")] == ["row", "1"]
    assert [item.text for item in root.iter("li")] == ["<i>"]
    assert "http" not in text


def test_cells_that_do_not_agree_are_red_and_quiet_rows_grey():
    text = table([["", "x"], ["row", "+1.00% !"]])
    assert '<td class="wrong">+1.00% !</td>' in text
    text = table([["", "x"], ["ours", "1"], ["paper", "1"]], quiet=[2])
    assert text.count('class="muted"') == 1
