"""The gallery of a report: pictures with a slider between truth and prediction, an error map, sorting, and a full-size view."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from unet_trainer.images.error_maps import ERROR_COLOURS, ErrorKind
from unet_trainer.reports.gallery import Colour, Gallery, Picture
from unet_trainer.reports.html_elements import Child, Html, element, section
from unet_trainer.reports.number_texts import percent, score
from unet_trainer.runs.run_summary import RunSummary
from unet_trainer.system.console import counted

SORTS = (
    ("worst", "IoU, worst first"),
    ("best", "IoU, best first"),
    ("wrong", "share of wrong pixels"),
    ("object", "share of objects"),
    ("name", "name"),
)
VIEWS = (
    ("slider", "Truth | prediction"),
    ("errors", "Errors"),
    ("truth", "Truth"),
    ("prediction", "Prediction"),
    ("image", "Image"),
)
GROUP_WORDS = {"worst": "Worst", "median": "Middle", "best": "Best"}
SIDES = Html(
    element("span", "truth", class_="side left", aria_hidden="true")
    + element("span", "prediction", class_="side right", aria_hidden="true")
)
MAX_NAMED = 24  # classes in the legend


def image_section(
    summary: RunSummary, distribution: Html | None, gallery: Gallery, sample_sheet: tuple[int, bytes] | None
) -> Html | None:
    """`sample_sheet`: epoch and JPEG of the samples that training drew, where there are no pictures to look at."""
    parts: list[Child] = [distribution]
    if gallery.pictures:
        parts.append(_gallery(summary, gallery))
    elif sample_sheet is not None:
        epoch, content = sample_sheet
        parts.append(
            element(
                "figure",
                element(
                    "figcaption",
                    element("h3", f"Samples of epoch {epoch}"),
                    element("p", "Image, truth, prediction and errors of a few validation images.", class_="muted small"),
                ),
                element(
                    "img",
                    src=_data_uri(content, "image/jpeg"),
                    alt=f"Samples of epoch {epoch}: image, truth, prediction and error map in each row",
                    class_="sheet",
                    loading="lazy",
                ),
                class_="panel",
            )
        )
    if gallery.note:
        parts.append(element("p", gallery.note, class_="banner", role="note"))
    return section("images", "Validation images", parts) if any(part is not None for part in parts) else None


def _gallery(summary: RunSummary, gallery: Gallery) -> Html:
    has_background = len(summary.class_names) < len(summary.id_names)
    pictures = sorted(gallery.pictures, key=lambda picture: picture.score.iou if picture.score.iou is not None else 2.0)
    groups = [name for name in GROUP_WORDS if any(picture.group == name for picture in pictures)]
    if not gallery.is_ranked:
        words = f"{counted(len(pictures), 'image')} of the validation set, scored for this report: the run kept no scores."
    else:
        words = (
            f"The worst, the middle and the best of {counted(len(summary.image_scores), 'image')} by their IoU at the best epoch."
        )
    choices = [("all", f"All ({len(pictures)})")]
    choices += [(name, f"{GROUP_WORDS[name]} ({sum(picture.group == name for picture in pictures)})") for name in groups]
    return element(
        "div",
        element("h3", "Where the model fails, and where it does not"),
        element(
            "p",
            words,
            " Drag the line, or focus it and use the arrow keys; a click on a picture shows it in full size.",
            class_="muted small",
        ),
        element(
            "div",
            _radios("gallery-view", "Show", VIEWS, "slider"),
            _radios("gallery-group", "Images", choices, "all"),
            element(
                "label",
                "Sort by ",
                element("select", [element("option", text, value=value) for value, text in SORTS], id="gallery-sort"),
            ),
            class_="controls",
        ),
        _legend(summary.id_names, gallery.colours, has_background),
        element(
            "ul",
            [_card(picture, summary.id_names, index) for index, picture in enumerate(pictures)],
            id="gallery",
            class_="gallery",
            data_view="slider",
        ),
        _viewer(),
        class_="panel",
    )


def _radios(name: str, legend: str, choices: Sequence[tuple[str, str]], chosen: str) -> Html:
    return element(
        "fieldset",
        element("legend", legend, class_="unseen"),
        [
            element("label", element("input", type="radio", name=name, value=value, checked=value == chosen), element("span", text))
            for value, text in choices
        ],
        class_="segments",
    )


def _legend(names: Sequence[str], colours: Sequence[Colour], has_background: bool) -> Html:
    entries = [(names[index], colours[index]) for index in range(1, min(len(names), len(colours)))]
    more = len(entries) - MAX_NAMED
    items = [_legend_item(name, colour) for name, colour in entries[:MAX_NAMED]]
    if more > 0:
        items.append(element("li", f"and {more} more"))
    if not has_background and names:
        items.append(element("li", f"not tinted: {names[0]}"))
    kinds = (ErrorKind.FOUND, ErrorKind.MISSED, ErrorKind.FALSE) if has_background else (ErrorKind.WRONG,)
    words = {ErrorKind.FOUND: "found", ErrorKind.MISSED: "missed", ErrorKind.FALSE: "falsely found", ErrorKind.WRONG: "wrong"}
    errors = [_legend_item(words[kind], ERROR_COLOURS[kind]) for kind in kinds]
    return element(
        "div",
        element("ul", items, class_="legend", aria_label="Classes"),
        element("ul", errors, class_="legend", aria_label="Errors"),
        class_="legends small muted",
    )


def _legend_item(name: str, colour: Colour) -> Html:
    box = element("rect", width="12", height="12", rx="3", fill="#{:02x}{:02x}{:02x}".format(*colour))
    return element("li", element("svg", box, class_="swatch", width="12", height="12", aria_hidden="true"), name)


def _card(picture: Picture, id_names: Sequence[str], index: int) -> Html:
    found = picture.score
    wrong = found.wrong_pixels / max(1, found.counted_pixels)
    counts = list(found.classes.values())
    objects = sum(one.truth for one in counts[0 if len(counts) == 1 else 1 :]) / max(1, found.counted_pixels)
    name = found.image
    classes = (
        "; ".join(f"{key} {score(one.iou, 3)}" for key, one in found.classes.items() if one.iou is not None)
        if len(counts) > 1
        else ""
    )
    text = f"{name}: IoU {score(found.iou, 3)}, {percent(wrong)} of the pixels wrong"
    height, width = picture.shown
    size = {"width": width, "height": height, "alt": "", "draggable": "false"}
    layers = [
        element("img", class_=f"layer {kind}", src=_data_uri(content, "image/png"), **size)
        for kind, content in (("truth", picture.truth), ("prediction", picture.prediction), ("errors", picture.errors))
    ]
    photo = element("img", class_="photo", src=_data_uri(picture.image, picture.image_type), **{**size, "alt": text})
    return element(
        "li",
        element(
            "div",
            element("div", photo, layers, element("span", class_="divider"), SIDES, class_="stack"),
            element(
                "input",
                type="range",
                min="0",
                max="100",
                value="50",
                class_="slide",
                aria_label=f"Truth to the left, prediction to the right: {name}",
            ),
            class_="frame",
        ),
        element(
            "div",
            element(
                "button",
                element("strong", f"IoU {score(found.iou, 3)}"),
                element("span", GROUP_WORDS[picture.group], class_="muted"),
                type="button",
                class_="enlarge",
                aria_label=f"Full size: {text}",
            ),
            element("p", name, class_="name small muted", title=name),
            element("p", f"{percent(wrong)} wrong, {picture.size[1]}×{picture.size[0]}", class_="small muted"),
            class_="caption",
        ),
        data_group=picture.group,
        data_iou=f"{found.iou:.6f}" if found.iou is not None else "2",
        data_wrong=f"{wrong:.6f}",
        data_object=f"{objects:.6f}",
        data_name=name,
        data_text=f"{text}{f'. {classes}' if classes else ''}",
        data_index=index,
    )


def _viewer() -> Html:
    return element(
        "dialog",
        element(
            "div",
            element("p", id="viewer-text", aria_live="polite"),
            element(
                "div",
                element("button", "←", type="button", id="viewer-before", aria_label="The image before"),
                element("button", "→", type="button", id="viewer-after", aria_label="The next image"),
                element("button", "Close", type="button", id="viewer-close"),
                class_="buttons",
            ),
            class_="viewer-head",
        ),
        element("div", id="viewer-frame"),
        id="viewer",
        aria_label="Full size",
    )


def _data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
