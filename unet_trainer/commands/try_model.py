"""python train_unet.py try: what a model makes of an image, on a page of gradio for this machine alone."""

import os
import socket
import sys
import tempfile
import time
import webbrowser
from contextlib import suppress
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unet_trainer.commands.command_line import CommandParser, ScriptConfig, split_words
from unet_trainer.config.errors import UserError
from unet_trainer.system.console import Console, first_line
from unet_trainer.system.signals import skip_teardown


def main(arguments: list[str], script_config: ScriptConfig) -> None:
    words = ("RUN | FILE | data_dir=FOLDER", "a run or its model file (else the newest run); where its data are now")
    parser = CommandParser("try", "Shows in a browser what a model makes of an image.", words, "device")
    parser.add_argument("--no-browser", action="store_true", help="print the address only, do not open it")
    given = parser.parse_intermixed_args(arguments)
    models, settings = split_words(given.words, "try", ("data_dir",))
    config, images = script_config([f"device={given.device}"]), []
    if find_spec("gradio") is None:  # before torch is loaded, which takes seconds
        raise UserError("try needs gradio: python -m pip install -r requirements-try.txt")

    from unet_trainer.inference.engine import find_model, load_engine
    from unet_trainer.inference.evaluation_data import find_validation_pairs
    from unet_trainer.inference.predictor import Predictor

    path = find_model(" ".join(models) or None, Path(config.checkpoint_dir))
    with suppress(*(() if settings else (UserError,))):  # data that are named must be there
        images = [(pair.name, str(pair.image)) for pair in find_validation_pairs(path, *map(Path, settings.values()))]
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as uploads:
        os.environ.update(GRADIO_TEMP_DIR=uploads, GRADIO_ANALYTICS_ENABLED="False", GRADIO_RUN_HISTORY="False")
        serve(Predictor(load_engine(path, config.device)), images, not given.no_browser)


def answer(predictor: Any, path: str) -> tuple[Any, ...]:
    """Predict a file, which gradio would decode to 8 bits; return no upload, a sentence, shares, overlay, mask."""
    import gradio
    from PIL import Image

    from unet_trainer.images.drawing import overlay, to_display
    from unet_trainer.images.image_spec import read_small
    from unet_trainer.inference.predictor import all_ids

    spec, file, started = predictor.spec, Path(path), time.perf_counter()
    try:
        if (image := read_small(file, spec.image)) is None:
            raise UserError("too large for a page; python train_unet.py predict takes images of any size")
        ids = all_ids(predictor.predict_image(image.pixels))
    except (UserError, MemoryError, RuntimeError) as error:  # torch without memory raises a RuntimeError
        raise gradio.Error(escape(f"{file.name}: {first_line(error)}"), print_exception=False) from None
    about = f"{file.name}: {ids.shape[1]}×{ids.shape[0]} pixels, {time.perf_counter() - started:.2f} s"
    drawn, mask = Image.fromarray(overlay(to_display(image.pixels), ids, spec.has_background)), Image.fromarray(ids)
    drawn.thumbnail((1600, 1600))
    mask.putpalette([value for colour in spec.id_colours for value in colour])  # its values stay the class ids
    shares = [(f"{count / ids.size:.2%}", name) for count, name in zip(mask.histogram(), spec.id_names, strict=False)]
    return None, " ".join(filter(None, (about, predictor.take_scale_warning()))), shares, drawn, mask


def serve(predictor: Any, images: list[tuple[str, str]], opens_browser: bool) -> None:
    """Serve until Ctrl-C, below a random path: neither other users of the machine nor pages of other sites know it."""
    import gradio as gr
    import uvicorn
    from starlette.applications import Starlette

    colours = dict(zip(predictor.spec.id_names, map("rgb{}".format, predictor.spec.id_colours), strict=True))
    model = predictor.engine.card.run_name + predictor.engine.card.describe()
    with gr.Blocks(title=model, analytics_enabled=False) as page, gr.Row():
        with gr.Column():
            file = gr.File(label="Drop an image here", height=120)
            chosen = gr.Dropdown(images, label="Validation images", visible=bool(images))
            views = [file, gr.Textbox(label=model), gr.HighlightedText(label="Classes", color_map=colours)]
        views += [gr.Image(label=key, format="png", buttons=["fullscreen", "download"]) for key in ("Overlay", "Mask")]
        for event, source in [(file.upload, file), (chosen.select, chosen), (page.load, chosen)][: 3 if images else 1]:
            event(lambda path: answer(predictor, path), source, views, concurrency_limit=1, concurrency_id="model")
    listener, path = socket.create_server(("127.0.0.1", 0)), f"/{os.urandom(16).hex()}"
    app = gr.mount_gradio_app(Starlette(), page, path, max_file_size="64mb", footer_links=[])
    url = f"http://127.0.0.1:{listener.getsockname()[1]}{path}/"
    Console().say(f"Open {url}\nCtrl-C ends it.")
    if opens_browser and sys.stdout.isatty() and (sys.platform != "linux" or "DISPLAY" in os.environ):
        webbrowser.open(url)
    skip_teardown()  # which would wait for a prediction
    uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)).run([listener])
