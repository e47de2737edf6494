"""HTML from values: all text and every attribute is escaped, unless it is Html already. Nothing else here makes markup.

Class names, paths, notices and names of files come from users and their data; no page builds HTML from strings.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unet_trainer.system.console import readable

VOID = frozenset({"img", "input", "br", "hr", "meta", "col"})
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # not allowed in HTML, or not in UTF-8


class Html(str):
    """Markup that is safe to put into a page."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def text(value: Any) -> Html:
    """Escaped for content and for quoted attributes."""
    return Html(html.escape(CONTROLS.sub("\ufffd", readable(str(value))), quote=True))


def element(tag: str, *children: Child, **attributes: Any) -> Html:
    """`class_` is class, `data_x` is data-x. An attribute that is True stands without a value; None and False leave it out."""
    parts = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        parts.append(name if value is True else f'{name}="{text(value)}"')
    start = f"<{' '.join(parts)}>"
    if tag in VOID:
        return Html(start)
    return Html(f"{start}{joined(children)}</{tag}>")


def joined(children: Iterable[Child]) -> Html:
    """Children of an element, one after another; None is nothing."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str | int | float):
            parts.append(text(child))
        else:
            parts.append(joined(child))
    return Html("".join(parts))


def as_json(value: Any) -> str:
    """For a data attribute, which `element` escapes. Raises ValueError for numbers that are not finite."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def table(
    header: Sequence[Child],
    rows: Iterable[Sequence[Child]],
    caption: str,
    row_headers: bool = True,
    numeric_from: int = 1,
    **attributes: Any,
) -> Html:
    """Scrolls within itself where it is too wide. `numeric_from`: columns from this one on are aligned as numbers."""

    def side(index: int) -> str | None:
        return "number" if index >= numeric_from else None

    head = [element("th", cell, scope="col", class_=side(index)) for index, cell in enumerate(header)]
    body = []
    for row in rows:
        first = element("th", row[0], scope="row") if row_headers else element("td", row[0])
        body.append(element("tr", first, *(element("td", cell, class_=side(index)) for index, cell in enumerate(row[1:], 1))))
    whole = element(
        "table",
        element("caption", caption, class_="unseen"),
        element("thead", element("tr", head)),
        element("tbody", body),
        **attributes,
    )
    return element("div", whole, class_="scroller", tabindex="0", role="region", aria_label=caption)


def details(summary: Child, *children: Child, key: str, is_open: bool = False) -> Html:
    """`key`: by which a page that is refreshed keeps it open."""
    return element("details", element("summary", summary), *children, data_key=key, open=is_open)


def section(key: str, title: str, *children: Child) -> Html:
    return element("section", element("h2", title, id=f"{key}-title"), *children, id=key, aria_labelledby=f"{key}-title")


def figure(kind: str, data: Mapping[str, Any], title: str, summary: Child, values: Html, key: str) -> Html:
    """A chart that the page's script draws from `data`; with its title, what it shows in words, and its numbers in a table."""
    return element(
        "figure",
        element("figcaption", element("h3", title), element("p", summary, class_="muted small")),
        element("div", class_="chart", data_kind=kind, data_chart=as_json(data), data_key=key),
        details("The numbers", values, key=f"{key}-numbers"),
        class_="panel",
    )
