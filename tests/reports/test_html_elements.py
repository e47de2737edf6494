"""HTML from values: whatever a user's data holds, it is text on the page and never markup."""

from __future__ import annotations

import html
from html.parser import HTMLParser

import pytest

from helpers.report_runs import ATTACK
from unet_trainer.reports.html_elements import Html, as_json, details, element, figure, joined, section, table, text


class Seen(HTMLParser):
    """Tags, attributes and text of a piece of HTML."""

    def __init__(self, markup):
        super().__init__()
        self.tags, self.attributes, self.words = [], {}, ""
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data):
        self.words += data


def test_an_element_has_children_and_attributes():
    made = element("p", "a ", element("b", 1), None, ["x", "y"], class_="c", data_key="k", hidden=True, title=None, open=False)
    assert made == '<p class="c" data-key="k" hidden>a <b>1</b>xy</p>'
    assert element("img", alt="") == '<img alt="">'
    assert isinstance(made, Html)


@pytest.mark.parametrize("place", ["text", "attribute", "table", "details", "section", "figure"])
def test_hostile_text_is_text_everywhere(place):
    made = {
        "text": lambda: element("p", ATTACK),
        "attribute": lambda: element("p", title=ATTACK),
        "table": lambda: table([ATTACK], [[ATTACK]], ATTACK),
        "details": lambda: details(ATTACK, ATTACK, key=ATTACK),
        "section": lambda: section("k", ATTACK, ATTACK),
        "figure": lambda: figure("lines", {"name": ATTACK}, ATTACK, ATTACK, element("p"), "k"),
    }[place]()
    seen = Seen(made)
    assert not {"img", "script"} & set(seen.tags)
    assert "onerror" not in seen.attributes
    assert ATTACK in seen.words or ATTACK in seen.attributes.values()


def test_characters_that_a_page_cannot_hold_are_replaced_and_bytes_of_names_shown():
    assert text("a\x00\x1bb") == "a\ufffd\ufffdb"
    assert text("b\udce4r") == "b\\xe4r"
    assert text("\ud800") == "\ufffd"
    joined(["\ud800", text("\udfff")]).encode()  # UTF-8 takes it


def test_data_of_a_chart_comes_back_from_its_attribute():
    made = figure("lines", {"name": ATTACK, "ys": [0.5, None]}, "t", "s", element("p"), "k")
    data = Seen(made).attributes["data-chart"]
    assert data == as_json({"name": ATTACK, "ys": [0.5, None]})
    assert html.escape(data, quote=True) in made


def test_a_number_that_is_not_finite_is_refused_in_data():
    with pytest.raises(ValueError):
        as_json([float("nan")])
