"""Exports a trained model for other programs: ONNX, a program of torch.export (.pt2), or a folder for
smp.from_pretrained.

    images N,C,H,W float32 in the files' own units, H and W multiples of 32  →  ExportNetwork  →  logits of every id

Every export is loaded again and compared with torch before it gets its name. An ONNX file takes any H and W: padding is
added to its graph. In a program of torch.export it breaks variable sizes, and is left to the caller.
"""

import contextlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from jinja2 import Environment, StrictUndefined
from torch.export import Dim

from unet_trainer import __version__
from unet_trainer.config.errors import UserError
from unet_trainer.config.parsers import SMALL_RESNET
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.inference.engine import CARD_KEY, INPUT, OUTPUT, ModelCard, OnnxEngine, add_digest, import_optional
from unet_trainer.model.network import SMALL_RESNET_OPTIONS
from unet_trainer.model.segmenter import FLAT, STRIDE, Segmenter, SegmenterSpec, class_logits
from unet_trainer.runs.folder import SMP_CARD, SMP_WEIGHTS
from unet_trainer.system.atomic_files import atomic_open, write_bytes_atomically
from unet_trainer.system.console import counted, first_line
from unet_trainer.system.input_files import read_json

TOLERANCE = 1e-3  # largest difference of two logits, where the largest logit is 1 or less; in proportion above
MAX_SIDE = 256  # of the images that are compared, so that comparing takes seconds
OPSET = 20  # of onnxruntime 1.17 (January 2024) and later
# Any number of images; height and width any multiple of STRIDE.
DYNAMIC_SHAPES = {"images": {0: Dim("batch"), 2: STRIDE * Dim("rows"), 3: STRIDE * Dim("columns")}}
CARD_FILE = "card.json"  # in a .pt2 file
LEAST_PT2_SIDE = 2 * STRIDE  # torch.export takes a size of 1 for a constant, and the deepest stage of 32 pixels has it
README, README_TEMPLATE = "README.md", Path(__file__).with_name("smp_readme.md")
SMP_FILES = ("config.json", SMP_WEIGHTS, README, SMP_CARD)


class ExportError(UserError):
    """A model that cannot be exported, or not faithfully."""


class ExportNetwork(torch.nn.Module):
    """Normalises and runs a Segmenter's network."""

    def __init__(self, segmenter: Segmenter) -> None:
        super().__init__()
        self.segmenter = segmenter

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """N,C,H,W float32 → N,K,H,W float32."""
        return class_logits(self.segmenter.network(self.segmenter.normalise(images)))


