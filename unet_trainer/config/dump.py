"""A Config as plain values and as YAML text that reads back to the same Config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from unet_trainer.config.safe_yaml import Plain, interpret
from unet_trainer.config.schema import FIELDS, THEMES, Config, explanations


def as_dict(config: Config) -> dict[str, Any]:
    """The config as plain dicts, lists and primitives."""
    return {name: to_plain(getattr(config, name)) for name in FIELDS}


def to_plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: to_plain(item) for name, item in value.items()}
    return value


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read back as something else: our numbers are not those of PyYAML, and it loses a \\x85."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if not text.isprintable() else "'" if interpret(Plain(text)) != text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(config: Config, header: str, reasons: Mapping[str, str] | None = None) -> str:
    """The config as YAML that runs again as it is. Each key has a comment: its reason if there is one, else its meaning."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for name, value in as_dict(config).items():
        if name in THEMES:
            lines += ["", f"# {THEMES[name]}"]
        comment = (reasons or {}).get(name) or explanations()[name]
        lines.append(f"{name}: {value_text(value)}  # {' '.join(comment.split())}")
    return "\n".join(lines) + "\n"


def value_text(value: Any) -> str:
    """A plain value in YAML, on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


def to_markdown() -> str:
    """The keys of the config as tables for docs/configuration.md, one a theme."""
    lines = []
    defaults = as_dict(Config())
    for name in FIELDS:
        if name in THEMES:
            lines += ["", f"## {THEMES[name]}", "", "| key | default | meaning |", "| --- | --- | --- |"]
        meaning = explanations()[name].replace("|", r"\|")
        lines.append(f"| `{name}` | `{value_text(defaults[name])}` | {meaning} |")
    return "\n".join(lines) + "\n"
