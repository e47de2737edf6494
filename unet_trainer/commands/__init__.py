"""python train_unet.py COMMAND: module and function of each, imported when used and called with (arguments,
script_config)."""

COMMANDS = {
    "check": "unet_trainer.commands.doctor:check",
    "bench": "unet_trainer.commands.bench:main",
    "doctor": "unet_trainer.commands.doctor:main",
    "evaluate": "unet_trainer.commands.evaluate:main",
    "predict": "unet_trainer.commands.predict:main",
    "export": "unet_trainer.commands.export:main",
    "try": "unet_trainer.commands.try_model:main",
    "runs": "unet_trainer.commands.runs:list_runs",
    "report": "unet_trainer.commands.runs:report",
    "compare": "unet_trainer.commands.runs:compare",
    "shard": "unet_trainer.commands.export:shard",
}
