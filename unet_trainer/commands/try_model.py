"""python train_unet.py try RUN: a page in the browser that shows what a model makes of an image. Served to this machine alone."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unet_trainer.commands.command_line import Script
from unet_trainer.config.errors import UserError
from unet_trainer.system.console import EXIT_DONE, Console

if TYPE_CHECKING:  # a typo is answered before torch is loaded
    from unet_trainer.datasets.pairs import Pair
    from unet_trainer.inference.predictor import Predictor
    from unet_trainer.inference.try_server import TryServer

LOCALHOST = "127.0.0.1"


def main(arguments: Sequence[str], script: Script) -> int:
    parser = argparse.ArgumentParser("train_unet.py try", description="Shows in a browser what a model makes of an image.")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN | FILE | data_dir=FOLDER",
        help="a run's name or folder, or a .pt or .onnx file (the newest run if left out); where its data are now",
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="of the page; a free one if left out")
    parser.add_argument(
        "--host",
        default=LOCALHOST,
        metavar="ADDRESS",
        help=f"other machines see the page there; {LOCALHOST}: this machine alone",
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address only, do not open it")
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda, cuda:N or mps")
    given = parser.parse_intermixed_args(arguments)
    model, data_dir = read_words(given.words)
    if not 0 <= given.port <= 65535:
        raise UserError(f"--port: got {given.port}; need a number from 1 to 65535, or leave it out for a free one")
    config = script.config([f"device={given.device}"])
    console = Console()

    from unet_trainer.inference.loaded_model import load_engine
    from unet_trainer.inference.model_files import find_model
    from unet_trainer.inference.predictor import Predictor

    path = find_model(model, Path(config.checkpoint_dir))
    pairs, note = validation_pairs(path, data_dir)
    predictor = Predictor(load_engine(path, config.device))
    server = start_server(given.host, given.port, predictor, pairs, note)
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
    from unet_trainer.inference.validation_images import find_validation_pairs

    try:
        return find_validation_pairs(model, data_dir), ""
    except UserError as error:
        if data_dir is not None:
            raise
        return (), " ".join(str(error).split())


def start_server(host: str, port: int, predictor: Predictor, pairs: Sequence[Pair], note: str) -> TryServer:
    from unet_trainer.inference.try_server import TryServer

    try:
        return TryServer((host, port), predictor, pairs, note)
    except OSError as error:
        key = f"--host {host}" if port == 0 else f"--port {port}"
        hint = "leave it out for this machine alone" if port == 0 else "leave it out for a free one"
        raise UserError(f"{key}: cannot be used ({error.strerror}); {hint}") from None


def say_what_is_served(console: Console, server: TryServer, host: str) -> None:
    from unet_trainer.inference.try_server import is_loopback

    card = server.predictor.engine.card
    score = "" if card.val_iou is None else f", val IoU {card.val_iou:.4f}"
    epoch = "" if card.epoch is None else f", epoch {card.epoch}"
    console.say(f"Model: {card.run_name}{epoch}{score}, on {server.predictor.engine.description}")
    if server.pairs:
        console.say(f"Validation images: {len(server.pairs)}")
    else:
        console.note(f"there are no validation images to choose from: {server.note}")
    if not is_loopback(host):
        console.warn(
            f"--host {host}: whoever has the address below can use the model and see the validation images, over a connection "
            "that is not encrypted"
        )
    console.say(f"Open {server.url}")
    console.say("Ctrl-C ends it.")


def open_browser(url: str) -> bool:
    """Opens the page if there is surely a browser with a window; a text browser would take the terminal."""
    has_display = sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if not has_display or not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    try:
        browser = webbrowser.get()
        return type(browser) is not webbrowser.GenericBrowser and browser.open(url)
    except (webbrowser.Error, OSError):
        return False


def serve(server: TryServer, console: Console) -> int:
    """Until Ctrl-C."""
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        console.say("\nStopped.")
    server.server_close()
    if server.is_busy:  # an image that is being computed cannot be stopped, and would be waited for
        sys.stderr.flush()
        os._exit(EXIT_DONE)
    return EXIT_DONE
