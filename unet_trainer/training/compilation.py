"""Tries the steps of a run before it begins, compiles them, and splits batches into smaller parts where memory runs
out."""

import contextlib
import gc
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch._functorch import config as functorch_config

from unet_trainer.config.errors import TrainingFailed, UserError
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.schema import OWN
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.tiling import Size
from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.worker_pool import to_device
from unet_trainer.model.fast_layers import use_fast_layers
from unet_trainer.model.losses import TERMS
from unet_trainer.system.console import Console, cause_line, counted, first_line
from unet_trainer.training.async_device import CudaGraphCache, DirectLauncher, HostCopy
from unet_trainer.training.build import Components, Loaders, eval_batch_size
from unet_trainer.training.parallel import ALONE, Job
from unet_trainer.training.state import EpochMetrics

# Parts of a RuntimeError's text, in lower case.
MESSAGES = ("out of memory", "not enough memory", "defaultcpuallocator", "cublas_status_alloc", "cudnn_status_alloc")
# cuDNN: no algorithm gets the memory that it asks for, or there is none for such a layer
NO_ENGINE = "unable to find an engine"
KEEPS = ("autograd_cache_allow_custom_autograd_functions",)  # of earlier compiling, on the disk
# the latter computes what is independent in one launch: the casts of the weights
OPTIONS = {"triton.cudagraphs", "combo_kernels"}
MIN_EVAL_PIXELS = 2**26  # of a validation; for fewer, compiling it takes longer than it saves in a hundred
SHORT_MEMORY = 0.1  # share of a GPU's memory that is left
Result = TypeVar("Result")
PIXEL_MEANS = frozenset(name for name, term in TERMS.items() if term.is_pixel_mean)


@contextlib.contextmanager
def restoring(components: Components) -> Iterator[None]:
    """Steps taken inside change nothing of the state."""
    state, optimizer = components.state, components.state.optimizer
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    saved = HostCopy(state.state_dict()).content()
    try:
        yield
    finally:
        state.load_state_dict(saved)
        components.train_step.abandon_group()
        for group, values in zip(optimizer.param_groups, options, strict=True):
            group.update(values)  # the learning rate


def try_steps(components: Components, batch: Batch, eval_batch: Batch, num_times: int = 1) -> None:
    """Takes the steps that the run will take: training with the encoder frozen, if it will be, and not; then
    evaluation. The optimizer steps too, if it never has, so that its memory is tried."""
    train_step, eval_step = components.train_step, components.eval_step
    metrics = EpochMetrics(train_step.segmenter.spec.num_classes, train_step.device)
    states = train_step.optimizer.state.values()  # SGD's momentum is there from the start
    has_stepped = any("step" in state or bool(state["momentum_buffer"].any()) for state in states)
    now, thawed = components.state.epoch, components.freeze_encoder_epochs
    for epoch in (now, thawed) if now < thawed else (now,):
        components.set_training_mode(epoch)
        for _ in range(num_times):
            train_step.begin_group(1, 0)
            train_step(batch, metrics)
        if not has_stepped:
            train_step.optimizer_step(metrics, learning_rate=0.0)
    eval_metrics = eval_step.new_metrics()
    eval_step.segmenter.eval()
    for _ in range(num_times):
        eval_step(eval_batch, eval_metrics)
    metrics.loss()  # waits for the device


def compile_steps(
    components: Components, batch: Batch, eval_batch: Batch, with_eval: bool = True
) -> tuple[str | None, Callable[[], None]]:
    """Compiles the forward pass of training, and that of evaluation `with_eval`, and tries both on a batch each.
    Returns why it failed, with all as it was before, or None; and what makes it so.

    On CUDA the layers get their faster forms, cuDNN searches for the fastest kernels (5 % for some seconds), and the
    compiled functions are replayed as CUDA graphs: below batch 16 the step is bound by kernel launches.
    """
    train_step, eval_step = components.train_step, components.eval_step
    eager = train_step.forward, eval_step.forward
    on_cuda = train_step.device.type == "cuda"
    options = dict.fromkeys(OPTIONS & set(torch._inductor.list_options()), True) if on_cuda else None
    compiled = partial(torch.compile, dynamic=False, options=options)
    compiled_steps = (train_step, eval_step) if with_eval else (train_step,)
    restores = [use_fast_layers(step.segmenter.network) for step in compiled_steps] if on_cuda else []
    train_step.launcher = DirectLauncher()

    def undo() -> None:
        train_step.forward, eval_step.forward = eager
        train_step.launcher = DirectLauncher()
        torch.backends.cudnn.benchmark = False
        for restore in reversed(restores):
            restore()

    try:
        torch.compiler.reset()  # else a fifth run in one process finds the cache of compiled code full and stays eager
        train_step.is_trial = True
        if train_step.sync is not None:
            train_step.sync.prepare_compiler()
        train_step.forward = _replayed(compiled(train_step.forward))
        if with_eval:
            eval_step.forward = _replayed(compiled(eval_step.forward))
        # Layers with a gradient of their own are traced, so that what is kept of them is found again by what they
        # compute.
        keeps = {name: True for name in KEEPS if hasattr(functorch_config, name)}
        with (
            restoring(components),
            warnings.catch_warnings(),
            _without_garbage_collection(),
            functorch_config.patch(keeps),
        ):
            warnings.simplefilter("ignore")  # advice to compiler developers
            torch.backends.cudnn.benchmark = on_cuda and not torch.backends.cudnn.deterministic
            # here and not in a graph, which would keep the memory that kernels are tried with
            if torch.backends.cudnn.benchmark:
                with contextlib.suppress(torch.OutOfMemoryError), torch.compiler.set_stance("force_eager"):
                    try_steps(components, batch, eval_batch)
                release_device_memory(train_step.device, is_compiled=False)
            try_steps(components, batch, eval_batch, num_times=3)  # CUDA graphs: run, record, replay
    except Exception as error:  # a compiler may raise anything, and the eager steps still work
        undo()
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {cause_line(error)[:200]}", undo
    finally:
        train_step.is_trial = False
    train_step.launcher = CudaGraphCache() if on_cuda else DirectLauncher()
    return None, undo


