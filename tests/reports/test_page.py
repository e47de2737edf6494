"""The page around a report: its policy forbids the network, and what is filled in is not looked at again."""

from __future__ import annotations

import re

from helpers.report_runs import ATTACK
from unet_trainer.reports.html_elements import element
from unet_trainer.reports.page import FOLDER, fill_page, layout, page_policy
from unet_trainer.system.local_server import digest


def test_the_policy_allows_the_pages_own_style_and_script_and_nothing_from_elsewhere():
    page = fill_page("t", element("p", "x"))
    (style,), (script,) = (re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL) for name in ("style", "script"))
    policy = page_policy()
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; base-uri 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    assert page_policy(live=True) == policy.replace("img-src data:", "img-src data:; connect-src 'self'")
    assert f'content="{policy}"'.replace("'", "&#x27;") in page


def test_the_template_names_no_address_and_needs_no_other_file():
    for name in ("page.html", "page.css", "page.js"):
        content = (FOLDER / name).read_text()
        assert re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|innerHTML|eval\(", content) is None, name


def test_title_version_and_body_are_filled_in_once():
    page = fill_page("{{body}}<b>", element("p", "{{script}}", ATTACK), live="{{style}}")
    assert "<title>{{body}}&lt;b&gt;</title>" in page
    assert "<p>{{script}}&lt;img" in page
    assert '<body data-live="{{style}}">' in page
    assert "data-live" not in fill_page("t", element("p")).partition("<script>")[0]


def test_links_lead_to_the_sections_that_there_are():
    made = layout("Run", "words", [("a", "First", element("section", id="a")), ("b", "Second", None)], "foot")
    assert '<a href="#a">First</a>' in made
    assert "Second" not in made
