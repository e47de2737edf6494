"""What a run was: data, settings with source and reason, machine and speed, what happened, what to do next. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from unet_trainer.config.dump import value_text
from unet_trainer.reports.html_elements import Child, Html, details, element, section, table
from unet_trainer.reports.number_texts import NONE, count, duration, moment, percent, rate
from unet_trainer.reports.score_sections import epoch_seconds
from unet_trainer.runs.run_folder import BEST, has_checkpoint
from unet_trainer.runs.run_summary import RunSummary, Setting
from unet_trainer.system.console import counted

SOURCE_WORDS = {"config": "script", "": "not known"}
SET_BY_HAND = ("command line", "file", "config", "argument")
EVENT_WORDS = {
    "start": "Started",
    "resumed": "Resumed",
    "killed": "Killed",
    "interrupted": "Interrupted",
    "failed": "Failed",
    "finished": "Finished",
    "stopped early": "Stopped early",
    "rollback": "Went back to a saved state",
    "shrink": "Memory ran out",
    "warning": "Warning",
    "note": "Note",
}
MAX_EVENTS = 200


def facts(pairs: Sequence[tuple[str, Child]]) -> Html:
    """A list of names and values; those without a value are left out."""
    return element("dl", [(element("dt", name), element("dd", value)) for name, value in pairs if value not in (None, "", NONE)])


def data_section(summary: RunSummary) -> Html:
    data = summary.data
    if not data:
        where = summary.value("data_dir")
        return section(
            "data", "Data", element("p", f"The run kept no facts of its data{f' ({where})' if where else ''}.", class_="muted")
        )
    numbers = [
        f"{count(number)} {name}"
        for key, name in (("num_train", "train"), ("num_val", "val"), ("num_test", "test"))
        if (number := _whole(data.get(key)))
    ]
    size = data.get("model_size")
    model_size = f"{size[0]}×{size[1]}" if isinstance(size, list) and len(size) == 2 else ""
    fits = {"resize": "images are resized to it", "crop": "crops of it at the images' own resolution"}
    pairs: list[tuple[str, Child]] = [
        ("Folder", element("code", data.get("data_dir", ""))),
        ("Images", f"{data.get('images', '')}; {data.get('sizes', '')}"),
        ("Split", f"{', '.join(numbers)}. {data.get('split', '')}"),
        ("Size in the model", f"{model_size} ({fits.get(str(data.get('fit')), data.get('fit', ''))})"),
        ("Ignored pixels", percent(data.get("ignored_share")) if data.get("ignored_share") else None),
    ]
    classes = [entry for entry in data.get("classes") or [] if isinstance(entry, dict)]
    rows = [[entry.get("name", ""), str(entry.get("values", "")), percent(entry.get("share"))] for entry in classes]
    notices = [str(notice) for notice in data.get("notices") or []]
    return section(
        "data",
        "Data",
        element(
            "div",
            element("div", facts(pairs), class_="panel"),
            element(
                "div",
                element("h3", "Classes in the masks"),
                table(["class", "values in the masks", "share of pixels"], rows, "Classes in the masks", numeric_from=2),
                class_="panel",
            )
            if rows
            else None,
            class_="grid",
        ),
        element(
            "div",
            element("h3", "What the check of the data found"),
            element("ul", [element("li", notice) for notice in notices]),
            class_="panel",
        )
        if notices
        else None,
    )


def settings_section(summary: RunSummary) -> Html | None:
    """Every value that the run took: first those that were set or decided, then the defaults."""
    if not summary.settings:
        return None
    groups: tuple[tuple[str, str, bool, list[tuple[str, Setting]]], ...] = (
        ("set", "Set by you", True, _of_sources(summary, SET_BY_HAND)),
        ("decided", "Decided from the data and the machine", True, _of_sources(summary, ("decided",))),
        ("default", "Defaults", False, _of_sources(summary, ("default",))),
        ("unknown", "Source not known (of an earlier version)", False, _of_sources(summary, ("",))),
    )
    model = summary.model
    size = f", {model['parameters'] / 1e6:.1f} M parameters" if isinstance(model.get("parameters"), int) else ""
    described = f"{model['architecture']} with {model['encoder']}{size}. " if "architecture" in model and "encoder" in model else ""
    return section(
        "settings",
        "Settings",
        element("p", described, "config.yaml has all of them and runs again as it is.", class_="muted"),
        [
            element(
                "div",
                details(f"{title} ({len(found)})", _settings_table(found, title), key=f"settings-{key}", is_open=is_open),
                class_="panel",
            )
            for key, title, is_open, found in groups
            if found
        ],
    )


def _of_sources(summary: RunSummary, sources: Sequence[str]) -> list[tuple[str, Setting]]:
    return [(name, setting) for name, setting in summary.settings.items() if setting.source in sources]


def _settings_table(found: Sequence[tuple[str, Setting]], title: str) -> Html:
    has_reasons = any(setting.reason for _, setting in found)
    rows = [
        [
            element("code", name),
            element("code", value_text(setting.value)),
            SOURCE_WORDS.get(setting.source, setting.source),
            *([setting.reason] if has_reasons else []),
        ]
        for name, setting in found
    ]
    header = ["setting", "value", "source", *(["reason"] if has_reasons else [])]
    return table(header, rows, title, numeric_from=9, class_="settings")


def machine_section(summary: RunSummary) -> Html | None:
    machine = summary.machine
    versions = _mapping(machine.get("versions"))
    memory = max((value for _, value in summary.column("peak_memory_gib")), default=0.0)
    reserved = max((value for _, value in summary.column("peak_reserved_gib")), default=0.0)
    result = summary.result or {}
    pairs: list[tuple[str, Child]] = [
        ("Device", " – ".join(str(part) for part in (machine.get("device"), machine.get("name")) if part)),
        ("CPU and memory", ", ".join(_cpu_words(machine))),
        ("System", ", ".join(str(part) for part in (machine.get("system"), machine.get("host")) if part)),
        (
            "Numbers",
            ", ".join(str(part) for part in (result.get("number_format"), "compiled" if result.get("is_compiled") else "") if part),
        ),
        ("Peak GPU memory", f"{memory:.2f} GiB (reserved {reserved:.2f} GiB)" if memory else None),
        (
            "Versions",
            ", ".join(f"{name} {version}" for name, version in [("Python", machine.get("python")), *versions.items()] if version),
        ),
    ]
    speed = stage_table(summary)
    if not machine and speed is None:
        return None
    return section(
        "machine",
        "Machine and speed",
        element(
            "div",
            element("div", facts(pairs), class_="panel") if machine else None,
            element("div", element("h3", "Where the time went"), speed, class_="panel") if speed is not None else None,
            class_="grid",
        ),
    )


def _cpu_words(machine: Mapping[str, Any]) -> list[str]:
    cores, memory = machine.get("cores"), machine.get("memory_gib")
    return [*([counted(cores, "core")] if isinstance(cores, int) else []), *([f"{memory} GiB"] if memory else [])]


def stage_table(summary: RunSummary) -> Html | None:
    """Seconds of each stage, over all epochs that are kept."""
    stages = [epoch.stages for epoch in summary.epochs if epoch.stages]
    if not stages:
        return None

    def total(name: str) -> float:
        return sum(stage.get(name, 0.0) for stage in stages)

    def mean(name: str) -> float | None:
        values = [stage[name] for stage in stages if name in stage]
        return sum(values) / len(values) if values else None

    whole = max(1e-9, (summary.startup_seconds or 0.0) + epoch_seconds(summary))
    waits = summary.column("data_wait")
    times = [
        ("start-up (the last one)", summary.startup_seconds or 0.0),
        ("training", total("train_seconds")),
        ("validation", total("val_seconds")),
    ]
    rows: list[Sequence[Child]] = [[name, duration(seconds), percent(seconds / whole, 0)] for name, seconds in times]
    if waits:
        rows.append(["waiting for data, of training", NONE, percent(sum(value for _, value in waits) / len(waits))])
    for name, words in (("read_seconds_per_image", "reading an image"), ("augment_seconds_per_image", "augmenting an image")):
        if (seconds := mean(name)) is not None:
            rows.append([words, duration(seconds), NONE])
    speeds = [value for _, value in summary.column("images_per_second")]
    if speeds:
        rows.append(["images/s, slowest and fastest epoch", f"{rate(min(speeds))} – {rate(max(speeds))}", NONE])
    return table(["stage", "time", "share"], rows, "Where the time went")


def event_section(summary: RunSummary) -> Html | None:
    """What happened, in order; of very many the last ones."""
    events = [event for event in summary.events if event.kind in EVENT_WORDS]
    if not events:
        return None
    shown = events[-MAX_EVENTS:]
    items = []
    for event in shown:
        where = "" if event.epoch is None else f" after epoch {event.epoch}" if event.epoch else " before the first epoch was done"
        where = "" if event.kind == "start" else where
        items.append(
            element(
                "li",
                element("span", moment(event.time), class_="muted small time"),
                element("span", element("strong", EVENT_WORDS[event.kind]), where, f": {event.text}" if event.text else ""),
                class_=f"event {event.kind.replace(' ', '-')}",
            )
        )
    left_out = len(events) - len(shown)
    note = (
        element("p", f"The last {MAX_EVENTS}; events.jsonl has the {left_out} before them.", class_="muted") if left_out else None
    )
    interruptions = sum(event.kind in ("interrupted", "killed", "failed") for event in events)
    words = "Nothing interrupted the run." if not interruptions else f"Interrupted {counted(interruptions, 'time')}."
    return section(
        "events", "What happened", element("p", words, class_="muted"), note, element("ol", items, class_="panel events")
    )


def command_section(summary: RunSummary) -> Html:
    run = shlex.quote(str(summary.folder))
    has_best = (summary.folder / BEST).is_file()
    found = []
    if summary.state == "running":
        found.append(("watch it", f"python train_unet.py watch {run}"))
    elif has_checkpoint(summary.folder):
        epochs = len(summary.epochs)
        is_done = summary.state in ("finished", "stopped early")
        more = f" num_epochs={max(epochs + 1, round(1.5 * epochs))}" if is_done and not summary.value("time_budget") else ""
        found.append(("train on" if is_done else "go on where the state was saved", f"python train_unet.py --resume {run}{more}"))
    if has_best:
        found += [
            ("scores at native resolution, with intervals", f"python train_unet.py evaluate {run}"),
            ("what the model makes of other images", f"python train_unet.py predict {run} IMAGES --out predictions"),
            ("the same in a browser", f"python train_unet.py try {run}"),
            ("a file for other programs", f"python train_unet.py export {run}"),
        ]
    found.append(("this report again, with pictures", f"python train_unet.py report {run}"))
    items = [
        element(
            "li",
            element("p", words, class_="small muted"),
            element(
                "p", element("code", line), element("button", "Copy", type="button", class_="copy", hidden=True), class_="command"
            ),
        )
        for words, line in found
    ]
    return section("next", "What to do next", element("ul", items, class_="panel commands"))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
