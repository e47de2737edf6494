"""Files that follow from the keys of the config. This rewrites them: PYTHONPATH=.:tests python -m helpers.generated_files"""

import json

from helpers.project import ROOT
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import FIELDS, THEMES, Config, adapter, as_dict, to_yaml

DEFAULT_HEADER = "python train_unet.py configs/default.yaml data_dir=data/mine\nEvery key with its default."
KEYS_MARK = "<!-- keys: written from the code by tests/helpers/generated_files.py -->\n"
OVERRIDES_START = '''"""The keywords of `train` and `follow`, for editors and type checkers. Written by
tests/helpers/generated_files.py."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from unet_trainer.data.formats.given import Pairs
from unet_trainer.model.custom import CustomLoss, CustomModel
from unet_trainer.training.extension import Callback

class Keywords(TypedDict, total=False):
    loss: CustomLoss | Mapping[str, float] | str | None
    model: CustomModel | None
    train_data: Pairs | None
    val_data: Pairs | None
    callbacks: Sequence[Callback]
    # fmt: off
'''


def default_yaml():
    return to_yaml(Config(), DEFAULT_HEADER)


def page_of_keys():
    """docs/configuration.md as it is, and its tables of keys anew, one a theme."""
    before, mark, _ = (ROOT / "docs/configuration.md").read_text(encoding="utf-8").partition(KEYS_MARK)
    lines, defaults = [], as_dict(Config())
    for name, field in FIELDS.items():
        if name in THEMES:
            lines += ["", f"## {THEMES[name]}", "", "| key | default | meaning |", "| --- | --- | --- |"]
        meaning = field.metadata["sentence"].replace("|", r"\|")
        lines.append(f"| `{name}` | `{value_text(defaults[name])}` | {meaning} |")
    return before + mark + "\n".join(lines) + "\n"


def overrides():
    """The keys as keywords. Lists and paths may be written where a Config has tuples and text."""
    return OVERRIDES_START + "".join(
        f"    {key}: {typed(adapter(key).json_schema())}\n" for key in FIELDS if key != "loss"
    )


def typed(schema):
    """The type of what may be passed for a value of a JSON schema, as Python code."""
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(map(typed, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return f"Literal[{', '.join(map(json.dumps, schema.get('enum') or [schema['const']]))}]"
    if schema.get("type") == "array":
        return f"Sequence[{typed(schema.get('items') or (schema.get('prefixItems') or [{}])[0])}]"
    if schema.get("type") == "string" and "description" not in schema:
        return "str | PathLike[str]"
    names = {"integer": "int", "number": "float", "boolean": "bool", "null": "None", "string": "str"}
    return names.get(schema.get("type"), "Any")


GENERATED = {
    "configs/default.yaml": default_yaml,
    "docs/configuration.md": page_of_keys,
    "unet_trainer/config/overrides.pyi": overrides,
}

if __name__ == "__main__":
    for path, text in GENERATED.items():
        (ROOT / path).write_text(text(), encoding="utf-8")
