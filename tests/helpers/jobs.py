"""Jobs of several processes: forked like torchrun would start them, without the seconds that imports take; or by torchrun itself."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from helpers.killed_runs import HANG_SECONDS, TESTS, be_quiet, start, use_small_network
from helpers.ports import free_port
from helpers.project import ROOT
from helpers.runs import words

SCRIPT = Path(__file__)


class ForkedJob:
    """`faults`: rank → fault, as `install` takes them; `data_dirs`: of ranks that have another; `machines`: how many processes each
    has. Each process writes rankN.log and rankN.json into the folder."""

    def __init__(self, settings, folder, world_size=2, faults=None, network="small", data_dirs=None, machines=None):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        port = str(free_port())
        self.processes = []
        places = [(number, size) for size in machines or [world_size] for number in range(size)]
        for rank, (number, size) in enumerate(places):
            numbers = {"RANK": rank, "LOCAL_RANK": number, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": size}
            environment = {name: str(value) for name, value in numbers.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            fault = (faults or {}).get(rank)
            own = {"data_dir": data_dirs[rank]} if rank in (data_dirs or {}) else {}
            self.processes.append(start(train_rank, {**settings, **own}, str(self.folder), environment, fault, network))

    def has_started(self):
        """From now on each process finds out by itself that another is gone; before, torchrun ends those that wait for it."""
        return "Start-up: " in self.log(0)

    def finish(self):
        """Exit codes by rank; none hangs."""
        deadline = time.monotonic() + HANG_SECONDS
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        hanging = [process for process in self.processes if process.exitcode is None]
        for process in hanging:
            process.kill()
        assert not hanging, f"a process hangs\n{self.said()}"
        return [process.exitcode for process in self.processes]

    def kill(self, rank):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(self.processes[rank].pid, signal.SIGKILL)

    def log(self, rank):
        file = self.folder / f"rank{rank}.log"
        return file.read_text() if file.exists() else ""

    def said(self):
        return "\n".join(self.log(rank) for rank in range(len(self.processes)))

    def records(self, rank):
        """Of each epoch: a digest of the parameters and statistics, and confusion matrices."""
        return [json.loads(line) for line in (self.folder / f"rank{rank}.json").read_text().splitlines()]

    def have_same_bits(self):
        digests = [[one["digest"] for one in self.records(rank)] for rank in range(len(self.processes))]
        return all(one == digests[0] != [] for one in digests)


def train_rank(settings, folder, environment, fault, network):
    os.environ.update(environment)
    rank = environment["RANK"]
    be_quiet(f"{folder}/rank{rank}.log")
    install(fault, f"{folder}/rank{rank}.json", network)
    from train_unet import main
    from unet_trainer.system.signals import exit_process
    from unet_trainer.training import parallel

    parallel.START = timedelta(seconds=40)  # nobody ends the others, as torchrun would
    parallel.TRAINING = timedelta(seconds=30)

    exit_process(main(words(settings)))


def install(fault, records, network):
    """In a process that is to train: a network, what is noted of each epoch, and faults `kind@batch, ...`, of batches begun."""
    from torch.nn import Identity

    from helpers.steps import SmallNetwork, everything
    from unet_trainer.training import build
    from unet_trainer.training.run import Run

    if network == "small":
        use_small_network()
    elif network == "plain":  # no batch norm: the gradient of a batch is the mean of its images' gradients
        build.build_network = lambda spec, weights: SmallNetwork(norm=Identity)
    judge = Run.judge

    def noted(self, row, scores):
        improved = judge(self, row, scores)
        with Path(records).open("a") as file:
            tensors = (tensor.cpu().numpy().tobytes() for tensor in everything(self.components))
            digest = hashlib.sha256(b"".join(tensors)).hexdigest()
            note = {"digest": digest, "confusion": scores.confusion, "alone": evaluate_alone(self), **graphs(self)}
            file.write(json.dumps(note) + "\n")
        return improved

    Run.judge = noted
    _use_small_buckets()
    others = {"memory while connecting": _fail_while_connecting, "pilots": _shorten_pilots}
    for kind, _, at in [one.partition("@") for one in (fault or "").split(", ") if one]:
        if kind in others:
            others[kind](float(at))
        else:
            _fail_at(int(at), FAULTS[kind])


def _fail_at(number, fault):
    from unet_trainer.training.step import TrainStep

    take, count = TrainStep.__call__, [0]

    def faulty(self, group, learning_rate, metrics):
        def batches(taken=group.batches):
            for batch in taken:
                count[0] += 1
                yield fault(self, batch) if count[0] == number else batch

        if self.sync is not None and learning_rate:  # 0 while steps are tried
            group = group._replace(batches=batches())
        return take(self, group, learning_rate, metrics)

    TrainStep.__call__ = faulty


def _fail_while_connecting(_):
    import torch

    from unet_trainer.training import run, step

    to_device, connect = step.to_device, run.connect_gradients

    def fail(*arguments):
        step.to_device = to_device
        raise torch.OutOfMemoryError("while connecting")

    def connect_with_too_little_memory(*arguments):
        step.to_device, run.connect_gradients = fail, connect
        return connect(*arguments)

    run.connect_gradients = connect_with_too_little_memory


def _use_small_buckets():
    """Of gradients: a small network has several, as a large one has."""
    import torch.distributed

    from unet_trainer.training import parallel

    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 256

    class SmallBuckets(parallel.DistributedDataParallel):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options, bucket_cap_mb=0.0005)

    parallel.DistributedDataParallel = SmallBuckets


def _shorten_pilots(rate):
    """Three steps each, of which the second wins; the rate is the first one's."""
    from unet_trainer.config import auto_training
    from unet_trainer.training import pilots

    pilots.num_pilot_steps = lambda num_steps: 3
    pilots.is_better = lambda lower, higher: higher.learning_rate == rate
    auto_training.choose_learning_rate = lambda *_, **__: (rate, "tried")


