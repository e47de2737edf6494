"""python train_unet.py try RUN: a page in the browser that shows what a model makes of an image. Served to this machine alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unet_trainer.commands.command_line import CommandParser, Script
from unet_trainer.config.errors import UserError
from unet_trainer.system.console import Console
from unet_trainer.system.local_server import add_page_options, bind, check_port, open_browser, say_address, serve

if TYPE_CHECKING:  # a typo is answered before torch is loaded
    from unet_trainer.datasets.pairs import Pair
    from unet_trainer.inference.try_server import TryServer


def main(arguments: Sequence[str], script: Script) -> int:
    parser = CommandParser("train_unet.py try", description="Shows in a browser what a model makes of an image.")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN | FILE | data_dir=FOLDER",
        help="a run's name or folder, or a .pt or .onnx file (the newest run if left out); where its data are now",
    )
    add_page_options(parser)
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda, cuda:N or mps")
    given = parser.parse_intermixed_args(arguments)
    model, data_dir = read_words(given.words)
    check_port(given.port)
    config = script.config([f"device={given.device}"])
    console = Console()

    from unet_trainer.inference.engine import load_engine
    from unet_trainer.inference.model_files import find_model
    from unet_trainer.inference.predictor import Predictor
    from unet_trainer.inference.try_server import TryServer

    path = find_model(model, Path(config.checkpoint_dir))
    pairs, note = validation_pairs(path, data_dir)
    predictor = Predictor(load_engine(path, config.device))
    server = bind(given.host, given.port, lambda address: TryServer(address, predictor, pairs, note))
    server.warm_up()
    say_what_is_served(console, server, given.host)
    if not given.no_browser:
        open_browser(server.url)
    return serve(server, console)


def read_words(words: Sequence[str]) -> tuple[str | None, Path | None]:
    """The model and the data_dir, each if it was given."""
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    models = [word for word in words if word not in settings]
    for setting in settings:
        if not setting.startswith("data_dir="):
            raise UserError(f"{setting}: try takes data_dir=FOLDER and no other setting; the model has its own")
    if len(settings) > 1:
        raise UserError("data_dir: given twice; leave one of them out")
    if len(models) > 1:
        raise UserError(f"got {len(models)} models ({', '.join(models)}); need one run or file")
    return next(iter(models), None), next((Path(setting.partition("=")[2]) for setting in settings), None)


def validation_pairs(model: Path, data_dir: Path | None) -> tuple[tuple[Pair, ...], str]:
    """The run's validation images, or why there are none. A data_dir that was asked for must hold them."""
    from unet_trainer.inference.inputs import find_validation_pairs

    try:
        return find_validation_pairs(model, data_dir), ""
    except UserError as error:
        if data_dir is not None:
            raise
        return (), " ".join(str(error).split())


def say_what_is_served(console: Console, server: TryServer, host: str) -> None:
    card = server.predictor.engine.card
    score = "" if card.val_iou is None else f", val IoU {card.val_iou:.4f}"
    epoch = "" if card.epoch is None else f", epoch {card.epoch}"
    console.say(f"Model: {card.run_name}{epoch}{score}, on {server.predictor.engine.description}")
    if server.pairs:
        console.say(f"Validation images: {len(server.pairs)}")
    else:
        console.note(f"there are no validation images to choose from: {server.note}")
    say_address(console, server, host, "use the model and see the validation images")