def export_onnx(segmenter: Segmenter, card: ModelCard, path: Path) -> str:
    """Write one file with weights, normalisation and card; return what was compared. Raises ExportError."""
    with _quiet(is_exporting=True):
        program = torch.onnx.export(
            ExportNetwork(segmenter).eval(),
            (example_batch(card.spec),),
            dynamo=True,
            external_data=False,
            dynamic_shapes=DYNAMIC_SHAPES,
            input_names=[INPUT],
            output_names=[OUTPUT],
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    graph = model.graph
    # The exporter notes source lines, with the paths of this machine, at every node and value.
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    _add_padding(graph)
    model.producer_name, model.producer_version = "unet_trainer", __version__
    import_optional("onnx").helper.set_model_props(model, onnx_metadata(card))
    with _quiet(is_exporting=True):  # a file holds 2 GB at most
        content = add_digest(model.SerializeToString())
    compared: list[str] = []

    def verify(draft: Path) -> None:
        compared.append(compare(segmenter, OnnxEngine(draft, device="cpu").logits, pads=True))

    with atomic_open(path, verify) as file:
        file.write(content)
    return compared[0]


def _add_padding(graph: Any) -> None:
    """Pad images of any size as the Segmenter does, and cut the logits to their size. Without it a size that is no
    multiple of STRIDE gives other numbers, in silence."""
    make = import_optional("onnx").helper.make_node
    renamed = {INPUT: f"{INPUT}_padded", OUTPUT: f"{OUTPUT}_padded"}
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    nodes = [
        make("Shape", [INPUT], ["pad_size"], start=2, end=4),
        make("Neg", ["pad_size"], ["pad_negative_size"]),
        make("Constant", [], ["pad_stride"], value_ints=[STRIDE]),
        make("Mod", ["pad_negative_size", "pad_stride"], ["pad_missing"]),
        # before all axes, and behind those of images and channels
        make("Constant", [], ["pad_six_zeros"], value_ints=[0] * 6),
        make("Concat", ["pad_six_zeros", "pad_missing"], ["pad_pads"], axis=0),
        make("Pad", [INPUT, "pad_pads"], [renamed[INPUT]], mode="edge"),
        *graph.node,
        make("Constant", [], ["pad_corner"], value_ints=[0, 0]),
        make("Constant", [], ["pad_axes"], value_ints=[2, 3]),
        make("Slice", [renamed[OUTPUT], "pad_corner", "pad_size", "pad_axes"], [OUTPUT]),
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    for value in (*graph.input, *graph.output):
        for index, name in ((2, "height"), (3, "width")):
            value.type.tensor_type.shape.dim[index].dim_param = name


def onnx_metadata(card: ModelCard) -> dict[str, str]:
    """The card for this program, and its main points for people and other programs. Lists are JSON."""
    spec, image = card.spec, card.spec.image
    units = "0 to 255" if image.is_8bit else f"{image.depth}, about {image.low:g} to {image.high:g}"
    units = f"in the files' own units ({units})"
    how = "cut images at their own resolution into overlapping tiles (height, width), and take the mean of their logits"
    if spec.fit == "resize":
        how = "resize each image to trained_size (height, width), and the logits back"
    lists = {
        "classes": spec.id_names,
        "class_colours": spec.id_colours,
        "mask_values": spec.coding.mask_values,
        "image_mean": image.mean,
        "image_std": image.std,
        "trained_size": spec.image_size,
        "tile": None if spec.fit == "resize" else spec.tile or spec.image_size,
    }
    return {
        CARD_KEY: card.to_json(),
        "input": f"{INPUT}: N,{image.channels},H,W float32 {units}, not normalised; any H and W",
        "output": f"{OUTPUT}: N,{spec.num_ids},H,W float32; argmax over axis 1 is the class of a pixel",
        "image_channels": str(image.channels),
        "image_depth": image.depth,
        "normalize": spec.normalize,
        "fit": spec.fit,
        "size_advice": how,
        **{name: json.dumps(value, ensure_ascii=False) for name, value in lists.items()},
    }


def export_pt2(segmenter: Segmenter, card: ModelCard, path: Path) -> str:
    """Write one file with the input and output of the .onnx file, and the card. Raises as export_onnx."""
    content, network = io.BytesIO(), ExportNetwork(segmenter).eval()
    with _quiet(is_exporting=True):
        program = torch.export.export(network, (example_batch(card.spec),), dynamic_shapes=DYNAMIC_SHAPES)
        torch.export.save(program, content, extra_files={CARD_FILE: card.to_json()})
    with _quiet(), torch.inference_mode():
        loaded = torch.export.load(io.BytesIO(content.getvalue())).module()
        compared = compare(segmenter, lambda images: loaded(_to_nchw(images)), LEAST_PT2_SIDE)
    write_bytes_atomically(path, content.getvalue())
    return compared


def export_smp(segmenter: Segmenter, card: ModelCard, folder: Path) -> str:
    """Write a folder with the bare network; normalisation, classes and sizes are in a JSON file and the README. An
    earlier export is replaced once the new one is compared. Raises ExportError."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp") as name:
        draft, old = Path(name) / "new", Path(name) / "old"
        network: Any = segmenter.network
        network.save_pretrained(draft)
        if card.spec.encoder == SMALL_RESNET:  # its options are no plain values; timm has the same under this name
            plain = read_json(draft / "config.json")
            plain = {key: value for key, value in plain.items() if key not in SMALL_RESNET_OPTIONS}
            (draft / "config.json").write_text(json.dumps(plain | {"encoder_name": "tu-test_resnet"}), encoding="utf-8")
        indented = json.dumps(json.loads(card.to_json()), indent=2, ensure_ascii=False) + "\n"
        (draft / SMP_CARD).write_text(indented, encoding="utf-8")
        (draft / README).write_text(smp_readme(card), encoding="utf-8")
        for file in draft.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner alone
        # smp prints where it loads from
        with torch.inference_mode(), _quiet(), contextlib.redirect_stdout(io.StringIO()):
            loaded = smp.from_pretrained(str(draft)).eval()
            compared = compare(segmenter, Segmenter(card.spec, loaded, channels_last=False), pads=True)
        if folder.exists():
            folder.rename(old)
        draft.rename(folder)
    return compared


def smp_readme(card: ModelCard) -> str:
    """Of the folder, instead of smp's, which states the licence of its own code as that of the weights."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["cell"] = lambda text: " ".join(text.split()).replace("|", "\\|")  # Markdown has no escapes
    values = {"card": card, "spec": card.spec, "card_file": SMP_CARD, "stride": STRIDE, "flat": FLAT}
    return environment.from_string(README_TEMPLATE.read_text(encoding="utf-8")).render(values)


def example_batch(spec: SegmenterSpec) -> torch.Tensor:
    """N,C,H,W of about the trained size; a tracer takes a single image, or equal sides, for fixed."""
    height, width = _trained_size(spec)
    return _to_nchw(comparison_images(spec.image, 2, height, width + STRIDE))


def _to_nchw(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 3, 1, 2).float().contiguous()


def _trained_size(spec: SegmenterSpec) -> tuple[int, int]:
    """Rounded to multiples of STRIDE."""
    height, width = (min(MAX_SIDE, max(2 * STRIDE, -(-side // STRIDE) * STRIDE)) for side in spec.image_size)
    return height, width


def comparison_images(image: ImageSpec, count: int, height: int, width: int) -> torch.Tensor:
    """N,H,W,C with coarse shapes and fine noise, spread as the model's training images, in the files' own units."""
    generator = torch.Generator().manual_seed(height * 10_000 + width * 10 + count)
    coarse = torch.randn(count, image.channels, max(1, height // 16), max(1, width // 16), generator=generator)
    noise = torch.randn(count, image.channels, height, width, generator=generator)
    mixed = F.interpolate(coarse, (height, width), mode="bilinear").add(noise, alpha=0.5).permute(0, 2, 3, 1)
    pixels = mixed * torch.tensor(image.std) + torch.tensor(image.mean)
    return pixels.round().clamp(0, 255).to(torch.uint8) if image.is_8bit else pixels.contiguous()


def compare(
    segmenter: Segmenter, run: Callable[[torch.Tensor], torch.Tensor], least_side: int = STRIDE, pads: bool = False
) -> str:
    """Run batches of N,H,W,C images of several sizes that the network can take through both, and say what came out.
    `pads`: also of sizes that are no multiples of STRIDE. Raises ExportError where they differ beyond TOLERANCE."""
    spec = segmenter.spec
    height, width = _trained_size(spec)
    batches = [(1, height, width), (2, height, width + STRIDE), (3, 3 * STRIDE, 5 * STRIDE)]
    batches += [(1, least_side, least_side)]
    batches += [(2, 45, 83), (1, height - 1, width + 7)] if pads else [(1, height + STRIDE, 2 * STRIDE)]
    if _run_or_none(segmenter, comparison_images(spec.image, 1, height, width + STRIDE)) is None:
        batches = [(1, *spec.image_size), (2, *spec.image_size)]  # it takes the size of training alone
    compared, differences, largest, num_pixels, num_changed = [], [0.0], [0.0], 0, 0
    for count, rows, columns in batches:
        images = comparison_images(spec.image, count, rows, columns)
        if (expected := _run_or_none(segmenter, images)) is None:
            continue
        where = f"{counted(count, 'image')} of {columns}×{rows}"
        try:
            found = run(images)
            differences.append((found - expected).abs().max().item())
        except Exception as error:  # of whichever library runs the file
            raise ExportError(f"the exported file fails for {where}: {first_line(error)[:300]}") from None
        largest.append(expected.abs().max().item())
        if found.shape != expected.shape or not differences[-1] <= TOLERANCE * max(1.0, largest[-1]):  # NaN is not less
            what = f"they differ by {differences[-1]:.2g} and reach {largest[-1]:.3g}"
            raise ExportError(f"the exported file computes other logits for {where}: {what}")
        compared.append(f"{count} of {columns}×{rows}")
        num_pixels += count * rows * columns
        num_changed += int((found.argmax(1) != expected.argmax(1)).sum())
    if len(compared) < 2:
        raise ExportError("the network can compute too few of the sizes that an export is compared on")
    changed = f"{num_changed} of {num_pixels} pixels change class" if num_changed else "no pixel changes class"
    logits = f"logits reach {max(largest):.1f} and differ by {max(differences):.1e} at most"
    return f"images: {', '.join(compared)}; {logits}; {changed}"


@torch.inference_mode()
def _run_or_none(segmenter: Segmenter, images: torch.Tensor) -> torch.Tensor | None:
    try:
        return segmenter(images)
    except (RuntimeError, ValueError, AssertionError):  # too small for its deepest stage, or for a fixed size
        return None


@contextlib.contextmanager
def _quiet(is_exporting: bool = False) -> Iterator[None]:
    """Silence exporters, which warn about themselves and log what they raise; that becomes an ExportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        except Exception as error:  # the exporters' errors share no base class
            if not is_exporting:
                raise
            cause = error.__cause__ or error  # the outer one of torch.onnx is a page of advice
            raise ExportError(f"the network cannot be traced ({first_line(cause)[:200]})") from None
        finally:
            logging.disable(logging.NOTSET)
