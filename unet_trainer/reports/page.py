"""One self-contained page: style and script are inlined, and its policy forbids everything else, the network first of all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from unet_trainer.reports.html_elements import Child, Html, element, text
from unet_trainer.system.local_server import digest

FOLDER = Path(__file__).parent
MARK = re.compile(r"\{\{(\w+)\}\}")


@cache
def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def page_policy(live: bool = False) -> str:
    """Own style and script by their digests, pictures within the file; a live page may ask its own server as well."""
    connect = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; script-src '{digest(_file('page.js'))}'; style-src '{digest(_file('page.css'))}'; "
        f"img-src data:{connect}; base-uri 'none'; form-action 'none'"
    )


def fill_page(title: str, body: Html, live: str | None = None) -> str:
    """`live`: the version of a page that its server refreshes."""
    values: Mapping[str, str] = {
        "policy": text(page_policy(live is not None)),
        "title": text(title),
        "style": _file("page.css"),
        "script": _file("page.js"),
        "live": f' data-live="{text(live)}"' if live is not None else "",
        "body": body,
    }
    return MARK.sub(lambda found: values[found[1]], _file("page.html"))  # one pass: what is filled in is not looked at again


def layout(heading: Child, subtitle: Child, sections: Sequence[tuple[str, str, Html | None]], footer: Child) -> Html:
    """Header, links to the sections that there are, the sections. `sections`: key, short name, content."""
    present = [(key, name, content) for key, name, content in sections if content is not None]
    links = [element("li", element("a", name, href=f"#{key}")) for key, name, _ in present if name]
    parts = [
        element("header", element("div", element("h1", heading), element("p", subtitle, class_="muted"), class_="wide"), id="head"),
        element("nav", element("ul", links, class_="wide"), aria_label="Sections", id="links"),
        element("main", [content for _, _, content in present], id="main", class_="wide"),
        element("footer", footer, class_="wide muted small", id="foot"),
    ]
    return Html("\n".join(parts))
