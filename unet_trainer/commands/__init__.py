"""python train_unet.py COMMAND: one module per command, with `main(arguments, script)`, imported when it is used."""

COMMANDS = {
    "check": "unet_trainer.commands.check",
    "bench": "unet_trainer.commands.bench",
    "doctor": "unet_trainer.commands.doctor",
    "evaluate": "unet_trainer.commands.evaluate",
    "predict": "unet_trainer.commands.predict",
    "export": "unet_trainer.commands.export",
    "try": "unet_trainer.commands.try_model",
    "runs": "unet_trainer.commands.runs",
    "report": "unet_trainer.commands.report",
    "watch": "unet_trainer.commands.watch",
    "compare": "unet_trainer.commands.compare",
    "shard": "unet_trainer.commands.shard",
}
# What other tools call a command, the words that stand for it here, and those that a bare one needs.
OTHER_TOOLS_COMMANDS = (
    ("train fit run start", "{}", "CONFIG | data_dir=FOLDER"),
    ("eval val validate score", "evaluate {}", "RUN"),
    ("test", "evaluate {} --split test", "RUN"),
    ("infer inference detect segment pred", "predict {} --out predictions", "RUN IMAGES"),
    ("resume continue", "--resume {}", ""),
    ("convert", "export {}", "RUN"),
    ("serve app gui", "try {}", "RUN"),
    ("list ls", "runs {}", ""),
    ("benchmark profile", "bench {}", ""),
    ("info env", "doctor {}", ""),
    ("inspect lint", "check {}", "data_dir=FOLDER"),
    ("help", "{} --help", ""),
    ("version", "--version", ""),
)