def _run_out_of_memory(step, batch):
    import torch

    raise torch.OutOfMemoryError("in a step")


FAULTS = {  # of a step and its batch, which they return
    "nan": lambda step, batch: batch._replace(images=batch.images.float() * float("nan")),
    "bug": lambda step, batch: 1 / 0,
    "memory": _run_out_of_memory,
    "hang": lambda step, batch: time.sleep(3600),
    "die": lambda step, batch: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda step, batch: os.kill(os.getpid(), signal.SIGTERM) or batch,
}


def graphs(run):
    """CUDA graphs: how often inductor did without, and how often ours were replayed."""
    from torch._dynamo.utils import counters

    replays = getattr(run.components.train_step.launcher, "num_replays", 0)
    return {"skips": counters["inductor"]["cudagraph_skips"], "replays": replays}


def evaluate_alone(run):
    """The confusion matrix of the whole validation set, counted by this process alone."""
    from unet_trainer.loading.loader import Loader
    from unet_trainer.training.evaluation import evaluate

    loader = Loader(run.loaders.val.dataset, run.loaders.val.batches.batch_size, shuffle=False)
    return evaluate(run.components.eval_step, loader).scores.confusion


def torchrun(settings, *options, log, fault="", records="", network="small"):
    """torchrun with this file as its script; the fault is of the first start only: `rank:kind@batch`."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}", "JOB_FAULT": fault}
    environment |= {"JOB_RECORDS": str(records or Path(log).with_suffix("")), "JOB_NETWORK": network}
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), *words(settings)]
    with Path(log).open("ab") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def end(process, seconds=HANG_SECONDS):
    """Its exit code; a torchrun that hangs takes its workers with it."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


if __name__ == "__main__":
    from train_unet import main
    from unet_trainer.system.signals import exit_process

    rank, _, wanted = os.environ["JOB_FAULT"].partition(":")
    is_hit = rank == os.environ["RANK"] and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    import torch

    torch.set_num_threads(1)
    install(
        wanted if is_hit else None, os.environ["JOB_RECORDS"] + f".rank{os.environ['RANK']}", os.environ["JOB_NETWORK"]
    )
    exit_process(main(sys.argv[1:]))
