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
# Commands and options of earlier versions, and what replaces each.
REMOVED_COMMANDS = {
    "watch": "open report.html in the run's folder; while the run goes on, it is rewritten and reloads itself",
}
_ROWS = "the table is printed, and each row is a run with run.json and metrics.csv in checkpoint_dir/bench"
_SERVED = "the page is for this machine alone, at a free port; ssh -L PORT:127.0.0.1:PORT shows it on another one"
REMOVED_OPTIONS = {
    "predict --time": "images per second are printed at the end; bench --step times the training step alone",
    "doctor --json": "doctor prints plain lines; --write FILE writes its config, check --json FILE what it finds",
    "bench --json": _ROWS,
    "bench --quick": "bench has at most four rows of five epochs; bench --step times the training step alone",
    "try --host": _SERVED,
    "try --port": _SERVED,
}
