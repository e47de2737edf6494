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