@contextlib.contextmanager
def unsynchronized(network: torch.nn.Module) -> Iterator[None]:
    """Layers of SyncBatchNorm are plain ones inside: what a process tries by itself must not wait for the others."""
    layers = {module: type(module) for module in network.modules() if isinstance(module, torch.nn.SyncBatchNorm)}
    for layer in layers:
        layer.__class__ = torch.nn.BatchNorm2d  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, kind in layers.items():
            layer.__class__ = kind


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A compiler makes millions of objects that stay; collecting again and again takes seconds."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _replayed(compiled: Callable[..., Result]) -> Callable[..., Result]:
    def forward(*arguments: Any) -> Result:
        torch.compiler.cudagraph_mark_step_begin()  # from here on the outputs of the last replay may be overwritten
        return compiled(*arguments)

    return forward


def is_out_of_memory(error: BaseException) -> bool:
    """Allocators, drivers, cuBLAS, cuDNN and compilers each have their own message for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(message in text for message in MESSAGES) or (NO_ENGINE in text and _memory_is_short())


def _memory_is_short() -> bool:
    """While an error is handled, which holds the memory of the failed step."""
    if not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < SHORT_MEMORY * total


def peak_memory_gib(device: torch.device) -> tuple[float, float]:
    """Allocated and reserved since the start of the run; (0, 0) without a GPU. A CUDA graph takes its memory when it is
    recorded and shows nothing when it is replayed, so a peak of one epoch would be too low."""
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30


def out_of_memory_message(reason: str, device: torch.device) -> str:
    if device.type != "cuda":
        return f"out of memory ({reason})"
    peak, _ = peak_memory_gib(device)
    there_is = torch.cuda.get_device_properties(device).total_memory / 2**30
    said = "" if reason.startswith("CUDA out of memory") else f" ({reason})"
    return f"out of memory on {device}{said}: {peak:.1f} GiB were in use at the peak, {there_is:.1f} GiB are there"


def release_device_memory(device: torch.device, is_compiled: bool) -> None:
    """Returns cached memory to the device: it would be fragmented for the next try. CUDA graphs never give back the
    memory of the batches that they were recorded with, so compiled steps are dropped and compiled again for smaller
    ones."""
    if is_compiled:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def can_shrink(config: ResolvedConfig) -> bool:
    """Whether on_oom allows smaller parts of a batch, and there are any."""
    return config.on_oom == "shrink" and config.batch_parts < config.batch_size


def shrink(
    settings: Settings, components: Components, reason: str, console: Console, saved: str, can_go_on: bool
) -> None:
    """After memory ran out: doubles batch_parts if it `can_go_on`, or raises TrainingFailed. Not in the handler of the
    error, which still holds the memory of the step. `saved` says what there is to go on from."""
    config, device = settings.taken, components.numerics.device
    message = out_of_memory_message(reason, device)
    if not can_go_on:
        smaller = f"batch_size={max(1, config.batch_size // 2)} accumulation_steps={2 * config.accumulation_steps}"
        other = f"batch_parts={2 * config.batch_parts}" if can_shrink(config) else "a smaller encoder"
        ideas = [smaller, "on_oom=shrink" if config.on_oom == "stop" else other]
        ideas.append("a smaller image_size" if config.use_amp else "use_amp=true")
        raise TrainingFailed(f"{message}. Try {', or '.join(ideas)}; {saved}")
    num_parts = min(2 * config.batch_parts, config.batch_size)
    # Means over pixels are exact, statistics and overlaps are those of a part.
    overlaps = [name for name in config.loss if name not in PIXEL_MEANS]
    what = " and ".join(["batch norm statistics", *([", ".join(overlaps)] if overlaps else [])])
    console.warn(
        f"{message}. From here on a batch of {config.batch_size} goes through the model in {num_parts} parts "
        f"(batch_parts): {what} are computed over {counted(-(-config.batch_size // num_parts), 'image')} at a time, "
        "all else over the whole batch"
    )
    settings.change("memory ran out (on_oom: shrink)", batch_parts=num_parts)
    components.set_num_parts(num_parts)
    release_device_memory(device, config.compile_model)


def try_components(
    settings: Settings, components: Components, loaders: Loaders, console: Console, processes: Job = ALONE
) -> None:
    """Takes one step of each kind on a random batch, so that a model that cannot run, or that memory cannot hold, is
    reported before the run has a folder. Raises UserError or TrainingFailed."""

    def try_once() -> None:
        config = settings.taken
        batches = random_batches(config, components, loaders)
        try:
            with restoring(components):
                try_steps(components, *batches)
        except (ValueError, RuntimeError) as error:
            # the traceback leads to the caller's code
            if is_out_of_memory(error) or OWN in (config.architecture, *config.loss):
                raise
            names = ("architecture", "encoder", "batch_size", "image_size")
            described = ", ".join(f"{name}: {getattr(config, name)}" for name in names)
            raise UserError(f"the model cannot run with {described}: {first_line(error)[:300]}") from None

    fit_into_memory(try_once, settings, components, console, "nothing was begun", processes)


def compile_components(
    settings: Settings,
    components: Components,
    loaders: Loaders | None,
    console: Console,
    saved: str,
    processes: Job = ALONE,
) -> None:
    """Compiles the steps of every phase before the first epoch; if that fails, in any process, warns and leaves them
    uncompiled in
    all: compiled and uncompiled steps round differently, and all processes must keep the same weights."""

    val = None if loaders is None else loaders.val.dataset
    with_eval = val is None or len(val) * math.prod(val.tiling.size) >= MIN_EVAL_PIXELS

    def compile_once() -> tuple[str | None, Callable[[], None]]:
        return compile_steps(components, *random_batches(settings.taken, components, loaders), with_eval=with_eval)

    failure, undo = fit_into_memory(compile_once, settings, components, console, saved, processes)
    failures = [one for one in processes.all_gather(failure) if one is not None]
    if failures:
        if failure is None:
            undo()
        console.warn(f"compile_model: compiling failed, training continues uncompiled ({failures[0]})")
        settings.change(f"compiling failed ({failures[0]})", compile_model=False)


def fit_into_memory(
    attempt: Callable[[], Result],
    settings: Settings,
    components: Components,
    console: Console,
    saved: str,
    processes: Job = ALONE,
) -> Result:
    """What the attempt returns; repeats it with smaller parts of a batch while memory runs out, of any process, and
    on_oom allows it."""
    while True:
        own_reason = None
        try:
            with unsynchronized(components.state.segmenter.network):
                result = attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            own_reason = first_line(error)
        reason = next((one for one in processes.all_gather(own_reason) if one is not None), None)
        if reason is None:
            return result
        shrink(settings, components, reason, console, saved, can_shrink(settings.taken))


def connect_gradients(
    settings: Settings, components: Components, loaders: Loaders, console: Console, saved: str, processes: Job
) -> None:
    """In a job: the gradients of the parameters that are trained from here on are averaged. All processes at once."""
    from unet_trainer.training.parallel import GradientSync

    step = components.train_step

    def try_once() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        whole, _ = random_batches(settings.taken, components, loaders)
        images, masks = to_device((whole.images, whole.masks), step.device)
        size = -(-len(images) // step.num_parts)
        batch = images[:size], masks[:size], masks if step.num_parts > 1 else None
        step.optimizer.zero_grad(set_to_none=True)
        # what the averages will take
        spare = [torch.empty_like(weight) for weight in step.parameters for _ in range(2)]
        step.forward(*batch)[0].backward()
        del spare
        return batch

    step.disconnect()
    with restoring(components):
        batch = fit_into_memory(try_once, settings, components, console, saved, processes)
        step.sync = GradientSync(processes, step, batch, settings.taken.gradient_compression)


def random_batches(config: ResolvedConfig, components: Components, loaders: Loaders | None) -> tuple[Batch, Batch]:
    """One like the training batches and one like the largest evaluation batch; without loaders, masks have the images'
    size."""
    spec = components.state.segmenter.spec.image
    dataset = None if loaders is None else loaders.val.dataset
    train_batch = _random_batch(config.shape, spec, config.batch_size)
    eval_size = config.shape if dataset is None else dataset.tiling.size
    eval_batch = _random_batch(eval_size, spec, eval_batch_size(config, components.numerics.device, dataset))
    if dataset is not None and dataset.mask_sizes is not None:
        num_images, size = eval_batch.num_images, dataset.batch_mask_size
        masks = torch.zeros(num_images, *size, dtype=torch.uint8)
        eval_batch = eval_batch._replace(masks=masks, mask_sizes=(size,) * num_images)
    return train_batch, eval_batch


def _random_batch(size: Size, spec: ImageSpec, batch_size: int) -> Batch:
    shape = (batch_size, *size, spec.channels)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if not spec.is_8bit:
        images = images / 255 * (spec.high - spec.low) + spec.low
    return Batch(images, torch.zeros(batch_size, *size, dtype=torch.uint8), batch_size)
