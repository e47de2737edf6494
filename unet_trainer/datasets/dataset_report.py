"""Everything known of a dataset before the first step: pairs, facts of every file, classes, image spec, split, problems.

Training and `check` both use this report: a dataset that passes check can be trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unet_trainer.config.facts import DatasetFacts, Measurements
from unet_trainer.config.schema import Config, id_names
from unet_trainer.datasets.class_statistics import class_shares, has_background
from unet_trainer.datasets.coding_choice import ChosenClasses
from unet_trainer.datasets.image_kind import ImageKind
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.problems import Choice, Problem, Question, describe_problems
from unet_trainer.datasets.scan import ImageFacts, MaskFacts
from unet_trainer.datasets.splits import Split
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_coding import MaskCoding
from unet_trainer.system.console import counted


@dataclass
class DatasetReport:
    """What was found. `pairs`, `images` and `masks` hold the usable pairs only, in the same order."""

    found: FoundPairs
    pairs: list[Pair] = field(default_factory=list)
    images: list[ImageFacts] = field(default_factory=list)
    masks: list[MaskFacts] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)  # what the user must decide
    notices: list[str] = field(default_factory=list)
    kind: ImageKind | None = None
    coding: MaskCoding | None = None
    image_spec: ImageSpec | None = None
    statistics_reason: str = ""
    split: Split | None = None
    classes: ChosenClasses | None = None  # its coding, and how many classes there are
    advised: dict[str, Any] = field(default_factory=dict)  # settings for a better split, which a notice explains

    @property
    def blocking_message(self) -> str:
        """All reasons why the data cannot be trained on; empty if it can."""
        others = [problem for problem in self.problems if problem not in self.found.problems]
        parts = (self.found.blocking_message, describe_problems(others), *map(str, self.questions))
        return "\n".join(text for text in parts if text)

    @property
    def choices(self) -> list[Choice]:
        """The answers to its questions."""
        return [choice for question in self.questions for choice in question.choices]

    @property
    def has_answers(self) -> bool:
        """Whether settings would solve a problem or answer a question."""
        return bool(self.choices) or any(problem.settings for problem in self.problems)

    def decided(self, config: Config) -> Config:
        """The config with the number and the names of the classes that were found."""
        if self.classes is None:
            return config
        names = config.class_names or self.classes.class_names
        return replace(config, num_classes=self.classes.num_classes, class_names=names)

    def checked(self) -> CheckedDataset:
        """The dataset, if it can be trained on; raises DataError with all reasons why it cannot."""
        message = self.blocking_message
        if message or self.kind is None or self.classes is None or self.image_spec is None or self.split is None:
            raise DataError(message or "the dataset has no pair that can be used")
        return CheckedDataset(
            tuple(self.pairs),
            tuple(self.images),
            tuple(self.masks),
            self.kind,
            self.classes,
            self.image_spec,
            self.statistics_reason,
            self.split,
            tuple(self.notices),
        )


@dataclass(frozen=True)
class CheckedDataset:
    """A dataset that can be trained on. `pairs`, `images` and `masks` are in the same order."""

    pairs: Sequence[Pair]
    images: Sequence[ImageFacts]
    masks: Sequence[MaskFacts]
    kind: ImageKind
    classes: ChosenClasses
    image_spec: ImageSpec
    statistics_reason: str
    split: Split
    notices: Sequence[str]

    @property
    def coding(self) -> MaskCoding:
        return self.classes.coding

    @property
    def num_ids(self) -> int:
        return max(2, self.classes.num_classes)

    def has_background(self, config: Config) -> bool:
        """Whether class 0 is what no class is. The config has the classes that were found."""
        return has_background(id_names(config), class_shares(self.masks, self.coding, self.num_ids))

    def facts_of(self, pairs: Sequence[Pair]) -> tuple[list[ImageFacts], list[MaskFacts]]:
        """The scanned facts of some of the pairs, in their order."""
        return facts_of(pairs, self.pairs, self.images, self.masks)

    def facts(self, measurements: Measurements | None = None) -> DatasetFacts:
        """The facts from which `resolve` decides."""
        images, _ = self.facts_of(self.split.train)
        val_images, _ = self.facts_of(self.split.val)
        return DatasetFacts(
            channels=self.image_spec.channels,
            mean=self.image_spec.mean,
            std=self.image_spec.std,
            statistics_reason=self.statistics_reason,
            mask_values=self.coding.mask_values,
            ignore_value=self.coding.written_ignore_value,
            mask_reason=self.coding.reason,
            class_shares=class_shares(self.masks, self.coding, self.num_ids),
            train_sizes=[image.size for image in images],
            val_sizes=[image.size for image in val_images],
            bytes_per_value=1 if self.image_spec.is_8bit else 4,
            measurements=measurements,
            num_classes=self.classes.num_classes,
            num_classes_reason=self.classes.num_classes_reason,
            class_names=self.classes.class_names,
            class_names_reason=self.classes.class_names_reason,
            mask_tolerance=self.coding.tolerance,
        )


def facts_of(
    wanted: Sequence[Pair], pairs: Sequence[Pair], images: Sequence[ImageFacts], masks: Sequence[MaskFacts]
) -> tuple[list[ImageFacts], list[MaskFacts]]:
    """The facts of the pairs that are wanted, in their order."""
    positions = {pair.image: index for index, pair in enumerate(pairs)}
    indices = [positions[pair.image] for pair in wanted]
    return [images[index] for index in indices], [masks[index] for index in indices]


def describe_sizes(images: Sequence[ImageFacts], most: int = 3) -> str:
    sizes = Counter(image.size for image in images)
    shown = ", ".join(f"{width}×{height}" for (height, width), _ in sizes.most_common(most))
    return shown + (f" and {counted(len(sizes) - most, 'more size')}" if len(sizes) > most else "")
